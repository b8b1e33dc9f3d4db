"""Plain decoding of a lane, pipelined: the next step is built before the last one is read.

On a GPU it is started then as well; on the CPU afterwards, as `state.steps` explains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from .types import Draft

if TYPE_CHECKING:
    import mlx.core as mx

    from .accept import AcceptResult, GreedyStep, RowResult
    from .judge import Judge
    from .lane import Lane
    from .request import Row
    from .rounds import RoundHooks


@dataclass(slots=True)
class _Step:
    pending: AcceptResult | GreedyStep
    taps: dict[str, mx.array]


class PlainRun:
    """A span of single-token steps over one lane; at most one step is built beyond what was read.

    Rows whose logits depend on the reply's own text on the host (penalties, user processors, minimum
    length) cannot be scored before the previous token is known, so such a lane is not run ahead.
    """

    def __init__(self, lane: Lane, hooks: RoundHooks, rows: Sequence[Row], judge: Judge, steps: int):
        import mlx.core as mx

        self.lane, self.hooks, self.rows, self.judge = lane, hooks, rows, judge
        self.left = steps
        self.ahead = not any(judge.needs_history(row) for row in rows)
        self._flight: deque[_Step] = deque()
        self._empty = Draft(mx.zeros((lane.size, 0), dtype=mx.int32), [0] * lane.size)
        self._build()

    @property
    def in_flight(self) -> int:
        """Steps built and not read yet."""
        return len(self._flight)

    def stop(self) -> None:
        """Start no further step; what is in flight stays valid and must still be read."""
        self.left = 0

    def _build(self, start: bool = True) -> None:
        lane = self.lane
        lane.mark = lane.states.mark()
        positions = [n + 1 for n in lane.states.lengths]
        seen = self.hooks.verify(lane=lane, draft=self._empty)
        scored = self.judge.score(self.rows, seen.logits, self._empty, positions)
        pending = cast("AcceptResult | GreedyStep", scored)  # a block has drafts
        if start:
            pending.start()
        self._flight.append(_Step(pending, seen.taps))
        lane.mark = None
        self.left -= 1

    def next(self) -> tuple[list[RowResult], dict[str, mx.array]]:
        """Results of the oldest step in flight; builds its successor first when it may."""
        from .state.steps import steps_in_turn

        if not self._flight:
            self._build()
        step, in_turn = self._flight[0], False
        if self.ahead and self.left > 0:
            in_turn = steps_in_turn(self.lane.states.nbytes)
            self.lane.anchors = step.pending.next_anchors
            self._build(start=not in_turn)
        self._flight.popleft()
        results = step.pending.read()
        if in_turn:
            self._flight[0].pending.start()
        return results, step.taps

    @property
    def done(self) -> bool:
        """True when nothing is in flight and no step is left to start."""
        return self.left <= 0 and not self._flight
