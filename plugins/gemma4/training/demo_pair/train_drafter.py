"""Training of the drafter against the frozen target, several draft steps at every anchor in parallel.

An anchor at position p has committed positions 0..p and the bonus token at p + 1. Every step of its block
queries at position p and sees keys 0..p; step j reads the token at p + j and predicts the one at p + j + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from demo_training.corpus import load_tokenizer, token_stream, windows
from demo_training.optimise import advance, agreement, block_loss, goals, optimiser, rate, save
from demo_training.parallel import Clock, launch, rank
from demo_training.settings import SEED
from torch import Tensor

from .model import KV, Drafter, Target, causal_masks, embed
from .sample import training_rows
from .settings import DRAFTER, DrafterSchedule, Work
from .train_target import load_target, setup_for


class Seen(NamedTuple):
    """What the target made of rows [B, T]."""

    hidden: Tensor  # [B, T, H], after the final norm
    shared: dict[str, KV]
    wanted: Tensor  # logits [B, T, V]


@torch.no_grad()
def observe(target: Target, rows: Tensor) -> Seen:
    """Run the target over rows [B, T]."""
    hidden, shared = target(rows, *setup_for(target, rows.shape[1]))
    return Seen(hidden, shared, target.logits(hidden))


def unroll(target: Target, drafter: Drafter, rows: Tensor, seen: Seen, steps: int) -> Iterator[Tensor]:
    """The drafter's logits [B, Q, V] of steps 1..steps, for the Q = T - steps anchors 0..Q - 1 of rows [B, T].

    Those of step j are about the token that follows position p + j: compare them with wanted[:, j : j + Q].
    """
    count = rows.shape[1] - steps
    shared = {kind: (k[:, :, :count], v[:, :, :count]) for kind, (k, v) in seen.shared.items()}
    rope, masks = drafter.model.tables(torch.arange(count)), causal_masks(drafter.model.config, count)
    carry = seen.hidden[:, :count]
    for j in range(1, steps + 1):
        logits, carry = drafter(embed(target, rows[:, j : j + count]), carry, rope, masks, shared)
        yield logits


def batches(stream: np.ndarray, samples: Tensor | None, schedule: DrafterSchedule) -> Iterator[Tensor]:
    """Endless batches [rows, length]: a quarter library text, the rest sampled text when there is any."""
    rng = np.random.default_rng([SEED, rank()])
    real = windows(stream, schedule.length - 1, rng)
    while True:
        order = rng.permutation(0 if samples is None else len(samples))
        own = 0 if samples is None else schedule.batch_rows * 3 // 4
        for i in range(0, max(1, len(order) - own + 1), max(1, own)):
            text = torch.from_numpy(np.stack([next(real) for _ in range(schedule.batch_rows - own)]))
            yield text if samples is None else torch.cat([samples[order[i : i + own]][:, : schedule.length], text])


def sample(work: Work, schedule: DrafterSchedule, processes: int) -> None:
    """Sample the rows the drafter is trained on."""
    launch(_sample_part, processes, work, schedule.rows // processes, schedule.sample_length)
    parts = sorted(work.root.glob("samples-*.pt"))
    torch.save(torch.cat([torch.load(part) for part in parts]), work.samples)
    for part in parts:
        part.unlink()


def _sample_part(work: Work, rows: int, length: int) -> None:
    stream = token_stream(load_tokenizer(work.tokenizer), held_out=False)
    found = training_rows(load_target(work.target), stream, rows, length, SEED + rank())
    torch.save(found, work.root / f"samples-{rank()}.pt")


@torch.no_grad()
def start_from(target: Target, drafter: Drafter) -> None:
    """Initial table and projections: the target's, seen in the principal directions of its table."""
    table, h = target.model.embed_tokens.weight, drafter.model.config["hidden_size"]
    directions = torch.linalg.svd(table, full_matrices=False).Vh[:h]  # [h, H]
    drafter.model.embed_tokens.weight.copy_(table @ directions.T)
    drafter.pre_projection.weight.copy_(torch.cat([directions, directions], dim=1))
    drafter.post_projection.weight.copy_(directions.T)


def train(work: Work, schedule: DrafterSchedule, warm: bool) -> None:
    """Train for `schedule.minutes`; `warm` goes on from the checkpoint a former run left."""
    torch.manual_seed(SEED)
    target, drafter = load_target(work.target), Drafter(DRAFTER)
    start_from(target, drafter)
    if warm and work.drafter.exists():
        drafter.load_state_dict(torch.load(work.drafter)["weights"])
    stream = token_stream(load_tokenizer(work.tokenizer), held_out=False)
    samples = torch.load(work.samples) if work.samples.exists() else None
    optimizer, source = optimiser(drafter, schedule.weight_decay), batches(stream, samples, schedule)
    clock, step, saved = Clock(schedule.minutes), 0, 0.0
    while (progress := clock.progress()) < 1:
        rows = next(source)
        seen = observe(target, rows)
        logits = list(unroll(target, drafter, rows, seen, schedule.steps))
        loss = block_loss(logits, goals(seen.wanted, schedule.hard_share), schedule.step_weights)
        advance(drafter, optimizer, loss, rate(progress, schedule.peak_rate, schedule.warm_up))
        step, minutes = step + 1, progress * schedule.minutes
        if step % 25 == 0 and rank() == 0:
            shown = agreement(logits, seen.wanted)
            print(f"drafter {minutes:5.1f} min  step {step}  loss {loss.item():.3f}  agreement {shown}", flush=True)
        if minutes - saved > 2 and rank() == 0:
            saved = minutes
            save(drafter, work.drafter, step=step)
    if rank() == 0:
        save(drafter, work.drafter, step=step)


def load_drafter(work: Work) -> Drafter:
    """The drafter's checkpoint, frozen, with weights rounded to bfloat16."""
    drafter = Drafter(DRAFTER)
    drafter.load_state_dict(torch.load(work.drafter)["weights"])
    for p in drafter.parameters():
        p.data = p.data.bfloat16().float()
        p.requires_grad_(False)
    return drafter.eval()
