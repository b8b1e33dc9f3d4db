"""Rows joining and leaving a lane, between rounds only. State is copied here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .draft_state import DraftState
from .lane import Lane, pad_rows, row_taps
from .types import TapBlock

if TYPE_CHECKING:
    from .pair import Pair
    from .prefill import Prefill


def single_lane(pair: Pair, work: Prefill) -> Lane:
    """A lane of one freshly prefilled row."""
    import mlx.core as mx

    lane = Lane(pair.target, pair.drafter if pair.plan.active else None, work.states, work.draft_state)
    lane.tokens = [work.row.tokens]
    lane.anchors = mx.array([work.row.tokens[-1]], dtype=mx.int32)
    lane.fresh = work.fresh
    return lane


def join_lanes(lanes: Sequence[Lane]) -> Lane:
    """One lane with the rows of all, in order."""
    import mlx.core as mx

    if len(lanes) == 1:
        return lanes[0]
    first = lanes[0]
    merged = Lane(first.target, first.drafter, type(first.states).merge([lane.states for lane in lanes]), None)
    drafts = [lane.draft_state for lane in lanes if lane.draft_state is not None]
    if len(drafts) == len(lanes):
        merged.draft_state = DraftState.merge(drafts)
    merged.tokens = [tokens for lane in lanes for tokens in lane.tokens]
    merged.anchors = mx.concatenate([lane.anchors for lane in lanes if lane.anchors is not None])
    merged.fresh = _join_taps(lanes)
    return merged


def leave_lane(lane: Lane, stay: Sequence[int]) -> Lane | None:
    """Only the rows in `stay`; None when no row is left."""
    import mlx.core as mx

    if not stay:
        return None
    if lane.anchors is None:
        raise RuntimeError("a lane without anchors cannot be narrowed")
    index = mx.array(list(stay))
    out = Lane(lane.target, lane.drafter, lane.states.select(stay), None)
    if lane.draft_state is not None:
        out.draft_state = lane.draft_state.select(stay)
    out.tokens = [lane.tokens[b] for b in stay]
    out.anchors = lane.anchors[index]
    out.fresh = [
        TapBlock({name: value[index] for name, value in block.taps.items()}, [block.keep[b] for b in stay])
        for block in lane.fresh
    ]
    return out


def _join_taps(lanes: Sequence[Lane]) -> list[TapBlock]:
    """The fresh taps of all rows as one block, padded on the right; rows without any keep none of it."""
    names = {name for lane in lanes for block in lane.fresh for name in block.taps}
    taps, keep = {}, [0] * sum(lane.size for lane in lanes)
    for name in names:
        rows = [row_taps(lane.fresh, name, b) for lane in lanes for b in range(lane.size)]
        stacked = pad_rows(rows)
        if stacked is not None:
            taps[name] = stacked
            keep = [max(k, 0 if row is None else row.shape[0]) for k, row in zip(keep, rows, strict=True)]
    return [TapBlock(taps, keep)] if taps else []
