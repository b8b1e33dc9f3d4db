"""Next-token training of the target."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .corpus import load_tokenizer, token_stream, windows
from .model import Linear, Target, causal_masks
from .parallel import Clock, average_gradients, rank, world
from .settings import SEED, TARGET, TargetSchedule, Work


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


def next_token_loss(model: Target, rows: Tensor, setup: tuple[dict, dict]) -> Tensor:
    """Mean cross-entropy of rows [B, L + 1]."""
    hidden, _ = model(rows[:, :-1], *setup)
    return F.cross_entropy(model.logits(hidden).flatten(0, 1), rows[:, 1:].flatten())


def setup_for(model: Target, length: int) -> tuple[dict, dict]:
    """Rotations and masks of sequences of one length."""
    return model.model.tables(torch.arange(length)), causal_masks(TARGET, length)


@torch.no_grad()
def held_out_loss(model: Target, stream: np.ndarray, length: int = 256, rows: int = 1 << 30) -> float:
    """Mean loss per token over consecutive windows of the held-out stream."""
    setup = setup_for(model, length)
    cut = [stream[i : i + length + 1] for i in range(0, len(stream) - length, length)]
    cut = cut[:: max(1, len(cut) // rows)]
    parts = [torch.from_numpy(np.stack(cut[i : i + 16])) for i in range(0, len(cut), 16)]
    return sum(float(next_token_loss(model, part, setup)) * len(part) for part in parts) / len(cut)


def train(work: Work, schedule: TargetSchedule, warm: bool) -> None:
    """Train for `schedule.minutes` of wall-clock time, leaving a checkpoint every three minutes.

    `warm` goes on from the checkpoint a former run left, with a fresh optimiser and schedule.
    """
    torch.manual_seed(SEED)
    tokenizer = load_tokenizer(work.tokenizer)
    stream, held = token_stream(tokenizer, False), token_stream(tokenizer, True)
    model, rng = Target(TARGET), np.random.default_rng([SEED, rank(), warm])
    if warm and work.target.exists():
        model.load_state_dict(torch.load(work.target)["weights"])
    optimizer = optimiser(model, schedule.weight_decay)
    lengths = (schedule.short_length, schedule.long_length)
    sources = {n: windows(stream, n, rng) for n in lengths}
    setups = {n: setup_for(model, n) for n in lengths}
    clock, saved, step, seen, mean = Clock(schedule.minutes), 0.0, 0, 0, 0.0
    while (progress := clock.progress()) < 1:
        length = lengths[progress > 1 - schedule.long_share]
        rows = torch.from_numpy(np.stack([next(sources[length]) for _ in range(schedule.batch_tokens // length)]))
        loss = next_token_loss(model, rows, setups[length])
        advance(model, optimizer, loss, rate(progress, schedule.peak_rate, schedule.warm_up))
        step, seen = step + 1, seen + rows[:, 1:].numel() * world()
        mean = loss.item() if step == 1 else 0.98 * mean + 0.02 * loss.item()
        minutes = progress * schedule.minutes
        if step % 50 == 0 and rank() == 0:
            print(f"target {minutes:5.1f} min  step {step}  tokens {seen}  loss {mean:.3f}", flush=True)
        if minutes - saved > 3 and rank() == 0:
            saved = minutes
            save(model, work.target, step=step, tokens=seen)
            print(f"held-out loss (sample) {held_out_loss(model, held, rows=32):.3f}", flush=True)
    if rank() == 0:
        save(model, work.target, step=step, tokens=seen)
        print(f"target done: {step} steps, {seen} tokens", flush=True)


def load_target(path: Path) -> Target:
    """The target of a checkpoint, frozen, with weights rounded to bfloat16 as they will be published."""
    model = Target(TARGET)
    model.load_state_dict(torch.load(path)["weights"])
    for p in model.parameters():
        p.data = p.data.bfloat16().float()
        p.requires_grad_(False)
    return model.eval()


def use_bfloat16() -> None:
    """Multiply matrices in bfloat16: about twice as fast on processors with the instructions."""
    Linear.compute = torch.bfloat16
