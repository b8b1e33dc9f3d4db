"""Optimiser, learning rate, checkpoints, and the loss of a drafter's unrolled steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .parallel import average_gradients


def optimiser(model: nn.Module, decay: float) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only; tables and vectors have none."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)


def rate(progress: float, peak: float, warm_up: float) -> float:
    """Linear warm-up, then a cosine down to 2 % of the peak; progress in 0..1."""
    if progress < warm_up:
        return peak * (progress + 0.002) / (warm_up + 0.002)
    along = min(1.0, (progress - warm_up) / (1.0 - warm_up))
    return peak * (0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * along)))


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, learning_rate: float) -> None:
    """One optimiser step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    average_gradients(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def save(model: nn.Module, path: Path, **extra: object) -> None:
    """Write a checkpoint under another name first, so that a stop never leaves half a file."""
    partial = path.with_suffix(".partial")
    torch.save({"weights": model.state_dict(), **extra}, partial)
    partial.replace(path)


def goals(wanted: Tensor, hard: float) -> Tensor:
    """Mixture of the target's distribution and its largest logit, [..., V]."""
    mixed = wanted.softmax(-1) * (1 - hard)
    top = wanted.argmax(-1, keepdim=True)
    return mixed.scatter_add_(-1, top, torch.full_like(mixed[..., :1], hard))


def block_loss(logits: Sequence[Tensor], goal: Tensor, weights: Sequence[float]) -> Tensor:
    """Weighted cross-entropy of the steps' logits against goal [B, T, V]; step j is about row j onwards."""
    total = torch.zeros(())
    for j, (step, weight) in enumerate(zip(logits, weights, strict=True), start=1):
        part = goal[:, j : j + step.shape[1]].flatten(0, 1)
        total = total + weight * F.cross_entropy(step.float().flatten(0, 1), part)
    return total


def agreement(logits: Sequence[Tensor], wanted: Tensor) -> str:
    """Share of anchors where each step's largest logit is the target's."""
    pairs = ((step, wanted[:, j : j + step.shape[1]]) for j, step in enumerate(logits, start=1))
    return " ".join(f"{(a.argmax(-1) == b.argmax(-1)).float().mean():.3f}" for a, b in pairs)
