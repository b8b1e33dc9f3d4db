"""Batched generation: the text a head learns from and is measured on."""

from __future__ import annotations

import numpy as np
import torch
from demo_training.settings import BOS
from torch import Tensor

from .model import Target


@torch.no_grad()
def generate(model: Target, prompts: Tensor, length: int, temperatures: Tensor) -> Tensor:
    """Continue prompts [B, P] to [B, length]; temperature 0 takes the largest logit."""
    warm, scale = (temperatures > 0)[:, None], temperatures.clamp_min(1e-3)[:, None]
    ids, states, start, out = prompts, None, 0, [prompts]
    while start + ids.shape[1] < length:
        hidden, states = model(ids, states, start)
        start += ids.shape[1]
        logits = model.logits(hidden[:, -1])
        drawn = torch.multinomial(torch.softmax(logits / scale, -1), 1)
        ids = torch.where(warm, drawn, logits.argmax(-1, keepdim=True))
        out.append(ids)
    return torch.cat(out, dim=1)


def training_rows(model: Target, stream: np.ndarray, rows: int, length: int, seed: int) -> Tensor:
    """Rows [rows, length] that start with training text and go on with the target's own text.

    A quarter of every batch is greedy, a quarter is sampled at 0.5, one at 0.7 and one at 1.0.
    """
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    batch, parts = 256, []
    temperatures = torch.tensor([0.0, 0.5, 0.7, 1.0]).repeat(batch // 4)
    for _ in range(0, rows, batch):
        given = int(rng.integers(16, 96))
        starts = rng.integers(0, len(stream) - given, batch)
        prompts = np.stack([np.concatenate([[BOS], stream[s : s + given - 1]]) for s in starts])
        parts.append(generate(model, torch.from_numpy(prompts), length, temperatures))
        print(f"sampled {len(parts) * batch} of {rows} rows", flush=True)
    return torch.cat(parts)
