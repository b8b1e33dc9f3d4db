"""One round of a lane: propose, mark, verify, accept, rollback, commit. Nothing about requests' ends.

Invariant between rounds: `lane.states.lengths[b] == len(lane.tokens[b]) - 1`: the anchor is the last
committed token and is not in the target's state yet, unless the next verify was launched already (`lane.flight`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .state.steps import await_readers
from .types import Draft, TapBlock

if TYPE_CHECKING:
    from .accept import AcceptResult, GreedyBlock, GreedyStep, RowResult
    from .judge import Judge
    from .lane import Lane
    from .pair import Pair
    from .request import Row

log = logging.getLogger("mlx_spec.round")


@dataclass(slots=True)
class RoundHooks:
    """The three round hooks, bound once per pair to its owners and core's defaults."""

    propose: Callable[..., Draft]
    verify: Callable[..., Any]
    rollback: Callable[..., Any]


def bind_hooks(pair: Pair) -> RoundHooks:
    """The three round hooks, each bound once to its owner and core's defaults."""
    from .plugins import get_manager

    manager = get_manager()
    drafts = manager.owner_call("spec_propose", pair.drafter_owner)
    checks = manager.owner_call("spec_verify", pair.owner)
    target_back = manager.owner_call("spec_rollback", pair.owner)
    drafter_back = manager.owner_call("spec_rollback", pair.drafter_owner)

    def rollback(lane: Lane, side: str, keep: Sequence[int]) -> object:
        call = target_back if side == "target" else drafter_back
        return call(lane=lane, side=side, keep=keep)

    return RoundHooks(drafts, checks, rollback)


@dataclass(slots=True)
class Clock:
    """Seconds per phase; with `sync` every phase is evaluated before the next one starts."""

    sync: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = 0.0

    def start(self) -> None:
        """Begin a round."""
        self._last = time.perf_counter()

    def lap(self, phase: str, *arrays: mx.array | None) -> None:
        """Close `phase`; under `sync`, wait for what it produced."""
        if self.sync:
            mx.eval([a for a in arrays if a is not None])
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


class DraftFault(Exception):
    """A drafter broke its contract; costs acceptance, never the reply."""


def checked_draft(draft: Draft | None, lane: Lane, budget: Sequence[int]) -> Draft:
    """A draft whose shapes and counts can be trusted, or DraftFault naming the fault."""
    if draft is None:
        raise DraftFault("drafter returned nothing")
    tokens = draft.tokens
    if not isinstance(tokens, mx.array) or tokens.ndim != 2 or tokens.shape[0] != lane.size:
        shape = getattr(tokens, "shape", type(tokens).__name__)
        raise DraftFault(f"draft tokens: found {shape}, expected ({lane.size}, K)")
    if not mx.issubdtype(tokens.dtype, mx.integer):
        raise DraftFault(f"draft tokens: found dtype {tokens.dtype}, expected an integer dtype")
    width = tokens.shape[1]
    counts = [width] * lane.size if draft.counts is None else [int(c) for c in draft.counts]
    if len(counts) != lane.size or any(not 0 <= c <= width for c in counts):
        raise DraftFault(f"draft counts: found {counts}, expected {lane.size} values from 0 to {width}")
    counts = [min(c, b) for c, b in zip(counts, budget, strict=True)]
    longest = max(counts)
    probs = draft.probs
    if probs is not None and (probs.ndim != 3 or probs.shape[:2] != tokens.shape):
        raise DraftFault(f"draft probs: found shape {probs.shape}, expected {tokens.shape} + (V,)")
    if longest < width:
        tokens, probs = tokens[:, :longest], None if probs is None else probs[:, :longest]
    return Draft(tokens.astype(mx.int32), counts, probs, draft.confidence)


