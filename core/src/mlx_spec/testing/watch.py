"""Watch and steer the proposes of a running engine, without the drafter noticing."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..types import Draft

if TYPE_CHECKING:
    from ..engine import Engine
    from ..lane import DrawFn, Lane
    from ..rounds import RoundHooks
    from ..state import StateGroup

Steer = Callable[[Sequence[int], int], int]  # (tokens so far, step) -> id the draft must have there
Tensors = dict[str, mx.array]


@dataclass(slots=True)
class Draw:
    """One `lane.draw`: logits (B, V) asked with, tokens (B,) and law (B, V) or None answered."""

    logits: mx.array
    tokens: mx.array
    law: mx.array | None


@dataclass(slots=True)
class Proposal:
    """One propose as it happened.

    Attributes:
        histories: per row, prompt and reply so far, anchor last.
        draft: what the drafter returned, before steering; None when it raised.
        draws: its calls of `lane.draw`, in order.
        misdeeds: what it did to the target meanwhile, in words.
        error: what it raised, "" when it did not.
    """

    histories: list[list[int]]
    budget: list[int]
    draft: Draft | None = None
    draws: list[Draw] = field(default_factory=list)
    misdeeds: list[str] = field(default_factory=list)
    error: str = ""
    _host: list[list[int]] | None = None

    def ids(self, row: int) -> list[int]:
        """Drafted ids of one row, at most its budget."""
        draft = self.draft
        if draft is None or draft.tokens.ndim != 2:
            return []
        if self._host is None:
            self._host = draft.tokens.tolist()
        count = draft.tokens.shape[1] if draft.counts is None else int(draft.counts[row])
        return self._host[row][: min(count, self.budget[row])]


class Watch:
    """Stands between an engine and its drafter: records every propose, and steers it when asked.

    Steering replaces the token that `lane.draw` answers with, so that the drafter itself goes on from the
    wanted token; drafts of a drafter that never draws are replaced as a whole. Either way the round then has
    the accept count a test wants, with the drafter's own state behind it.

    Args:
        steer: the wanted id of every drafted position, None to leave drafts alone.
        guard: also compare the target's state before and after, byte by byte.
    """

    def __init__(self, engine: Engine, steer: Steer | None = None, guard: bool = False):
        self.proposals: list[Proposal] = []
        self.steer, self.guard = steer, guard
        self.hooks: RoundHooks = engine._advancer.hooks
        engine._advancer.hooks = replace(self.hooks, propose=self._propose)

    def _propose(self, lane: Lane, budget: Sequence[int]) -> Draft:
        seen = Proposal([list(tokens) for tokens in lane.tokens], list(budget))
        self.proposals.append(seen)
        return watched_propose(self.hooks, lane, seen, self.steer, self.guard)


def watched_propose(
    hooks: RoundHooks, lane: Lane, seen: Proposal, steer: Steer | None = None, guard: bool = False
) -> Draft:
    """Ask the drafter of `lane` and write down in `seen` what it did; returns the (steered) draft."""
    inner = lane._draw
    before = saved(lane.states) if guard else {}
    facts = _facts(lane)
    lane.bind_draw(_recorder(inner, seen, steer))
    try:
        with _target_watched(lane, seen):
            seen.draft = hooks.propose(lane=lane, budget=list(seen.budget))
    except Exception as error:  # the author's code: what it raised is what is reported
        last = traceback.extract_tb(error.__traceback__)[-1]
        seen.error = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
        raise
    finally:
        lane.bind_draw(inner)
        if guard:
            seen.misdeeds += _changes(before, saved(lane.states))
        seen.misdeeds += [f"it changed lane.{name}" for name, value in _facts(lane).items() if value != facts[name]]
    if steer is None or seen.draws or seen.draft is None:
        return seen.draft  # type: ignore[return-value]
    return _steered(seen.draft, seen.histories, steer)


def _recorder(inner: DrawFn | None, seen: Proposal, steer: Steer | None) -> DrawFn:
    def draw(logits: mx.array, step: int) -> tuple[mx.array, mx.array | None]:
        if inner is None:
            raise RuntimeError("no draw is bound")
        tokens, law = inner(logits, step)
        if steer is not None:
            wanted = mx.array([steer(history, step) for history in seen.histories], dtype=mx.int32)
            tokens = mx.where(wanted < logits.shape[-1], wanted, tokens)  # a smaller vocabulary cannot draw it
        seen.draws.append(Draw(logits, tokens, law))
        return tokens, law

    return draw


def _steered(draft: Draft, histories: Sequence[Sequence[int]], steer: Steer) -> Draft:
    """The same draft, same counts, with the ids `steer` wants."""
    rows, width = draft.tokens.shape
    wanted = [[steer(history, step) for step in range(width)] for history in histories]
    return Draft(mx.array(wanted, dtype=mx.int32).reshape(rows, width), draft.counts)


def _facts(lane: Lane) -> dict[str, Any]:
    """What of a lane a drafter has no business to change, as host values."""
    return {
        "tokens": [list(tokens) for tokens in lane.tokens],
        "anchors": lane.anchors.tolist() if lane.anchors is not None else None,
        "states' lengths": [state.lengths for state in lane.states],
    }


@contextmanager
def _target_watched(lane: Lane, seen: Proposal) -> Iterator[None]:
    """Write down every use of the target's state that is more than looking at what is stored."""
    target, states = lane.target, lane.states
    mine = {id(states), *(id(state) for state in states)}
    forward = target.forward

    def watched_forward(tokens: Any, given: Any, *more: Any, **named: Any) -> Any:
        if id(given) in mine:
            seen.misdeeds.append("it ran the target's forward on the target's own state")
        return forward(tokens, given, *more, **named)

    patched: list[tuple[Any, str]] = [(target, "forward")]
    target.forward = watched_forward  # type: ignore[method-assign, assignment]
    for state in states:
        for name in ("update_and_fetch", "rewind"):
            if hasattr(state, "__dict__"):
                setattr(state, name, _noted(getattr(state, name), name, seen))
                patched.append((state, name))
    try:
        yield
    finally:
        for owner, name in patched:
            owner.__dict__.pop(name, None)


