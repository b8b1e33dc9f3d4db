"""Core's greedy choice and its soft cap on the kernel."""

# mypy: disable-error-code="misc, no-any-return"

from __future__ import annotations

import mlx.core as mx

from mlx_spec.greedy import GreedyChoice
from mlx_spec.softcap import SoftCap

from .native import library
from .twins import FLOATS, Rule, swapper


class RowGreedyChoice(GreedyChoice):
    """GreedyChoice in one operation, on all threads."""

    def __call__(self, logits: mx.array, limit: int | None = None) -> tuple[mx.array, mx.array]:
        """As GreedyChoice: (ids, check)."""
        vocab = logits.shape[-1]
        limit = vocab if limit is None else min(limit, vocab)
        if logits.dtype not in FLOATS or limit < 1:
            return super().__call__(logits, limit)
        return library().greedy(logits, limit)


class RowSoftCap(SoftCap):
    """SoftCap in one operation, on all threads."""

    def __call__(self, logits: mx.array) -> mx.array:
        """As SoftCap: (..., V) -> (..., V)."""
        return library().soft_cap(logits, self.cap) if logits.dtype in FLOATS else super().__call__(logits)


CHOICE: tuple[Rule, ...] = ((GreedyChoice, RowGreedyChoice, lambda _: True),)
CAP: tuple[Rule, ...] = ((SoftCap, RowSoftCap, lambda _: True),)
swap_choice, swap_cap = swapper(CHOICE), swapper(CAP)
