"""Shorten what was accepted: to the fewest of a lane, at stop ids, at the length limit. Host side."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .types import Verdict

if TYPE_CHECKING:
    from .accept import RowResult


def in_step(results: Sequence[RowResult]) -> list[RowResult]:
    """The same verdicts with every row cut to the fewest accepted drafts among them, and one token more.

    That token is, like the ones before it, what its row emits at that position without company: the target's
    own under greedy and `coupled`, and a draw from the target's law under `rejection`, whether it was an
    accepted draft or came from the residual. What stands after it is forgotten and drawn anew. Where a row is
    cut depends on its own randomness only up to the token it ends with, so the replies keep their law.
    """
    fewest = min((r.accepted for r in results), default=0)
    return [r if r.accepted <= fewest else _shortened(r, fewest) for r in results]


def _shortened(result: RowResult, accepted: int) -> RowResult:
    """`result` as if only `accepted` drafts had been accepted; an error further on has not come up yet."""
    end = accepted + 1
    logprobs = None if result.logprobs is None else result.logprobs[:end]
    return replace(result, tokens=result.tokens[:end], accepted=accepted, error="", logprobs=logprobs)


def cut(tokens: Sequence[int], stop_ids: Collection[int], remaining: int, accepted: int = 0) -> Verdict:
    """End a block at its first stop id or at the length limit, whichever comes first.

    A stop id inside the limit ends the reply with reason "stop", also when it is the last token allowed; it
    stays in `tokens` (it becomes the anchor, keep == len(tokens)) and is left out of the text by the text
    stream. Reaching the limit without one is "length".
    """
    room = list(tokens[: max(0, remaining)])
    for i, token in enumerate(room):
        if token in stop_ids:
            return Verdict(i + 1, tuple(room[: i + 1]), min(accepted, i + 1), "stop")
    reason = "length" if len(room) >= remaining else ""
    return Verdict(len(room), tuple(room), min(accepted, len(room)), reason)
