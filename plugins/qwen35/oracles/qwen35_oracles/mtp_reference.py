"""An MTP head once more, in float64 numpy without caches, read from its files by rules of its own.

Written from the description of the head (order of the halves, seven norms, gated attention with the gate in the second
half of each head's projection, rotation of the first dimensions, one row per committed position), not from the plugin.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

Array = np.ndarray


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    """Over the last axis."""
    y = np.exp(x - x.max(-1, keepdims=True))
    return y / y.sum(-1, keepdims=True)


class HeadReference:
    """The head in a directory, in float64.

    Args:
        path: directory of the head, or of the checkpoint that carries it.
        deltas: whether its norms are stored as w - 1.
    """

    def __init__(self, path: Path, deltas: bool = False):
        config = json.loads((path / "config.json").read_text())
        self.config: dict[str, Any] = config.get("text_config") or config
        external = config["model_type"] == "qwen3_5_mtp"
        self.weights = _tensors(path, external, config)
        if deltas:
            self.weights = {
                n: w + 1 if n.endswith("norm.weight") or "norm_" in n else w for n, w in self.weights.items()
            }
        self.depth = 1 + max(int(m[1]) for m in map(re.compile(r"layers\.(\d+)").match, self.weights) if m)

    # -- pieces ------------------------------------------------------------------------------------------------

    def norm(self, x: Array, name: str) -> Array:
        """Root mean square norm over the last axis."""
        return (
            x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * self.weights[f"{name}.weight"]
        )

    def linear(self, x: Array, name: str) -> Array:
        """x W^T."""
        return x @ self.weights[f"{name}.weight"].T

    def rotate(self, x: Array) -> Array:
        """x (n, heads, D): the first d dimensions of row p turned to position p, i paired with i + d/2."""
        rope = self.config["rope_parameters"]
        d = int(x.shape[-1] * rope["partial_rotary_factor"])
        angle = np.arange(len(x))[:, None, None] * rope["rope_theta"] ** (-np.arange(0, d, 2) / d)
        a, b, rest = x[..., : d // 2], x[..., d // 2 : d], x[..., d:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle), rest], -1)

    def attention(self, x: Array, name: str) -> Array:
        """Gated causal attention over x (n, H)."""
        n, heads, kv = len(x), self.config["num_attention_heads"], self.config["num_key_value_heads"]
        both = self.linear(x, f"{name}.q_proj").reshape(n, heads, -1)
        q, gate = np.split(both, 2, axis=-1)
        q = self.rotate(self.norm(q, f"{name}.q_norm"))
        k = self.rotate(self.norm(self.linear(x, f"{name}.k_proj").reshape(n, kv, -1), f"{name}.k_norm"))
        v = self.linear(x, f"{name}.v_proj").reshape(n, kv, -1)
        k, v = k.repeat(heads // kv, axis=1), v.repeat(heads // kv, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
        law = softmax(np.where(np.tri(n, dtype=bool), scores, -np.inf))
        mixed = np.einsum("hqk,khd->qhd", law, v) / (1 + np.exp(-gate))
        return self.linear(mixed.reshape(n, -1), f"{name}.o_proj")

    def feed_forward(self, x: Array, name: str) -> Array:
        """SwiGLU, or experts and a shared one."""
        if f"{name}.gate.weight" not in self.weights:
            return self.glu(x, name)
        law = softmax(self.linear(x, f"{name}.gate"))
        out = self.glu(x, f"{name}.shared_expert") / (1 + np.exp(-self.linear(x, f"{name}.shared_expert_gate")))
        for row, p in enumerate(law):
            best = np.argsort(-p)[: self.config["num_experts_per_tok"]]
            total = p[best].sum() if self.config["norm_topk_prob"] else 1.0
            for e in best:
                gate, up, down = (
                    self.weights[f"{name}.switch_mlp.{part}_proj.weight"][e] for part in ("gate", "up", "down")
                )
                out[row] += p[e] / total * (down @ (silu(gate @ x[row]) * (up @ x[row])))
        return out

    def glu(self, x: Array, name: str) -> Array:
        """down(silu(gate x) * up x)."""
        return self.linear(
            silu(self.linear(x, f"{name}.gate_proj")) * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj"
        )

    # -- the head ----------------------------------------------------------------------------------------------

    def run(self, embedded: Array, hidden: Array, hidden_first: bool = False) -> tuple[Array, Array]:
        """embedded, hidden (n, H): row p at position p. Returns (n, H): after and before the last norm."""
        parts = [self.norm(embedded, "pre_fc_norm_embedding"), self.norm(hidden, "pre_fc_norm_hidden")]
        x = self.linear(np.concatenate(parts[::-1] if hidden_first else parts, -1), "fc")
        for i in range(self.depth):
            x = x + self.attention(self.norm(x, f"layers.{i}.input_layernorm"), f"layers.{i}.self_attn")
            x = x + self.feed_forward(self.norm(x, f"layers.{i}.post_attention_layernorm"), f"layers.{i}.mlp")
        return self.norm(x, "norm"), x

    def drafts(
        self,
        tokens: Sequence[int],
        hidden: Array,
        table: Array,
        output: Array,
        count: int,
        ids: int | None = None,
        *,
        pre: bool = False,
        hidden_first: bool = False,
    ) -> tuple[list[int], list[Array], float]:
        """Greedy drafts after `tokens` (anchor last), the logits they are from, and the smallest top-2 gap.

        hidden: the target's states (n, H) of all committed positions; later rows get the head's own.
        table, output: embedding and output matrix (V, H) of the target; `ids` cuts the ids that can be drafted.
        """
        following, rows, gap = list(tokens[1:]), [], np.inf
        for _ in range(count):
            normed, raw = self.run(table[following], hidden, hidden_first)
            row = output @ normed[-1]
            rows.append(row)
            row = row[:ids]
            second, best = np.sort(row)[-2:]
            gap = min(gap, float(best - second))
            following.append(int(row.argmax()))
            hidden = np.concatenate([hidden, (raw if pre else normed)[-1:]])
        return following[len(tokens) - 1 :], rows, gap


# -- files -------------------------------------------------------------------------------------------------


def _tensors(path: Path, external: bool, config: dict[str, Any]) -> dict[str, Array]:
    """The head's tensors by their plain names, unpacked, experts stacked."""
    found: dict[str, mx.array] = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, value in mx.load(str(file)).items():
            inside = re.fullmatch(r"(?:model\.|language_model\.)*mtp\.(.+)", name)
            if inside:
                found[inside[1]] = value
            elif external or file.name in ("mtp.safetensors", "model-mtp-head.safetensors"):
                found[name] = value
    return _experts({name: np.array(value.astype(mx.float32), np.float64) for name, value in _unpacked(found, config)})


