"""Next-token training of the target."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from demo_training.corpus import load_tokenizer, token_stream, windows
from demo_training.optimise import advance, optimiser, rate, save
from demo_training.parallel import Clock, rank, world
from demo_training.settings import SEED
from safetensors.torch import load_file
from torch import Tensor, nn

from .model import DeltaNorm, Target
from .settings import TEXT, TargetSchedule, Work


def next_token_loss(model: Target, rows: Tensor) -> Tensor:
    """Mean cross-entropy of rows [B, L + 1]."""
    hidden, _ = model(rows[:, :-1])
    return F.cross_entropy(model.logits(hidden).flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: Target, stream: np.ndarray, length: int = 256, rows: int = 1 << 30) -> float:
    """Mean loss per token over consecutive windows of the held-out stream."""
    cut = [stream[i : i + length + 1] for i in range(0, len(stream) - length, length)]
    cut = cut[:: max(1, len(cut) // rows)]
    parts = [torch.from_numpy(np.stack(cut[i : i + 16])) for i in range(0, len(cut), 16)]
    return sum(float(next_token_loss(model, part)) * len(part) for part in parts) / len(cut)


def start_from(model: Target, gemma: Path) -> None:
    """Initial table: that of the gemma4 demonstration target, whose tokenizer this model shares."""
    table = load_file(str(gemma / "model.safetensors"))["model.embed_tokens.weight"].float()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(table)


def train(work: Work, schedule: TargetSchedule, warm: bool, gemma: Path) -> None:
    """Train for `schedule.minutes` of wall-clock time, leaving a checkpoint every two minutes.

    `warm` goes on from the checkpoint a former run left, with a fresh optimiser and schedule.
    """
    torch.manual_seed(SEED)
    tokenizer = load_tokenizer(gemma)
    stream, held = token_stream(tokenizer, False), token_stream(tokenizer, True)
    model, rng = Target(TEXT), np.random.default_rng([SEED, rank(), warm])
    start_from(model, gemma)
    seen = 0
    if warm and work.target.exists():
        kept = torch.load(work.target)
        model.load_state_dict(kept["weights"])
        seen = kept["tokens"]
    optimizer = optimiser(model, schedule.weight_decay)
    lengths = (schedule.short_length, schedule.long_length)
    sources = {n: windows(stream, n, rng) for n in lengths}
    clock, saved, step, mean = Clock(schedule.minutes), 0.0, 0, 0.0
    while (progress := clock.progress()) < 1:
        length = lengths[progress > 1 - schedule.long_share]
        rows = torch.from_numpy(np.stack([next(sources[length]) for _ in range(schedule.batch_tokens // length)]))
        loss = next_token_loss(model, rows)
        advance(model, optimizer, loss, rate(progress, schedule.peak_rate, schedule.warm_up))
        step, seen = step + 1, seen + rows[:, 1:].numel() * world()
        mean = loss.item() if step == 1 else 0.98 * mean + 0.02 * loss.item()
        minutes = progress * schedule.minutes
        if step % 50 == 0 and rank() == 0:
            print(f"target {minutes:5.1f} min  step {step}  tokens {seen}  loss {mean:.3f}", flush=True)
        if minutes - saved > 2 and rank() == 0:
            saved = minutes
            save(model, work.target, step=step, tokens=seen)
            print(f"held-out loss (sample) {held_out_loss(model, held, rows=32):.3f}", flush=True)
    if rank() == 0:
        save(model, work.target, step=step, tokens=seen)
        print(f"target done: {step} steps, {seen} tokens", flush=True)


def frozen(model: nn.Module) -> nn.Module:
    """The model with weights as they will be published: bfloat16, norms as one plus a bfloat16 delta."""
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            p.requires_grad_(False)
            if name != "A_log":
                p.copy_(p.bfloat16())
            if isinstance(module, DeltaNorm):
                p.copy_((1.0 + p).bfloat16().float() - 1.0)
    return model.eval()


@torch.no_grad()
def load_target(path: Path) -> Target:
    """The target of a checkpoint, frozen, with weights rounded as they will be published."""
    model = Target(TEXT)
    model.load_state_dict(torch.load(path)["weights"])
    return frozen(model)