def propose(lane: Lane, hooks: RoundHooks, budget: Sequence[int], draw: Any) -> Draft:
    """Ask the drafter; raises DraftFault for everything it may do wrong, with the target untouched."""
    before = lane.mark = lane.states.mark()
    anchors, rows = lane.anchors, list(lane.tokens)
    lane.bind_draw(draw)
    try:
        draft = checked_draft(hooks.propose(lane=lane, budget=budget), lane, budget)
    except DraftFault:
        raise
    except Exception as exc:  # a drafter is foreign code: whatever it raises must only cost acceptance
        log.debug("drafter raised", exc_info=True)
        raise DraftFault(f"drafter raised {type(exc).__name__}: {exc}") from exc
    finally:
        lane.bind_draw(None)
        same = len(lane.tokens) == len(rows) and all(a is b for a, b in zip(lane.tokens, rows, strict=True))
        meddled = lane.anchors is not anchors or not same
        lane.tokens = rows
        lane.anchors = mx.array([tokens[-1] for tokens in rows], dtype=mx.int32)  # arrays can be written in place
    if meddled:
        raise DraftFault("drafter changed the lane's tokens or anchors")
    if lane.states.lengths != before.lengths:
        lane.states.rewind(before, [0] * lane.size)
        raise DraftFault("drafter changed the target's state")
    if lane.drafter is not None and lane.drafter.capabilities.history == "all":
        lane.fresh = []  # seen now; after a fault they stay, since nobody knows how much of them was
    return draft


def clip_ids(draft: Draft, vocab_size: int) -> Draft:
    """The same draft with ids a forward can look up; acceptance still sees the original ids."""
    return Draft(mx.clip(draft.tokens, 0, vocab_size - 1), draft.counts, draft.probs, draft.confidence)


def settle(lane: Lane, hooks: RoundHooks, keep: Sequence[int], clock: Clock) -> None:
    """Roll the target back to the kept rows and check that it did."""
    if lane.mark is None:
        raise RuntimeError("settle before a mark")
    want = tuple(m + k for m, k in zip(lane.mark.lengths, keep, strict=True))
    got = tuple(hooks.rollback(lane=lane, side="target", keep=keep))
    if got != want or lane.states.lengths != want:
        raise RuntimeError(f"rollback left the target at {got}, expected {want}")
    lane.mark = None
    clock.lap("rollback")


def commit(lane: Lane, keep: Sequence[int], tokens: Sequence[Sequence[int]], taps: dict[str, mx.array]) -> None:
    """Append each row's tokens, move the anchors, and hand the kept taps to the drafter."""
    for held, new in zip(lane.tokens, tokens, strict=True):
        list.extend(held, new)  # past the guard that keeps drafters out
    lane.anchors = mx.array([held[-1] for held in lane.tokens], dtype=mx.int32)
    lane.flight = None
    history = lane.drafter.capabilities.history if lane.drafter is not None else "none"
    if history == "none" or not taps:
        lane.fresh = []
    elif history == "last":
        lane.fresh = [TapBlock(taps, list(keep))]
    else:
        lane.fresh.append(TapBlock(taps, list(keep)))


@dataclass(slots=True)
class Flight:
    """A verify that is built and may be under way.

    Attributes:
        draft: what is verified.
        pending: the verdict numbers, lazy; None when it has to be built (again).
        taps: of the verified rows.
    """

    draft: Draft
    pending: AcceptResult | GreedyStep | GreedyBlock | None = None
    taps: dict[str, mx.array] = field(default_factory=dict)


def launch(lane: Lane, hooks: RoundHooks, rows: Sequence[Row], draft: Draft, judge: Judge, clock: Clock) -> Flight:
    """Mark, and build the target's forward over [anchor, *draft] and its verdict.

    Waits for nothing but, on the CPU, for a drafter that reads much of the target's K/V.
    """
    if lane.mark is None:  # as when it was drafted
        lane.mark = lane.states.mark()
    positions = [n + 1 for n in lane.lengths]
    seen = hooks.verify(lane=lane, draft=clip_ids(draft, lane.target.vocab_size))
    clock.lap("verify", seen.logits)
    lane.flight = Flight(draft, judge.score(rows, seen.logits, draft, positions), seen.taps)
    await_readers([draft.tokens], lane.states.bytes_read)
    return lane.flight


def recall(lane: Lane) -> None:
    """Take the verify that is under way back out of the target's states; what was drafted stays."""
    if lane.flight is None or lane.mark is None or lane.flight.pending is None:
        return
    lane.states.rewind(lane.mark, [0] * lane.size)
    lane.mark, lane.flight = None, Flight(lane.flight.draft)


def land(flight: Flight, clock: Clock, per_row_accepts: bool = True) -> list[RowResult]:
    """What a verify says for every row, before stops and limits cut it: the one host sync of a round."""
    if flight.pending is None:
        raise RuntimeError("a verify that was not launched cannot land")
    results = flight.pending.read()
    if not per_row_accepts:
        from .cutting import in_step

        results = in_step(results)
    clock.lap("accept")
    return results
