"""Numbers of the torch models that other implementations of the same maths can be compared with."""

from __future__ import annotations

import numpy as np
import torch
from demo_training.corpus import load_tokenizer, token_stream
from demo_training.layers import Linear
from torch import Tensor

from .model import Drafter, Target, embed
from .sample import visible
from .settings import TARGET, Work
from .train_drafter import load_drafter
from .train_target import load_target, setup_for

TOKENS, STEPS = 300, 6


@torch.no_grad()
def draft(target: Target, drafter: Drafter, ids: Tensor, steps: int) -> tuple[list[int], Tensor]:
    """One block as a runtime drafts it: ids [n + 1] ends with the bonus token -> tokens and logits [steps, V]."""
    n = len(ids) - 1
    hidden, shared = target(ids[None, :n], *setup_for(target, n))
    rope = drafter.model.tables(torch.tensor([n - 1]))
    masks = visible(TARGET["sliding_window"], n - 1, 1)
    carry, token = hidden[:, -1:], ids[None, n:]
    tokens, rows = [], []
    for _ in range(steps):
        logits, carry = drafter(embed(target, token), carry, rope, masks, shared)
        token = logits.argmax(-1)
        tokens.append(int(token))
        rows.append(logits[0, 0])
    return tokens, torch.stack(rows)


def write(work: Work) -> None:
    """Save work/reference.npz: ids, target logits and hidden states, one block of drafts; float32."""
    Linear.compute = torch.float32
    target, drafter = load_target(work.target), load_drafter(work)
    ids = torch.from_numpy(token_stream(load_tokenizer(work.tokenizer), held_out=True)[:TOKENS])
    with torch.no_grad():
        hidden, _ = target(ids[None], *setup_for(target, TOKENS))
        logits = target.logits(hidden)[0]
    tokens, drafted = draft(target, drafter, ids, STEPS)
    np.savez(
        work.root / "reference.npz",
        ids=ids.numpy(),
        logits=logits.numpy(),
        hidden=hidden[0].numpy(),
        draft_tokens=np.asarray(tokens),
        draft_logits=drafted.numpy(),
    )
    print(f"wrote {work.root / 'reference.npz'}: drafts {tokens}")
