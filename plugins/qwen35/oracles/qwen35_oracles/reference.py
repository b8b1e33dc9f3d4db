"""The Qwen 3.5 text stack in float64 numpy: one position at a time, written for clarity, not speed.

An implementation of its own: it shares no code with the plugin, mlx-lm, mlx-vlm or transformers. The
convolution keeps its last inputs in a list, the recurrence is a matrix per value head, attention goes key by
key over growing lists, and a rotation is a product in the complex plane.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .files import Array, Tensors

NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm")


@dataclass
class Memory:
    """What one layer remembers of the positions before."""

    inputs: deque[Array] = field(default_factory=deque)  # of the convolution, oldest first
    matrices: dict[int, Array] = field(default_factory=dict)  # (Dv, Dk) per value head
    keys: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)


class Target:
    """A checkpoint directory, in the published layout or converted."""

    def __init__(self, path: Path):
        whole = json.loads((path / "config.json").read_text())
        self.config: dict[str, Any] = whole.get("text_config", whole)
        self.tensors = Tensors(path, whole)
        kernels = [name for name in self.tensors.stored if name.endswith("conv1d.weight")]
        self.published = any(self.tensors.stored[name].shape[1] == 1 for name in kernels)

    def run(self, ids: list[int]) -> dict[str, Array]:
        """logits (n, V), hidden (n, H) after the final norm, residual (n, layers, H) after every layer."""
        memories = [Memory() for _ in range(self.config["num_hidden_layers"])]
        rows = [self._position(token, place, memories) for place, token in enumerate(ids)]
        return {name: np.stack([row[name] for row in rows]) for name in ("logits", "hidden", "residual")}

    def _position(self, token: int, place: int, memories: list[Memory]) -> dict[str, Array]:
        x, after = self.tensors["embed_tokens.weight"][token], []
        for i, memory in enumerate(memories):
            layer = f"layers.{i}."
            full = (i + 1) % self.config["full_attention_interval"] == 0
            mixed = self.norm(layer + "input_layernorm", x)
            x = x + (self._attend(layer, mixed, place, memory) if full else self._recur(layer, mixed, memory))
            x = x + self._feed_forward(layer + "mlp.", self.norm(layer + "post_attention_layernorm", x))
            after.append(x)
        hidden = self.norm("norm", x)
        head = "embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"
        return {"logits": self.tensors[head] @ hidden, "hidden": hidden, "residual": np.stack(after)}

    # -- mixers ----------------------------------------------------------------------------------------

    def _recur(self, layer: str, x: Array, memory: Memory) -> Array:
        c, net = self.config, layer + "linear_attn."
        Hk, Hv = c["linear_num_key_heads"], c["linear_num_value_heads"]
        Dk, Dv = c["linear_key_head_dim"], c["linear_value_head_dim"]
        mixed = self._convolve(net, self.times(net + "in_proj_qkv", x), memory)
        q, k, v = np.split(mixed, [Hk * Dk, 2 * Hk * Dk])
        gate = self.times(net + "in_proj_z", x).reshape(Hv, Dv)
        rate = logistic(self.times(net + "in_proj_b", x))
        pace = np.log1p(np.exp(self.times(net + "in_proj_a", x) + self.tensors[net + "dt_bias"]))
        decay = np.exp(-np.exp(self.tensors[net + "A_log"]) * pace)
        out = []
        for head in range(Hv):
            source = head * Hk // Hv
            query, key = (unit(part.reshape(Hk, Dk)[source]) for part in (q, k))
            S = memory.matrices.get(head, np.zeros((Dv, Dk))) * decay[head]
            S = S + np.outer(rate[head] * (v.reshape(Hv, Dv)[head] - S @ key), key)
            memory.matrices[head] = S
            read = S @ query / np.sqrt(Dk)
            scaled = read / np.sqrt(np.mean(read**2) + c["rms_norm_eps"]) * self.tensors[net + "norm.weight"]
            out.append(scaled * swish(gate[head]))
        return self.times(net + "out_proj", np.concatenate(out))

    def _convolve(self, net: str, row: Array, memory: Memory) -> Array:
        """Depthwise, causal; positions before the first are zeros."""
        kernel = self.tensors[net + "conv1d.weight"].reshape(len(row), -1)
        memory.inputs.append(row)
        if len(memory.inputs) > kernel.shape[1]:
            memory.inputs.popleft()
        held = list(memory.inputs)
        return swish(sum(kernel[:, -1 - age] * past for age, past in enumerate(reversed(held))))

    def _attend(self, layer: str, x: Array, place: int, memory: Memory) -> Array:
        c, net = self.config, layer + "self_attn."
        heads, kv_heads, D = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        both = self.times(net + "q_proj", x).reshape(heads, 2, D)
        queries, gates = both[:, 0], both[:, 1]
        keys = self.times(net + "k_proj", x).reshape(kv_heads, D)
        memory.keys.append(np.stack([self.turned(self.norm(net + "k_norm", key), place) for key in keys]))
        memory.values.append(self.times(net + "v_proj", x).reshape(kv_heads, D))
        out = []
        for head in range(heads):
            query, source = self.turned(self.norm(net + "q_norm", queries[head]), place), head * kv_heads // heads
            weights = np.exp([query @ key[source] / np.sqrt(D) for key in memory.keys])
            seen = sum(w * value[source] for w, value in zip(weights, memory.values, strict=True)) / sum(weights)
            out.append(seen * logistic(gates[head]))
        return self.times(net + "o_proj", np.concatenate(out))

    # -- feed-forward ----------------------------------------------------------------------------------

    def _feed_forward(self, net: str, x: Array) -> Array:
        c = self.config
        if not c.get("num_experts"):
            return self._gated(net, x)
        scores = np.exp(self.times(net + "gate", x))
        scores = scores / scores.sum()
        chosen = np.argsort(-scores)[: c["num_experts_per_tok"]]
        total = scores[chosen].sum() if c.get("norm_topk_prob", True) else 1.0
        routed = sum(scores[e] / total * self._expert(net, int(e), x) for e in chosen)
        shared = logistic(self.times(net + "shared_expert_gate", x)) * self._gated(net + "shared_expert.", x)
        return routed + shared

    def _expert(self, net: str, e: int, x: Array) -> Array:
        fused = net + "experts.gate_up_proj"
        if fused in self.tensors:
            gate, up = np.split(self.tensors[fused][e], 2)
            down = self.tensors[net + "experts.down_proj"][e]
        else:
            gate, up, down = (self.tensors[f"{net}switch_mlp.{kind}_proj.weight"][e] for kind in ("gate", "up", "down"))
        return down @ (swish(gate @ x) * (up @ x))

    def _gated(self, net: str, x: Array) -> Array:
        return self.times(net + "down_proj", swish(self.times(net + "gate_proj", x)) * self.times(net + "up_proj", x))

    # -- pieces ----------------------------------------------------------------------------------------

    def times(self, name: str, x: Array) -> Array:
        """A projection without bias."""
        product: Array = self.tensors[f"{name}.weight"] @ x
        return product

    def norm(self, name: str, x: Array) -> Array:
        """RMS norm; published files hold the weight less one."""
        weight = self.tensors[f"{name}.weight"] + (1.0 if self.published else 0.0)
        scaled: Array = x / np.sqrt(np.mean(x**2) + self.config["rms_norm_eps"]) * weight
        return scaled

    def turned(self, x: Array, place: int) -> Array:
        """The leading dimensions turned by the position: (i, i + half) is a complex number."""
        rope = self.config["rope_parameters"]
        half = int(self.config["head_dim"] * rope["partial_rotary_factor"]) // 2
        angles = place * rope["rope_theta"] ** (-np.arange(half) / half)
        points = (x[:half] + 1j * x[half : 2 * half]) * np.exp(1j * angles)
        return np.concatenate([points.real, points.imag, x[2 * half :]])


def logistic(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    out: Array = 1 / (1 + np.exp(-x))
    return out


def swish(x: Array) -> Array:
    """x * logistic(x)."""
    return x * logistic(x)


def unit(x: Array) -> Array:
    """x at length 1, as far as it has any."""
    out: Array = x / np.sqrt(np.sum(x**2) + 1e-6)
    return out
