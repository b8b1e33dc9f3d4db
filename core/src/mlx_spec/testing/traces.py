"""Comparing what a drafter proposed here and there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx

from .compare import close, largest_gap
from .watch import Proposal


def parting(a: Proposal, row_a: int, b: Proposal, row_b: int) -> str:
    """Where two proposals after one history part, in words; "" when they agree as far as both go.

    Drafts may have different lengths. A different token is forgiven when the logits both were taken from
    agree but for rounding.
    """
    ids_a, ids_b = a.ids(row_a), b.ids(row_b)
    for step, (mine, other) in enumerate(zip(ids_a, ids_b, strict=False)):
        if step < len(a.draws) and step < len(b.draws):
            x, y = a.draws[step].logits[row_a], b.draws[step].logits[row_b]
            if not close(x, y):
                picked = int(mx.argmax(x).item()), int(mx.argmax(y).item())
                return (
                    f"step {step} picks token {picked[0]} instead of {picked[1]} "
                    f"(logits differ by up to {largest_gap(x, y):.3g})"
                )
            if mine == other or _tied(x, mine, other):
                continue
        if mine != other:
            return f"step {step} is token {mine} instead of {other}"
    return ""


def _tied(logits: mx.array, a: int, b: int) -> bool:
    """Whether rounding alone decides between two tokens."""
    known = max(a, b) < logits.shape[0]
    return known and close(logits[a : a + 1], logits[b : b + 1])


def by_question(proposals: Iterable[Proposal]) -> dict[tuple[tuple[int, ...], int], tuple[Proposal, int]]:
    """History and budget of a row -> the proposal that answered, and the row's index in it.

    The budget belongs to the question: a drafter of whole blocks drafts otherwise into a shorter one.
    """
    rows = ((p, b, tuple(h)) for p in proposals if p.draft is not None for b, h in enumerate(p.histories))
    return {(history, p.budget[b]): (p, b) for p, b, history in rows}


def drafted(proposals: Iterable[Proposal]) -> int:
    """Tokens drafted in all rows of all proposals."""
    return sum(len(p.ids(b)) for p in proposals for b in range(len(p.histories)))


def shown(history: Sequence[int]) -> str:
    """A history, short."""
    return f"{len(history)} tokens ending in {list(history[-4:])}"