def _noted(method: Callable[..., Any], name: str, seen: Proposal) -> Callable[..., Any]:
    def noted(*given: Any, **named: Any) -> Any:
        seen.misdeeds.append(f"it called {name} on the target's state")
        return method(*given, **named)

    return noted


# -- what a state holds, as bytes ------------------------------------------------------------------------


def saved(states: StateGroup) -> Tensors:
    """Every tensor of a state as it would be saved, evaluated."""
    tensors, _ = states.to_tensors()
    mx.eval(tensors)
    return tensors


def first_difference(a: Mapping[str, mx.array], b: Mapping[str, mx.array]) -> str:
    """ "" when both hold the same bytes, else where they first differ, in words."""
    if a.keys() != b.keys():
        only = sorted(a.keys() ^ b.keys())
        return f"tensor {only[0]!r} in one of them only"
    for name in a:
        if a[name].shape != b[name].shape:
            return f"tensor {name!r} with shape {a[name].shape} in one and {b[name].shape} in the other"
        if not same_bytes(a[name], b[name]):
            return f"tensor {name!r} ({_place(a[name], b[name])})"
    return ""


def same_bytes(a: mx.array, b: mx.array) -> bool:
    """Equal shape, dtype and bytes; NaN equals the same NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(mx.array_equal(a.view(mx.uint8), b.view(mx.uint8)).item()) if a.size else True


def _place(a: mx.array, b: mx.array) -> str:
    """Index of the first unequal element and how many there are."""
    unequal = (a != b).reshape(-1)
    count, flat = int(unequal.sum().item()), int(mx.argmax(unequal).item())
    index = []
    for size in reversed(a.shape):
        index.append(flat % size)
        flat //= size
    return f"{count} of {a.size} values, first at index {tuple(reversed(index))}"


def _changes(before: Tensors, after: Tensors) -> list[str]:
    where = first_difference(before, after)
    return [f"it changed the target's state: {where}"] if where else []
