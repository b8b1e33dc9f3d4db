"""Gemma 4 target and assistant in float64 numpy: one position at a time, written for clarity, not speed.

An implementation of its own: it shares no code with the plugin, mlx-lm, mlx-vlm or transformers, reads
safetensors and unpacks MLX's affine quantisation itself, rotates in the complex plane and attends key by
key from growing lists. Slow and small; what it says is what the tests compare against.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FULL = "full_attention"
Array = np.ndarray


# -- checkpoint files ----------------------------------------------------------------------------------


class Weights:
    """Tensors of a directory by their shortest name, as float64; quantised ones are unpacked."""

    def __init__(self, path: Path, config: dict[str, Any]):
        self.table = config.get("quantization") or {}
        self.raw: dict[str, Array] = {}
        for file in sorted(path.glob("*.safetensors")):
            self.raw |= _read(file)
        self.cache: dict[str, Array] = {}

    def __call__(self, name: str) -> Array:
        """One tensor by the name it has in `model.`; KeyError without it."""
        if name not in self.cache:
            self.cache[name] = self._find(name)
        return self.cache[name]

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return self._full_name(name) is not None

    def _full_name(self, name: str) -> str | None:
        roots = ("model.language_model.", "language_model.model.", "model.", "language_model.", "")
        return next((root + name for root in roots if root + name in self.raw), None)

    def _find(self, name: str) -> Array:
        full = self._full_name(name)
        if full is None:
            raise KeyError(name)
        path = full.removesuffix(".weight")
        if f"{path}.scales" not in self.raw:
            return self.raw[full].astype(np.float64)
        how = {**self.table, **self.table.get(path, {})}
        parts = (self.raw[f"{path}.{part}"] for part in ("weight", "scales", "biases"))
        return unpack(*parts, bits=how["bits"])


def _read(file: Path) -> dict[str, Array]:
    """Tensors of one safetensors file of types numpy has."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    kinds = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U32": "<u4"}
    out = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            start, stop = (8 + size + offset for offset in entry["data_offsets"])
            out[name] = np.frombuffer(data[start:stop], kinds[entry["dtype"]]).reshape(entry["shape"])
    return out