def _unpacked(found: dict[str, mx.array], config: dict[str, Any]) -> list[tuple[str, mx.array]]:
    table = config.get("quantization", {})
    out = []
    for name, value in found.items():
        base = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        if f"{base}.scales" in found:
            how = next((table[key] for key in (base, f"mtp.{base}") if key in table), table)
            scales, biases = found[f"{base}.scales"], found[f"{base}.biases"]
            value = mx.dequantize(value, scales, biases, how["group_size"], how["bits"])
        out.append((name, value))
    return out


def _experts(found: dict[str, Array]) -> dict[str, Array]:
    out: dict[str, Array] = {}
    single: dict[tuple[str, str], dict[int, Array]] = {}
    for name, value in found.items():
        fused, one = (
            re.fullmatch(r"(.+)\.experts\.(gate_up|down)_proj", name),
            re.fullmatch(r"(.+)\.experts\.(\d+)\.(.+)", name),
        )
        if one:
            single.setdefault((one[1], one[3]), {})[int(one[2])] = value
        elif not fused:
            out[name] = value
        elif fused[2] == "down":
            out[f"{fused[1]}.switch_mlp.down_proj.weight"] = value
        else:
            out[f"{fused[1]}.switch_mlp.gate_proj.weight"], out[f"{fused[1]}.switch_mlp.up_proj.weight"] = np.split(
                value, 2, 1
            )
    for (base, rest), experts in single.items():
        out[f"{base}.switch_mlp.{rest}"] = np.stack([experts[i] for i in range(len(experts))])
    return out
