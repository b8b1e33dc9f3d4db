"""A lane: the rows that share one verify, and what a drafter may see of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .types import TapBlock

if TYPE_CHECKING:
    import mlx.core as mx

    from .draft_state import DraftState
    from .models import Drafter, Target
    from .rounds import Flight
    from .state import StateGroup
    from .state.base import Mark

DrawFn = Callable[["mx.array", int], "tuple[mx.array, mx.array | None]"]


def _core_only(name: str) -> Callable[..., None]:
    def refuse(self: Committed, *args: object) -> None:
        raise TypeError(f"committed tokens are read, not changed: {name} belongs to core")

    return refuse


class Committed(list[int]):
    """Prompt and reply of one row, to be read: methods of a list that change it raise TypeError."""

    append = extend = insert = remove = clear = sort = reverse = _core_only("changing them")  # type: ignore[assignment]
    pop = __setitem__ = __delitem__ = __iadd__ = __imul__ = _core_only("changing them")  # type: ignore[assignment]

    def commit(self, tokens: Sequence[int]) -> None:
        """Core only: lengthen the reply."""
        list.extend(self, tokens)


class Lane:
    """B requests advanced together, one round at a time.

    Attributes:
        target, drafter: the pair this lane runs on (drafter None: plain decoding).
        states: the target's state, `lengths[b]` committed positions per row, anchor not included.
        draft_state: the drafter's per-request state for the same rows.
        tokens: per row, prompt + reply so far as ints, to be read only; the last one is the anchor.
        anchors: (B,) int32.
        fresh: taps of committed rows since the last propose, oldest first, one block per forward; with history
            "last" only the newest. A prompt goes to `Drafter.prime`, its last row alone comes here as well.
        mark: where the target's states stood before the running verify.
        flight: the verify of a round that was begun, until its commit; its rows are in `states` by then.
    """

    def __init__(self, target: Target, drafter: Drafter | None, states: StateGroup, draft_state: DraftState | None):
        self.target = target
        self.drafter = drafter
        self.states = states
        self.draft_state = draft_state
        self.tokens: list[list[int]] = []
        self.anchors: mx.array | None = None
        self.fresh: list[TapBlock] = []
        self.mark: Mark | None = None
        self.flight: Flight | None = None
        self._draw: DrawFn | None = None

    @property
    def size(self) -> int:
        """B."""
        return len(self.tokens)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed positions per row, n (B,): len(tokens[b]) - 1."""
        return tuple(len(t) - 1 for t in self.tokens)

    def bind_draw(self, draw: DrawFn | None) -> None:
        """Core only: install this round's draw."""
        self._draw = draw

    def draw(self, logits: mx.array, step: int) -> tuple[mx.array, mx.array | None]:
        """Draw the draft token of step `step` (0-based) for every row, the way its request samples.

        logits (B, V) raw drafter logits; V may be smaller than the target's (missing ids are impossible).
        Returns tokens (B,) int32 and the distribution really drawn from (B, V) float32, None when every
        row takes its argmax. Put the latter, stacked, into `Draft.probs`.
        """
        if self._draw is None:
            raise RuntimeError("Lane.draw is only available inside spec_propose")
        return self._draw(logits, step)

    @property
    def greedy_limit(self) -> int | None:
        """What `draw` chooses among when all it does is the greedy choice of every row; None otherwise.

        A drafter may then choose by itself, step after step in one operation: the best of the first so many of its
        raw logits, by the rules of `shaping.greedy_ids`.
        """
        return getattr(self._draw, "greedy_limit", None)

    def last_tap(self, name: str) -> mx.array | None:
        """Tap `name` of each row's last committed position, (B, ...); None when nothing was committed yet."""
        import mlx.core as mx

        if not self.fresh:
            return None
        block = self.fresh[-1]
        value = block.taps.get(name)
        if value is None:
            return None
        last = [max(k, 1) - 1 for k in block.keep]
        if all(place == last[0] for place in last):
            return value[:, last[0]]
        return value[mx.arange(value.shape[0]), mx.array(last)]

    def fresh_rows(self, name: str, since: Sequence[int]) -> tuple[mx.array | None, list[int]]:
        """Tap `name` of each row's committed positions from since[b] on, for drafters with history "all".

        Returns taps (B, A, ...) with zeros right of each row's own, None when no row has any, and their
        counts (B,). A count below lengths[b] - since[b] says that the first ones were never seen: the row
        was prefilled without drafting.
        """
        rows: list[mx.array | None] = []
        for b, (length, start) in enumerate(zip(self.lengths, since, strict=True)):
            held = row_taps(self.fresh, name, b)
            known = 0 if held is None else held.shape[0]
            first = max(0, known - max(0, length - start))
            rows.append(None if held is None or first == known else held[first:])
        return pad_rows(rows), [0 if row is None else row.shape[0] for row in rows]


def row_taps(fresh: Sequence[TapBlock], name: str, b: int) -> mx.array | None:
    """All fresh taps `name` of row b, (A, ...), oldest first; None when it has none."""
    import mlx.core as mx

    parts = [block.taps[name][b, : block.keep[b]] for block in fresh if block.keep[b] and name in block.taps]
    return None if not parts else parts[0] if len(parts) == 1 else mx.concatenate(parts)


def pad_rows(rows: Sequence[mx.array | None]) -> mx.array | None:
    """Rows (A_b, ...) of unequal length as (B, max A, ...), zeros on the right; None when all are None."""
    import mlx.core as mx

    longest = max((row for row in rows if row is not None), key=lambda row: row.shape[0], default=None)
    if longest is None:
        return None
    count, rest, dtype = longest.shape[0], longest.shape[1:], longest.dtype
    padded = []
    for row in rows:
        have = mx.zeros((0, *rest), dtype) if row is None else row
        gap = mx.zeros((count - have.shape[0], *rest), dtype)
        padded.append(mx.concatenate([have, gap]) if gap.shape[0] else have)
    return mx.stack(padded)
