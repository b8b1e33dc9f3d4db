"""Training of the MTP head against the frozen target, several draft steps at every anchor in parallel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from demo_training.corpus import load_tokenizer, token_stream, windows
from demo_training.optimise import advance, agreement, block_loss, goals, optimiser, rate, save
from demo_training.parallel import Clock, launch, rank
from demo_training.settings import SEED
from torch import Tensor

from .mtp import Head, unroll
from .sample import training_rows
from .settings import TEXT, HeadSchedule, Work
from .train_target import frozen, load_target


def batches(stream: np.ndarray, samples: Tensor, schedule: HeadSchedule) -> Iterator[Tensor]:
    """Endless batches [rows, length]: a quarter library text, the rest sampled text."""
    rng = np.random.default_rng([SEED, rank()])
    real, own = windows(stream, schedule.length - 1, rng), schedule.batch_rows * 3 // 4
    while True:
        order = rng.permutation(len(samples))
        for i in range(0, len(order) - own + 1, own):
            text = torch.from_numpy(np.stack([next(real) for _ in range(schedule.batch_rows - own)]))
            yield torch.cat([samples[order[i : i + own]][:, : schedule.length], text])


def sample(work: Work, schedule: HeadSchedule, processes: int, gemma: Path) -> None:
    """Sample the rows the head is trained on."""
    launch(_sample_part, processes, work, schedule.rows // processes, schedule.sample_length, gemma)
    parts = sorted(work.root.glob("samples-*.pt"))
    torch.save(torch.cat([torch.load(part) for part in parts]), work.samples)
    for part in parts:
        part.unlink()


def _sample_part(work: Work, rows: int, length: int, gemma: Path) -> None:
    stream = token_stream(load_tokenizer(gemma), held_out=False)
    found = training_rows(load_target(work.target), stream, rows, length, SEED + rank())
    torch.save(found, work.root / f"samples-{rank()}.pt")


def train(work: Work, schedule: HeadSchedule, warm: bool, gemma: Path) -> None:
    """Train for `schedule.minutes`; `warm` goes on from the checkpoint a former run left."""
    torch.manual_seed(SEED)
    target, head = load_target(work.target), Head(TEXT)
    head.start_from(target)
    if warm and work.head.exists():
        head.load_state_dict(torch.load(work.head)["weights"])
    stream = token_stream(load_tokenizer(gemma), held_out=False)
    optimizer, source = optimiser(head, schedule.weight_decay), batches(stream, torch.load(work.samples), schedule)
    clock, step, saved = Clock(schedule.minutes), 0, 0.0
    while (progress := clock.progress()) < 1:
        rows = next(source)
        with torch.no_grad():
            hidden, _ = target(rows)
            wanted = target.logits(hidden)
        logits = list(unroll(target, head, rows, hidden, schedule.steps))
        loss = block_loss(logits, goals(wanted, schedule.hard_share), schedule.step_weights)
        advance(head, optimizer, loss, rate(progress, schedule.peak_rate, schedule.warm_up))
        step, minutes = step + 1, progress * schedule.minutes
        if step % 25 == 0 and rank() == 0:
            shown = agreement(logits, wanted)
            print(f"head {minutes:5.1f} min  step {step}  loss {loss.item():.3f}  agreement {shown}", flush=True)
        if minutes - saved > 2 and rank() == 0:
            saved = minutes
            save(head, work.head, step=step)
    if rank() == 0:
        save(head, work.head, step=step)


@torch.no_grad()
def load_head(work: Work) -> Head:
    """The head's checkpoint, frozen, with weights rounded as they will be published."""
    head = Head(TEXT)
    head.load_state_dict(torch.load(work.head)["weights"])
    return frozen(head)
