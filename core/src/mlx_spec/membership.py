"""Rows joining and leaving a lane, between rounds only. State is copied here and nowhere else."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .draft_state import DraftState
from .lane import Lane, pad_rows, row_taps
from .rounds import DraftFault
from .types import TapBlock

if TYPE_CHECKING:
    from .pair import Pair
    from .prefill import Prefill

log = logging.getLogger("mlx_spec.engine")


def new_draft_state(pair: Pair) -> DraftState | None:
    """An empty state of the pair's drafter, None when it does not draft; DraftFault when it gives none."""
    if pair.drafter is None or not pair.plan.active:
        return None
    try:
        state = pair.drafter.make_state()
    except Exception as exc:  # foreign code: costs acceptance only
        log.debug("drafter make_state raised", exc_info=True)
        raise DraftFault(f"drafter make_state raised {type(exc).__name__}: {exc}") from exc
    if not isinstance(state, DraftState) or len(state.rows) != 1:
        found = f"{len(state.rows)} rows" if isinstance(state, DraftState) else type(state).__name__
        raise DraftFault(f"drafter make_state returned {found}, expected a DraftState of one row")
    if pair._blank is None:
        pair._blank = _copy(state)
    return state


def blank_draft_state(pair: Pair) -> DraftState | None:
    """A stand-in for a row without a state, which never drafts: a lane has one for every row."""
    return None if pair._blank is None else _copy(pair._blank)


def _copy(state: DraftState) -> DraftState | None:
    try:
        out = state.select([0])
        out.rows = copy.deepcopy(out.rows)
    except Exception:  # foreign code: no stand-in then; joining a row that needs one warns
        log.debug("a draft state could not be copied", exc_info=True)
        return None
    return out


def single_lane(pair: Pair, work: Prefill) -> Lane:
    """A lane of one freshly prefilled row."""
    import mlx.core as mx

    lane = Lane(pair.target, pair.drafter if pair.plan.active else None, work.states, work.draft_state)
    lane.tokens = [work.row.tokens]
    lane.anchors = mx.array([work.row.tokens[-1]], dtype=mx.int32)
    lane.fresh = work.fresh
    return lane


def join_lanes(pair: Pair, lanes: Sequence[Lane]) -> Lane:
    """One lane with the rows of all, in order."""
    import mlx.core as mx

    if len(lanes) == 1:
        return lanes[0]
    first = lanes[0]
    merged = Lane(first.target, first.drafter, type(first.states).merge([lane.states for lane in lanes]), None)
    merged.draft_state = _join_drafts(pair, lanes)
    merged.tokens = [tokens for lane in lanes for tokens in lane.tokens]
    merged.anchors = mx.concatenate([lane.anchors for lane in lanes if lane.anchors is not None])
    merged.fresh = _join_taps(lanes)
    return merged


def _join_drafts(pair: Pair, lanes: Sequence[Lane]) -> DraftState | None:
    """The drafter's state of all rows; None when none has one, or when they do not go together."""
    if all(lane.draft_state is None for lane in lanes):
        return None
    parts: list[DraftState | None] = []
    for lane in lanes:
        parts += [lane.draft_state] if lane.draft_state else [blank_draft_state(pair) for _ in range(lane.size)]
    try:
        return DraftState.merge([_whole(part) for part in parts])
    except Exception as exc:  # arrays of a drafter that do not fit each other: costs acceptance only
        _dropped("joined", exc)
        return None


def _whole(part: DraftState | None) -> DraftState:
    if part is None:
        raise ValueError("a request without one, and none to stand in")
    return part


def _dropped(verb: str, exc: Exception) -> None:
    log.debug("drafter states could not be %s", verb, exc_info=exc)
    log.warning("drafter states could not be %s (%s: %s): they are dropped", verb, type(exc).__name__, exc)


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
        try:
            out.draft_state = lane.draft_state.select(stay)
        except Exception as exc:  # as above
            _dropped("narrowed", exc)
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
