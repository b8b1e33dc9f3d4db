"""Binds acceptance to the live rows of a lane: who samples how, with which noise, at which position."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .accept import AcceptResult, GreedyBlock, GreedyStep, RowPlan, RowResult, accept
from .drawing import Drawer
from .greedy import PLAIN, GreedyChoice
from .processors import History

if TYPE_CHECKING:
    import mlx.core as mx

    from .lane import Lane
    from .request import Row
    from .types import Draft


class Judge:
    """Acceptance for one engine.

    Args:
        vocab_size: V of the target's logits.
        vocab_limit: number of ids that mean something, None when all do.
        gap_log: print the top-2 gap of every verified row (one more host sync per round).
        greedy: chooses the tokens of greedy rows, of target and drafter.
    """

    def __init__(
        self,
        vocab_size: int,
        vocab_limit: int | None = None,
        gap_log: bool = False,
        greedy: GreedyChoice = PLAIN,
    ):
        self.vocab_size = vocab_size
        self.vocab_limit = vocab_limit
        self.gap_log = gap_log
        self.greedy = greedy

    def score(
        self, rows: Sequence[Row], logits: mx.array, draft: Draft, positions: Sequence[int]
    ) -> AcceptResult | GreedyStep | GreedyBlock:
        """Lazy verdict numbers; positions[b] is the absolute index of the token after row b's anchor."""
        plan = [_plan(row, position) for row, position in zip(rows, positions, strict=True)]
        result = accept(plan, logits, draft, self.vocab_limit, self.greedy)
        if self.gap_log:
            _print_gaps(rows, logits, result, positions)
        return result

    def judge(self, rows: Sequence[Row], logits: mx.array, draft: Draft, positions: Sequence[int]) -> list[RowResult]:
        """Verdict numbers on the host: the one sync of a round."""
        return self.score(rows, logits, draft, positions).read()

    def drawer(self, rows: Sequence[Row], lane: Lane) -> Drawer:
        """The `draw` of one propose."""
        positions = [n + 1 for n in lane.lengths]
        plan = [_plan(row, position) for row, position in zip(rows, positions, strict=True)]
        return Drawer(plan, self.vocab_size, self.vocab_limit, self.greedy)

    @staticmethod
    def needs_history(row: Row) -> bool:
        """True when the row's next logits depend on tokens that must be known on the host first."""
        return row.sampling.needs_history or row.sampling.min_tokens > len(row.tokens) - row.prompt_length


def _plan(row: Row, position: int) -> RowPlan:
    sampling = row.sampling
    if not sampling.touches_logits:
        return RowPlan(sampling, row.seed, position)
    history = History(row.tokens, len(row.tokens) - row.prompt_length, row.stop_ids)
    return RowPlan(sampling, row.seed, position, history)


def _print_gaps(
    rows: Sequence[Row],
    logits: mx.array,
    result: AcceptResult | GreedyStep | GreedyBlock,
    positions: Sequence[int],
) -> None:
    import mlx.core as mx

    top = mx.topk(logits.astype(mx.float32), 2, axis=-1)
    gaps = (mx.max(top, axis=-1) - mx.min(top, axis=-1)).tolist()
    for row, line, found, position in zip(rows, gaps, result.read(), positions, strict=True):
        shown = " ".join(f"{gap:.4g}" for gap in line)
        print(
            f"gap request={row.request.id} position={position} draft={found.draft_ids} "
            f"accepted={found.accepted} tokens={found.tokens} gaps=[{shown}]",
            file=sys.stderr,
        )