def unpack(packed: Array, scales: Array, biases: Array, bits: int) -> Array:
    """Affine-quantised (..., n * bits / 32) uint32 with a scale and bias per group -> float64 (..., n)."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (packed[..., None] >> shifts) & np.uint32(2**bits - 1)
    codes = codes.reshape(*packed.shape[:-1], -1).astype(np.float64)
    grouped = codes.reshape(*scales.shape, -1)
    values = grouped * scales[..., None].astype(np.float64) + biases[..., None].astype(np.float64)
    return values.reshape(codes.shape)


# -- arithmetic ----------------------------------------------------------------------------------------


def normed(x: Array, weight: Array | float, eps: float) -> Array:
    """Root-mean-square norm over the last axis."""
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps) * weight


def gelu(x: Array) -> Array:
    """The tanh form."""
    return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def soft(scores: Array) -> Array:
    """Softmax of a vector."""
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def turned(heads: Array, position: int, rope: dict[str, Any]) -> Array:
    """heads (n, D) rotated to `position`: element j and j + D/2 are one complex number."""
    D = heads.shape[-1]
    half = D // 2
    moving = half
    if rope.get("rope_type") == "proportional":
        moving = int(D * rope.get("partial_rotary_factor", 1.0)) // 2
    speeds = np.array([rope["rope_theta"] ** (-2 * j / D) if j < moving else 0.0 for j in range(half)])
    z = (heads[:, :half] + 1j * heads[:, half:]) * np.exp(1j * position * speeds)
    return np.concatenate([z.real, z.imag], axis=-1)


def mixed(queries: Array, keys: list[Array], values: list[Array]) -> Array:
    """queries (n, D) over lists of (kv, D) keys and values -> (n * D,); scale 1."""
    K, V = np.stack(keys), np.stack(values)
    share = len(queries) // K.shape[1]
    rows = [soft(K[:, h // share] @ q) @ V[:, h // share] for h, q in enumerate(queries)]
    return np.concatenate(rows)


# -- target --------------------------------------------------------------------------------------------


@dataclass
class Target:
    """A target directory, run one token at a time.

    Attributes:
        kept: per layer that owns K/V, the lists of keys and values of every position so far.
    """

    path: Path
    kept: dict[int, tuple[list[Array], list[Array]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        whole = json.loads((self.path / "config.json").read_text())
        self.config: dict[str, Any] = whole.get("text_config", whole)
        self.weights = Weights(self.path, whole)
        self.first_shared = self.config["num_hidden_layers"] - self.config["num_kv_shared_layers"]
        self.eps = self.config["rms_norm_eps"]

    def embed(self, token: int) -> Array:
        """Scaled embedding (H,)."""
        return self.weights("embed_tokens.weight")[token] * math.sqrt(self.config["hidden_size"])

    def step(self, token: int, position: int) -> tuple[Array, Array]:
        """Logits (V,) and post-norm hidden (H,) after `token` at `position`."""
        x = self.embed(token)
        extra = self._per_layer(token, x)
        for i, kind in enumerate(self.config["layer_types"]):
            x = self._layer(i, kind, x, position, None if extra is None else extra[i])
        hidden = normed(x, self.weights("norm.weight"), self.eps)
        name = "embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"
        logits = self.weights(name) @ hidden
        cap = self.config["final_logit_softcapping"]
        return (cap * np.tanh(logits / cap) if cap else logits), hidden

    def run(self, tokens: list[int]) -> tuple[Array, Array]:
        """Logits (L, V) and hidden (L, H) of a whole prompt from position 0."""
        self.kept = {}
        rows = [self.step(token, position) for position, token in enumerate(tokens)]
        return np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows])

    def source(self, kind: str) -> int:
        """Last layer of a type that owns K/V."""
        return max(i for i in range(self.first_shared) if self.config["layer_types"][i] == kind)

    def _per_layer(self, token: int, x: Array) -> Array | None:
        N, P = self.config["num_hidden_layers"], self.config["hidden_size_per_layer_input"]
        if not P:
            return None
        own = self.weights("embed_tokens_per_layer.weight")[token].reshape(N, P) * math.sqrt(P)
        context = (self.weights("per_layer_model_projection.weight") @ x / math.sqrt(len(x))).reshape(N, P)
        context = normed(context, self.weights("per_layer_projection_norm.weight"), self.eps)
        return (own + context) / math.sqrt(2)

    def _layer(self, i: int, kind: str, x: Array, position: int, extra: Array | None) -> Array:
        w = lambda name: self.weights(f"layers.{i}.{name}")  # noqa: E731
        attended = self._attention(i, kind, normed(x, w("input_layernorm.weight"), self.eps), position)
        x = x + normed(attended, w("post_attention_layernorm.weight"), self.eps)
        inner = mlp(w, normed(x, w("pre_feedforward_layernorm.weight"), self.eps))
        if self.config["enable_moe_block"]:
            inner = normed(inner, w("post_feedforward_layernorm_1.weight"), self.eps)
            inner = inner + normed(self._experts(w, i, x), w("post_feedforward_layernorm_2.weight"), self.eps)
        x = x + normed(inner, w("post_feedforward_layernorm.weight"), self.eps)
        if extra is not None:
            gate = w("per_layer_projection.weight") @ (gelu(w("per_layer_input_gate.weight") @ x) * extra)
            x = x + normed(gate, w("post_per_layer_input_norm.weight"), self.eps)
        return x * w("layer_scalar")

    def _attention(self, i: int, kind: str, x: Array, position: int) -> Array:
        config, w = self.config, lambda name: self.weights(f"layers.{i}.self_attn.{name}.weight")
        D = config["global_head_dim"] if kind == FULL else config["head_dim"]
        rope = config["rope_parameters"][kind]
        queries = turned(normed((w("q_proj") @ x).reshape(-1, D), w("q_norm"), self.eps), position, rope)
        source = i if i < self.first_shared else self.source(kind)
        keys, values = self.kept.setdefault(source, ([], []))
        if source == i:
            raw = (w("k_proj") @ x).reshape(-1, D)
            alike = kind == FULL and config["attention_k_eq_v"]
            keys.append(turned(normed(raw, w("k_norm"), self.eps), position, rope))
            values.append(normed(raw if alike else (w("v_proj") @ x).reshape(-1, D), 1.0, self.eps))
        start = 0 if kind == FULL else max(0, position - config["sliding_window"] + 1)
        return w("o_proj") @ mixed(queries, keys[start:], values[start:])

    def _experts(self, w: Any, i: int, x: Array) -> Array:
        scores = w("router.proj.weight") @ normed(x, w("router.scale") / math.sqrt(len(x)), self.eps)
        chosen = sorted(range(len(scores)), key=lambda e: -scores[e])[: self.config["top_k_experts"]]
        shares = soft(scores[chosen]) * w("router.per_expert_scale")[chosen]
        x = normed(x, w("pre_feedforward_layernorm_2.weight"), self.eps)
        total = np.zeros_like(x)
        for expert, share in zip(chosen, shares, strict=True):
            gate, up, down = self._expert(i, expert)
            total += share * (down @ (gelu(gate @ x) * (up @ x)))
        return total

    def _expert(self, i: int, expert: int) -> tuple[Array, Array, Array]:
        base = f"layers.{i}.experts"
        if self.weights.has(f"{base}.gate_up_proj"):
            gate, up = np.split(self.weights(f"{base}.gate_up_proj")[expert], 2)
            return gate, up, self.weights(f"{base}.down_proj")[expert]
        names = (f"{base}.switch_glu.{part}_proj.weight" for part in ("gate", "up", "down"))
        gate, up, down = (self.weights(name)[expert] for name in names)
        return gate, up, down


def mlp(w: Any, x: Array) -> Array:
    """The dense feed-forward of a layer."""
    return w("mlp.down_proj.weight") @ (gelu(w("mlp.gate_proj.weight") @ x) * (w("mlp.up_proj.weight") @ x))


# -- assistant -----------------------------------------------------------------------------------------


@dataclass
class Assistant:
    """An assistant directory, run over a target's kept K/V."""

    path: Path
    target: Target

    def __post_init__(self) -> None:
        self.config: dict[str, Any] = json.loads((self.path / "config.json").read_text())
        self.text: dict[str, Any] = self.config["text_config"]
        self.weights = Weights(self.path, self.config)

    def draft(self, anchor: int, hidden: Array, position: int, steps: int) -> tuple[list[int], Array]:
        """Greedy tokens and their logits (steps, V); impossible tokens are -inf."""
        token, tokens, rows = anchor, [], []
        for _ in range(steps):
            logits, hidden = self.step(token, hidden, position)
            token = int(np.argmax(logits))
            tokens.append(token)
            rows.append(logits)
        return tokens, np.stack(rows)

    def step(self, token: int, hidden: Array, position: int) -> tuple[Array, Array]:
        """Logits (V,) and the hidden (H,) that the next step receives."""
        eps = self.text["rms_norm_eps"]
        x = self.weights("pre_projection.weight") @ np.concatenate([self.target.embed(token), hidden])
        for i, kind in enumerate(self.text["layer_types"]):
            w = lambda name, i=i: self.weights(f"layers.{i}.{name}")  # noqa: E731
            attended = self._attention(w, kind, normed(x, w("input_layernorm.weight"), eps), position)
            x = x + normed(attended, w("post_attention_layernorm.weight"), eps)
            inner = mlp(w, normed(x, w("pre_feedforward_layernorm.weight"), eps))
            x = (x + normed(inner, w("post_feedforward_layernorm.weight"), eps)) * w("layer_scalar")
        x = normed(x, self.weights("norm.weight"), eps)
        return self._head(x), self.weights("post_projection.weight") @ x

    def _attention(self, w: Any, kind: str, x: Array, position: int) -> Array:
        D = self.text["global_head_dim"] if kind == FULL else self.text["head_dim"]
        eps, rope = self.text["rms_norm_eps"], self.text["rope_parameters"][kind]
        queries = (w("self_attn.q_proj.weight") @ x).reshape(-1, D)
        queries = turned(normed(queries, w("self_attn.q_norm.weight"), eps), position, rope)
        keys, values = self.target.kept[self.target.source(kind)]
        reach = range(len(keys))
        if kind != FULL:
            reach = [k for k in reach if abs(position - k) < self.text["sliding_window"]]
        out = mixed(queries, [keys[k] for k in reach], [values[k] for k in reach])
        return w("self_attn.o_proj.weight") @ out

    def _head(self, x: Array) -> Array:
        table = self.weights("embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight")
        logits = table @ x
        if not self.config["use_ordered_embeddings"]:
            return logits
        scores = self.weights("masked_embedding.centroids.weight") @ x
        best = np.argsort(-scores)[: self.config["centroid_intermediate_top_k"]]
        order = self.weights("masked_embedding.token_ordering").astype(int).reshape(len(scores), -1)
        possible = order[best].ravel()
        out = np.full_like(logits, -np.inf)
        out[possible] = logits[possible]
        return out
