"""DFlash and DFlash2 drafters in float64 numpy, one sequence, nothing cached.

Reads config.json and safetensors by itself and shares no code with the plugin. Sliding layers are read as z-lab
does: a key is seen from less than `sliding_window` positions after it, and rows of a block see only earlier rows of it
unless `causal` says otherwise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


def tensors(folder: Path) -> dict[str, Array]:
    """Every tensor of a folder in float64."""
    out = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, value in mx.load(str(file)).items():
            out[name] = np.array(value.astype(mx.float32)).astype(np.float64)
    return out


def norm(x: Array, weight: Array, eps: float) -> Array:
    """Root mean square norm over the last axis."""
    out: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return out


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    out: Array = x / (1 + np.exp(-x))
    return out


def rotate(x: Array, positions: Array, theta: float) -> Array:
    """x (heads, S, D) rotated whole, first half against second."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], -1)


class DFlash:
    """One drafter. `embedding` and `output` (V, H) are the target's tables."""

    def __init__(self, folder: Path, embedding: Array, output: Array):
        self.config = json.loads((folder / "config.json").read_text())
        self.own = self.config["dflash_config"]
        self.weights = {name.removeprefix("model."): value for name, value in tensors(folder).items()}
        self.embedding, self.output = embedding, output

    def run(self, features: Array, anchor: int, L: int) -> tuple[Array, Array]:
        """features (n, ids * H) -> normed hidden and logits of the masks, (L - 1, ...)."""
        c, w, eps = self.config, self.weights, self.config["rms_norm_eps"]
        context = norm(features @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
        ids = [anchor] + [self.own["mask_token_id"]] * (L - 1)
        h = self.embedding[ids] * self.own.get("input_embedding_scale", 1.0)
        for i in range(c["num_hidden_layers"]):
            p = f"layers.{i}."
            x = norm(h, w[p + "input_layernorm.weight"], eps)
            h = h + self._around(p + "attention_conv.", x, lambda y, i=i: self._attend(i, y, context))
            x = norm(h, w[p + "post_attention_layernorm.weight"], eps)
            h = h + self._around(p + "mlp_conv.", x, lambda y, p=p: self._mlp(p + "mlp.", y))
        hidden = norm(h, w["norm.weight"], eps)[1:]
        logits = hidden @ self.output.T * self.own.get("output_multiplier", 1.0)
        cap = self.own.get("final_logit_softcapping")
        return hidden, np.tanh(logits / cap) * cap if cap else logits

    def greedy(self, features: Array, anchor: int, L: int) -> tuple[list[int], Array]:
        """Drafted ids, and the scores (L - 1, V) each was the best of; -inf for what cannot be drafted."""
        hidden, scores = self.run(features, anchor, L)
        tokens, previous, rows = [], anchor, []
        for n, row in zip(hidden, scores, strict=True):
            row = self._selected(n, row, previous)
            previous = int(row.argmax())
            tokens.append(previous)
            rows.append(row)
        return tokens, np.array(rows)

    def _selected(self, n: Array, row: Array, previous: int) -> Array:
        if "selector_top_k" not in self.own:
            return row
        w = self.weights
        before, after = (w[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor"))
        best = np.argsort(row)[-self.own["selector_top_k"] :]
        out = np.full_like(row, -np.inf)
        link = before[previous] * (w["candidate_selector.hidden_projection.weight"] @ n)
        out[best] = row[best] + after[best] @ link
        return out

    def _attend(self, i: int, x: Array, context: Array) -> Array:
        c, w, p = self.config, self.weights, f"layers.{i}.self_attn."
        n, L, D = len(context), len(x), c["head_dim"]
        positions = np.arange(n + L, dtype=np.float64)
        both = np.concatenate([context, x])

        def heads(rows: Array, name: str, count: int) -> Array:
            return (rows @ w[f"{p}{name}_proj.weight"].T).reshape(len(rows), count, D).transpose(1, 0, 2)

        def turned(rows: Array, name: str, count: int, at: Array) -> Array:
            normed = norm(heads(rows, name, count), w[f"{p}{name}_norm.weight"], c["rms_norm_eps"])
            return rotate(normed, at, c["rope_theta"])

        kv = c["num_key_value_heads"]
        q = turned(x, "q", c["num_attention_heads"], positions[n:])
        k, v = turned(both, "k", kv, positions), heads(both, "v", kv)
        share = c["num_attention_heads"] // kv
        scores = q @ np.repeat(k, share, 0).transpose(0, 2, 1) / np.sqrt(D)
        scores = np.where(self._visible(i, n, L), scores, -np.inf)
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        out = chances / chances.sum(-1, keepdims=True) @ np.repeat(v, share, 0)
        return out.transpose(1, 0, 2).reshape(L, -1) @ w[p + "o_proj.weight"].T

    def _visible(self, i: int, n: int, L: int) -> Any:
        """(L, n + L): which keys the rows of the block see in layer i."""
        sliding = self.config["layer_types"][i] == "sliding_attention"
        keys, rows = np.arange(n + L)[None], n + np.arange(L)[:, None]
        seen = np.ones((L, n + L), bool)
        if self.own.get("causal", sliding):
            seen &= keys <= rows
        if sliding:
            seen &= rows - keys < self.config["sliding_window"]
        return seen

    def _mlp(self, p: str, x: Array) -> Array:
        w = self.weights
        gated = silu(x @ w[p + "gate_proj.weight"].T) * (x @ w[p + "up_proj.weight"].T)
        return gated @ w[p + "down_proj.weight"].T

    def _around(self, p: str, x: Array, inner: Any) -> Array:
        """`inner` between the two convolutions of DFlash2, alone where there are none."""
        w = self.weights
        if p + "base_kernel" not in w:
            out: Array = inner(x)
            return out
        size, groups = w[p + "base_kernel"].shape[1], x.shape[-1] // self.own["conv_group_size"]
        dynamic = (x @ w[p + "kernel_projection.weight"].T).reshape(len(x), 2, size, groups)
        wide = np.repeat(dynamic, self.own["conv_group_size"], -1) + w[p + "base_kernel"][None]

        def convolve(rows: Array, which: int) -> Array:
            out = np.zeros_like(rows)
            for t in range(len(rows)):
                for o in range(min(size, t + 1)):
                    out[t] += wide[t, which, o] * rows[t - o]
            return out

        return convolve(inner(convolve(x, 0)), 1)
