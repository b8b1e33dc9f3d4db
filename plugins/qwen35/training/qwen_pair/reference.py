"""Numbers of the torch models that other implementations of the same maths can be compared with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from demo_training.corpus import load_tokenizer, token_stream
from demo_training.layers import Linear

from .mtp import unroll
from .settings import Work
from .train_head import load_head
from .train_target import load_target

TOKENS, STEPS = 300, 4


@torch.no_grad()
def write(work: Work, gemma: Path) -> None:
    """Save work/reference.npz: ids [T], logits [T, V], hidden [T, H] of the target, and the head's logits.

    head_logits [STEPS, T - STEPS, V] are those of the blocks anchored at every position, fed the text.
    """
    Linear.compute = torch.float32
    target, head = load_target(work.target), load_head(work)
    ids = torch.from_numpy(token_stream(load_tokenizer(gemma), held_out=True)[:TOKENS])
    hidden, _ = target(ids[None])
    steps = [logits[0, : TOKENS - STEPS] for logits in unroll(target, head, ids[None], hidden, STEPS)]
    found = {"logits": target.logits(hidden)[0], "hidden": hidden[0], "head_logits": torch.stack(steps)}
    np.savez(work.root / "reference.npz", ids=ids.numpy(), **{k: v.numpy() for k, v in found.items()})
    print(f"wrote {work.root / 'reference.npz'}")
