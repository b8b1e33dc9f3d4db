"""Batched generation with a K/V cache: the text a drafter learns from and is measured on."""

from __future__ import annotations

import numpy as np
import torch
from demo_training.layers import Linear
from demo_training.settings import BOS
from torch import Tensor

from .model import KV, Target
from .settings import FULL, SLIDING


class Cache:
    """Room for `length` positions of every layer that owns K/V."""

    def __init__(self, model: Target, rows: int, length: int) -> None:
        self.offset = 0
        self.tensors: dict[int, KV] = {}
        for i, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            if attention.owns_kv:
                shape = (rows, attention.kv_heads, length, attention.D)
                self.tensors[i] = (torch.zeros(shape, dtype=Linear.compute), torch.zeros(shape, dtype=Linear.compute))

    def update(self, i: int, k: Tensor, v: Tensor) -> KV:
        """Store K and V [B, heads, L, D] of layer i at the offset; everything stored so far."""
        end = self.offset + k.shape[2]
        keys, values = self.tensors[i]
        keys[:, :, self.offset : end], values[:, :, self.offset : end] = k, v
        return keys[:, :, :end], values[:, :, :end]


def visible(window: int, start: int, count: int) -> dict[str, Tensor]:
    """Masks of `count` new positions after `start` old ones, bool [1, 1, count, start + count]."""
    behind = torch.arange(start, start + count)[:, None] - torch.arange(start + count)[None]
    return {FULL: (behind >= 0)[None, None], SLIDING: ((behind >= 0) & (behind < window))[None, None]}


@torch.no_grad()
def generate(model: Target, prompts: Tensor, length: int, temperatures: Tensor) -> Tensor:
    """Continue prompts [B, P] to [B, length]; temperature 0 takes the largest logit."""
    rows, given = prompts.shape
    window = model.model.config["sliding_window"]
    cache, out = Cache(model, rows, length), [prompts]
    ids, warm = prompts, (temperatures > 0)[:, None]
    scale = temperatures.clamp_min(1e-3)[:, None]
    for _ in range(length - given):
        count = ids.shape[1]
        positions = torch.arange(cache.offset, cache.offset + count)
        hidden, _ = model(ids, model.model.tables(positions), visible(window, cache.offset, count), cache)
        cache.offset += count
        logits = model.logits(hidden[:, -1])
        drawn = torch.multinomial(torch.softmax(logits / scale, -1), 1)
        ids = torch.where(warm, drawn, logits.argmax(-1, keepdim=True))
        out.append(ids)
    return torch.cat(out, dim=1)


def training_rows(model: Target, stream: np.ndarray, rows: int, length: int, seed: int) -> Tensor:
    """Rows [rows, length] that start with training text and go on with the target's own text.

    Half of every batch is greedy, a quarter each is sampled at 0.7 and at 1.0.
    """
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    batch, parts = 256, []
    temperatures = torch.tensor([0.0, 0.7, 0.0, 1.0]).repeat(batch // 4)
    for _ in range(0, rows, batch):
        given = int(rng.integers(16, 96))
        starts = rng.integers(0, len(stream) - given, batch)
        prompts = np.stack([np.concatenate([[BOS], stream[s : s + given - 1]]) for s in starts])
        parts.append(generate(model, torch.from_numpy(prompts), length, temperatures))
        print(f"sampled {len(parts) * batch} of {rows} rows", flush=True)
    return torch.cat(parts)
