"""A lane as one file, to go on with: tokens, both sides' states, taps and drafts that wait."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .draft_state import DraftState
from .lane import Lane
from .rounds import Flight, recall
from .state import StateGroup
from .state.files import read_state, write_state
from .types import Draft, TapBlock

if TYPE_CHECKING:
    from .models import Drafter, Target


def save_lane(lane: Lane, path: str | Path) -> None:
    """Write a lane, as it stands between two rounds, to one safetensors file at `path`, atomically.

    Models, settings and what requests hold besides are not in it. A verify that is under way is taken back, and what
    it verifies is saved; the lane itself then verifies it again. Raises RefusedError when the drafter keeps objects
    that have no form in a file, as prompt-lookup does, ValueError while a plain step is under way (the next one starts
    early).
    """
    recall(lane)
    if lane.states.lengths != lane.lengths:
        raise ValueError(f"a lane that holds {lane.states.lengths} positions of {lane.lengths} committed ones")
    tensors, states = _under("states", *lane.states.to_tensors())
    meta: dict[str, Any] = {"tokens": [list(tokens) for tokens in lane.tokens], "states": states, "draft": None}
    if lane.draft_state is not None:
        own, meta["draft"] = _under("draft", *lane.draft_state.to_tensors())
        tensors |= own
    meta["drafted"] = None
    if lane.flight is not None:  # the drafter would draft something else, asked a second time
        draft = lane.flight.draft
        meta["drafted"] = list(draft.counts or ())
        tensors |= {"drafted.tokens": draft.tokens} | ({} if draft.probs is None else {"drafted.probs": draft.probs})
    meta["fresh"] = [list(block.keep) for block in lane.fresh]
    for i, block in enumerate(lane.fresh):
        tensors |= {f"fresh.{i}.{name}": value for name, value in block.taps.items()}
    write_state(Path(path), tensors, meta)


def load_lane(path: str | Path, target: Target, drafter: Drafter | None) -> Lane:
    """The lane that `save_lane` wrote, on the same pair. LoadError for any other or a damaged file."""
    tensors, meta = read_state(Path(path))
    groups: dict[str, dict[str, mx.array]] = {"states": {}, "draft": {}, "drafted": {}, "fresh": {}}
    for name, value in tensors.items():
        part, _, rest = name.partition(".")
        groups[part][rest] = value
    states = StateGroup.from_tensors(groups["states"], meta["states"])
    draft = DraftState.from_tensors(groups["draft"], meta["draft"]) if meta["draft"] is not None else None
    lane = Lane(target, drafter, states, draft)
    lane.tokens = [list(tokens) for tokens in meta["tokens"]]
    lane.anchors = mx.array([tokens[-1] for tokens in lane.tokens], dtype=mx.int32)
    if meta["drafted"] is not None:
        drafted = groups["drafted"]
        lane.flight = Flight(Draft(drafted["tokens"], meta["drafted"], drafted.get("probs")))
    lane.fresh = [TapBlock({}, list(keep)) for keep in meta["fresh"]]
    for name, value in groups["fresh"].items():
        block, _, tap = name.partition(".")
        lane.fresh[int(block)].taps[tap] = value
    return lane


def _under(
    prefix: str, tensors: dict[str, mx.array], meta: dict[str, Any]
) -> tuple[dict[str, mx.array], dict[str, Any]]:
    return {f"{prefix}.{name}": value for name, value in tensors.items()}, meta
