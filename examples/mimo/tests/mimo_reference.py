"""MiMo and its head once more, in float64 numpy without caches, from the published formulas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import mlx.core as mx
import numpy as np

Array = np.ndarray


class Reference:
    """The model in a directory; whole sequences at a time."""

    def __init__(self, path: Path):
        self.config = json.loads((path / "config.json").read_text())
        files = sorted(path.glob("*.safetensors"))
        self.weights = {n: np.array(a, dtype=np.float64) for f in files for n, a in mx.load(str(f)).items()}
        self.heads, self.kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        self.width = self.config["hidden_size"] // self.heads

    def norm(self, x: Array, name: str) -> Array:
        """Root mean square norm over the last axis."""
        return (
            x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * self.weights[f"{name}.weight"]
        )

    def linear(self, x: Array, name: str) -> Array:
        """x W^T (+ b)."""
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    @cached_property
    def frequencies(self) -> Array:
        """Rotation speed of each pair of values (width/2,)."""
        return self.config["rope_theta"] ** (-np.arange(0, self.width, 2) / self.width)

    def rotate(self, x: Array) -> Array:
        """x (n, heads, width), row p turned to position p; value i is paired with value i + width/2."""
        angle = np.arange(len(x))[:, None, None] * self.frequencies
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)

    def layer(self, x: Array, name: str) -> Array:
        """One decoder layer over x (n, D), causal."""
        n, y = len(x), self.norm(x, f"{name}.input_layernorm")
        q = self.rotate(self.linear(y, f"{name}.self_attn.q_proj").reshape(n, self.heads, -1))
        k = self.rotate(self.linear(y, f"{name}.self_attn.k_proj").reshape(n, self.kv_heads, -1))
        v = self.linear(y, f"{name}.self_attn.v_proj").reshape(n, self.kv_heads, -1)
        groups = self.heads // self.kv_heads
        scores = np.einsum("qhd,khd->hqk", q, k.repeat(groups, axis=1)) / np.sqrt(self.width)
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        law = np.exp(scores - scores.max(-1, keepdims=True))
        law /= law.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", law, v.repeat(groups, axis=1)).reshape(n, -1)
        x = x + self.linear(mixed, f"{name}.self_attn.o_proj")
        y = self.norm(x, f"{name}.post_attention_layernorm")
        gate = self.linear(y, f"{name}.mlp.gate_proj")
        return x + self.linear(
            gate / (1 + np.exp(-gate)) * self.linear(y, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj"
        )

    def hidden(self, tokens: Sequence[int]) -> Array:
        """Hidden states before the final norm, (n, D)."""
        x = self.weights["model.embed_tokens.weight"][list(tokens)]
        for i in range(self.config["num_hidden_layers"]):
            x = self.layer(x, f"model.layers.{i}")
        return x

    def logits(self, tokens: Sequence[int]) -> Array:
        """(n, V)."""
        return self.norm(self.hidden(tokens), "model.norm") @ self.weights["lm_head.weight"].T

    def drafts(self, tokens: Sequence[int], count: int, ids: int | None = None) -> tuple[list[int], float]:
        """The head's `count` greedy drafts below `ids`, and the smallest gap between a best and a second best."""
        if len(tokens) < 2:
            return [], np.inf  # nothing committed yet, so no hidden state to start from
        hidden, head = self.hidden(tokens[:-1]), "model.mtp_layers.0"
        following, gap = list(tokens[1:]), np.inf
        for _ in range(count):
            embedded = self.weights["model.embed_tokens.weight"][following]
            embedded[0] = 0
            parts = [self.norm(hidden, f"{head}.hidden_layernorm"), self.norm(embedded, f"{head}.token_layernorm")]
            x = self.linear(np.concatenate(parts, axis=-1), f"{head}.input_proj")
            out = self.norm(self.layer(x, head), f"{head}.final_layernorm")
            row = out[-1] @ self.weights["lm_head.weight"][:ids].T
            second, best = np.sort(row)[-2:]
            gap = min(gap, best - second)
            following.append(int(row.argmax()))
            hidden = np.concatenate([hidden, out[-1:]])
        return following[len(tokens) - 1 :], float(gap)
