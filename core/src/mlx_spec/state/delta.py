"""State of a gated-delta layer: a recurrence, the convolution before it, and a tape of the last block.

Neither can be shortened like K/V. A block that may be taken back leaves the state before it (by reference, an
array is never changed) and a tape of a few kilobytes per row: what its steps added. `rewind` runs the kept
steps of the tape again from the state before; the target is not asked a second time. It need not run them at
once: they are owed until somebody wants the state, and a rule that can runs them on the way to its next steps.
So a rewind computes nothing at all; it remembers numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import add, sub
from typing import Any, NamedTuple

import mlx.core as mx

from ..gated_delta import GatedDelta, Owed
from .base import Mark, State
from .registry import register_state


class Steps(NamedTuple):
    """What L steps did, enough to do any prefix of them again.

    Attributes:
        joined: (B, K - 1 + L, C), the convolution's input: the window before the steps, and a row for each.
        k: (B, L, Hk, Dk), g: (B, L, Hv), delta: (B, L, Hv, Dv), as in `mlx_spec.gated_delta`.
    """

    joined: mx.array
    k: mx.array
    g: mx.array
    delta: mx.array

    @property
    def rows(self) -> mx.array:
        """(B, L, C), what was appended to the window."""
        return self.joined[:, self.joined.shape[1] - self.k.shape[1] :]


class Held:
    """Window (B, K - 1, C) and recurrence (B, Hv, Dv, Dk) float32, there or to be made of steps.

    Args:
        recurrent: the recurrence; before the first of `steps` when it is `due`.
        window: the window; None: what it is after the first counts[b] of `steps`.
        due: whether the recurrence is owed as many steps.
        rule: runs them again, should it have to.
    """

    __slots__ = ("_counts", "_due", "_recurrent", "_rule", "_steps", "_window")

    def __init__(
        self,
        recurrent: mx.array,
        window: mx.array | None = None,
        steps: Steps | None = None,
        counts: tuple[int, ...] = (),
        due: bool = False,
        rule: GatedDelta | None = None,
    ):
        self._recurrent, self._window, self._steps = recurrent, window, steps
        self._counts, self._due, self._rule = counts, due, rule

    @property
    def window(self) -> mx.array:
        """The window, made now when it is not there."""
        if self._window is None:
            steps = self._pending
            self._window = _from(steps.joined, self._counts, steps.joined.shape[1] - steps.k.shape[1])
            self._forget()
        return self._window

    @property
    def owed(self) -> Owed | None:
        """What has to be run to get at the recurrence; None when it is there."""
        if not self._due:
            return None
        _, k, g, delta = self._pending
        return Owed(self._recurrent, k, g, delta, _keep(self._counts))

    @property
    def recurrent(self) -> mx.array:
        """The recurrence; what is owed is run now."""
        owed = self.owed
        if owed is not None:
            if self._rule is None:
                raise RuntimeError("steps are owed to a recurrence, and there is no rule to run them")
            self.settle(self._rule.replay(*owed))
        return self._recurrent

    def settle(self, recurrent: mx.array) -> None:
        """Take over what was owed, run by somebody else."""
        self._recurrent, self._due = recurrent, False
        self._forget()

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Everything held, without running what is owed."""
        known = (self._recurrent,) if self._window is None else (self._recurrent, self._window)
        if self._due:
            return (*known, *self._pending, _keep(self._counts))
        return known if self._window is not None else (*known, self._pending.joined)

    @property
    def _pending(self) -> Steps:
        if self._steps is None:
            raise RuntimeError("a state that is neither there nor made of steps")
        return self._steps

    def _forget(self) -> None:
        if self._window is not None and not self._due:
            self._steps = None


@register_state("delta")
class DeltaState(State):
    """One gated-delta layer's state for B rows, rewound by replay.

    Invariants: `_live` is the state at `lengths`, None while nothing is held. `_base` is the state at the last
    mark and `_tape` the runs since, from `_began` positions on; in a merged state the tape of row b has `_pad[b]`
    steps in front, which pad it to the longest one, and else `_pad` is empty. Without a mark nothing is recorded.
    """

    def __init__(self, batch: int = 1):
        self._lengths = self._began = (0,) * batch
        self._live: Held | None = None
        self._base: Held | None = None
        self._tape: tuple[Steps, ...] = ()
        self._pad: tuple[int, ...] = ()
        self._marked = False
        self._rule = GatedDelta()

    # -- what a layer asks of it -------------------------------------------------------------------------

    def joined(self, rows: mx.array, kept: int) -> mx.array:
        """The convolution's input: `kept` held rows, zeros at the start, then rows (B, L, C)."""
        if rows.shape[0] != len(self._lengths):
            raise ValueError(f"state of {len(self._lengths)} rows was given {rows.shape[0]}")
        if self._live is None:
            window = mx.zeros((rows.shape[0], kept, rows.shape[2]), dtype=rows.dtype)
            return mx.concatenate([window, rows], axis=1)
        return mx.concatenate([self._live.window, rows], axis=1)

    def recurrent(self, shape: tuple[int, ...]) -> mx.array:
        """The recurrence (B, Hv, Dv, Dk) as it stands, zeros of `shape` at the start."""
        return mx.zeros(shape, dtype=mx.float32) if self._live is None else self._live.recurrent

    @property
    def owed(self) -> Owed | None:
        """What is still to be run to get at the recurrence, for `GatedDelta.resume`."""
        return None if self._live is None else self._live.owed

    def append(
        self, recurrent: mx.array, steps: Steps, rule: GatedDelta, tape: bool = True, paid: bool = False
    ) -> None:
        """Take over L steps that ran from here.

        Args:
            recurrent: the recurrence after the last step; before the first one when `paid`, by `resume`.
            steps: what happened, on what `joined` returned.
            rule: runs kept steps again, should it have to.
            tape: False for a run that nobody takes back, as of a prompt: it is not recorded and ends the mark.
        """
        joined, (batch, count) = steps.joined, steps.k.shape[:2]
        due, window = paid and self._live is not None, joined.shape[1] - count
        if due and self._live is not None:
            self._live.settle(recurrent)
        if not tape:
            self._unmark()
        self._lengths = tuple([n + count for n in self._lengths])
        self._rule = rule
        if self._marked:
            if self._base is None and not self._tape:
                self._base = self._live or Held(mx.zeros_like(recurrent), joined[:, :window])
            self._tape += (steps,)
            self._live = Held(recurrent, None, steps, (count,) * batch, due, rule)
            return
        self._began = self._lengths
        own = mx.contiguous(joined[:, count:])  # a copy of the window does not keep all that joined holds
        self._live = Held(recurrent, own, steps if due else None, (count,) * batch, due, rule)

    # -- State -------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._lengths

    @property
    def nbytes(self) -> int:
        return sum({id(array): array.nbytes for array in self.arrays()}.values())

    @property
    def tape_nbytes(self) -> int:
        """Bytes recorded since the last mark."""
        return sum(array.nbytes for steps in self._tape for array in steps)

    def arrays(self) -> list[mx.array]:
        held = [] if self._live is None else list(self._live.arrays)
        if self._base is not None and self._base is not self._live:
            held += self._base.arrays
        return held + [array for steps in self._tape for array in steps]

    def mark(self) -> Mark:
        self._set_mark()
        return Mark(self.lengths)

    def check_rewind(self, mark: Mark, keep: Sequence[int]) -> None:
        starts, lengths = mark.lengths, self._lengths
        if len(starts) != len(lengths) or len(keep) != len(lengths):
            raise ValueError(f"rewind of {len(lengths)} rows got {len(starts)} marks, {len(keep)} keeps")
        for b, (start, kept, first, held) in enumerate(zip(starts, keep, self._began, lengths, strict=True)):
            if kept < 0 or not first <= start + kept <= held:
                raise ValueError(
                    f"row {b} cannot keep {kept} rows after its mark at {start}: it holds {held}"
                    f" positions and can return to {first} and later"
                )

    def rewind(self, mark: Mark, keep: Sequence[int]) -> None:
        self.check_rewind(mark, keep)
        wanted = tuple(map(add, mark.lengths, keep))
        if wanted != self._lengths:
            self._owe(tuple(map(sub, wanted, self._began)))
            self._lengths = wanted
        if not any(wanted):
            self._live = None  # as when it was new
        self._set_mark()

    def extract(self, row: int) -> DeltaState:
        return self.select([row])

    def select(self, rows: Sequence[int]) -> DeltaState:
        return self._gather([(self, row) for row in rows])

    @classmethod
    def merge(cls, states: Sequence[State]) -> DeltaState:
        own = [state for state in states if isinstance(state, DeltaState)]
        if not own or len(own) < len(states):
            raise ValueError(f"cannot merge states of different kinds: {[type(s).__name__ for s in states]}")
        return cls._gather([(state, row) for state in own for row in range(len(state._lengths))])

    def to_tensors(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        tensors = {} if self._live is None else _named("", self._live)
        if self._tape and self._base is not None:
            tape = _one(self._tape, self._base.window)
            tensors |= _named("base_", self._base)
            tensors |= {f"tape_{name}": getattr(tape, name) for name in STEPS}
        pad = self._pad or (0,) * len(self._lengths)
        return tensors, {"lengths": list(self._lengths), "pad": list(pad), "marked": self._marked}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, mx.array], meta: Mapping[str, Any]) -> DeltaState:
        state = cls(batch=len(meta["lengths"]))
        state._lengths = state._began = tuple(meta["lengths"])
        state._marked = bool(meta["marked"])
        state._pad = tuple(meta["pad"]) if any(meta["pad"]) else ()
        if tensors:
            state._live = _held("", tensors)
        if "tape_k" in tensors:
            state._base = _held("base_", tensors)
            rows, k, g, delta = (tensors[f"tape_{name}"] for name in STEPS)
            state._tape = (Steps(mx.concatenate([state._base.window, rows], axis=1), k, g, delta),)
            state._began = tuple([n - k.shape[1] + pad for n, pad in zip(meta["lengths"], meta["pad"], strict=True)])
        elif state._marked:
            state._base = state._live
        return state

    # -- what mlx-lm's modules ask of a cache ------------------------------------------------------------

    @property
    def offset(self) -> int | mx.array:
        same = all(n == self._lengths[0] for n in self._lengths)
        return self._lengths[0] if same else mx.array(self._lengths, dtype=mx.int32)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        """None: a recurrence sees everything before it, and nothing after."""

    # -- shared machinery --------------------------------------------------------------------------------

    def _set_mark(self) -> None:
        self._base, self._tape, self._began, self._pad, self._marked = self._live, (), self._lengths, (), True

    def _unmark(self) -> None:
        self._set_mark()
        self._base, self._marked = None, False

    def _owe(self, counts: tuple[int, ...]) -> None:
        """Make `_live` the state after the first counts[b] steps of row b, run when somebody wants it."""
        base = self._base
        if base is None:
            raise RuntimeError("a tape without the state it begins at")
        if not any(counts):
            self._live = base
            return
        plain = len(self._tape) == 1 and not self._pad
        steps = self._tape[0] if plain else _one(self._tape, base.window, self._pad)
        self._live = Held(base.recurrent, None, steps, counts, True, self._rule)

    @classmethod
    def _gather(cls, rows: Sequence[tuple[DeltaState, int]]) -> DeltaState:
        """A new state of these (state, row), in order, tapes included."""
        out = cls(batch=len(rows))
        out._lengths = out._began = tuple([state._lengths[row] for state, row in rows])
        like = next((state for state, _ in rows if state._live is not None), None)
        out._marked = any(state._marked for state, _ in rows)
        if like is None or like._live is None or not any(out._lengths):
            return out
        out._rule = like._rule
        index = [row for _, row in rows]
        out._live = _gathered([state._live for state, _ in rows], index, like._live)
        out._base = out._live if out._marked else None
        tapes = [_one(s._tape, s._base.window) if s._tape and s._base else None for s, _ in rows]
        width = max(tape.k.shape[1] if tape else 0 for tape in tapes)
        if width:
            bases = [state._base if state._tape else state._live for state, _ in rows]
            out._base = _gathered(bases, index, like._live)
            out._tape = (_padded(tapes, index, width, out._base.window),)
            out._began = tuple([state._began[row] for state, row in rows])
            pad = [width - n + first for n, first in zip(out._lengths, out._began, strict=True)]
            out._pad = tuple(pad) if any(pad) else ()
        return out


STEPS = ("rows", "k", "g", "delta")


def _named(prefix: str, held: Held) -> dict[str, mx.array]:
    return {f"{prefix}window": held.window, f"{prefix}recurrent": held.recurrent}


def _held(prefix: str, tensors: Mapping[str, mx.array]) -> Held:
    return Held(tensors[f"{prefix}recurrent"], tensors[f"{prefix}window"])


@lru_cache(maxsize=256)
def _keep(counts: tuple[int, ...]) -> mx.array:
    """(B,) int32, one for all layers that keep the same."""
    return mx.array(counts, dtype=mx.int32)


def _one(tape: Sequence[Steps], window: mx.array, pad: Sequence[int] = ()) -> Steps:
    """Consecutive runs from `window` on as one, without the first pad[b] steps of row b."""
    if len(tape) == 1 and not pad:
        return tape[0]
    parts = [mx.concatenate([getattr(run, name) for run in tape], axis=1) for name in STEPS]
    rows, k, g, delta = (_from(part, pad, part.shape[1]) if pad else part for part in parts)
    return Steps(mx.concatenate([window, rows], axis=1), k, g, delta)


def _from(x: mx.array, starts: Sequence[int], count: int) -> mx.array:
    """(B, count, ...): `count` rows of x (B, T, ...) from starts[b] on; zeros past T."""
    missing = max(starts) + count - x.shape[1]
    if missing > 0:
        x = mx.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)])
    if len(set(starts)) == 1:
        return x[:, starts[0] : starts[0] + count]
    return mx.concatenate([x[b : b + 1, start : start + count] for b, start in enumerate(starts)])


def _rows(parts: Sequence[mx.array], rows: Sequence[int]) -> mx.array:
    """parts[i][rows[i]] of every i; a run of rows of one array is taken at once."""
    if all(part is parts[0] for part in parts):
        return parts[0] if list(rows) == list(range(parts[0].shape[0])) else parts[0][mx.array(list(rows))]
    return mx.concatenate([part[row : row + 1] for part, row in zip(parts, rows, strict=True)])


def _gathered(parts: Sequence[Held | None], rows: Sequence[int], like: Held) -> Held:
    """One row of each part; None counts as zeros."""
    blank = Held(mx.zeros_like(like.recurrent[:1]), mx.zeros_like(like.window[:1]))
    index = [0 if part is None else row for part, row in zip(parts, rows, strict=True)]
    whole = [part or blank for part in parts]
    return Held(_rows([p.recurrent for p in whole], index), _rows([p.window for p in whole], index))


def _padded(tapes: Sequence[Steps | None], rows: Sequence[int], width: int, window: mx.array) -> Steps:
    """One row of each tape, padded in front to `width` steps that follow `window`."""
    like, made = next(tape for tape in tapes if tape), []
    index = [0 if tape is None else row for tape, row in zip(tapes, rows, strict=True)]
    for name in STEPS:
        parts = [getattr(like, name)[:1, :0] if tape is None else getattr(tape, name) for tape in tapes]
        if any(part.shape[1] < width for part in parts):
            parts = [mx.pad(x, [(0, 0), (width - x.shape[1], 0), *[(0, 0)] * (x.ndim - 2)]) for x in parts]
        made.append(_rows(parts, index))
    return Steps(mx.concatenate([window, made[0]], axis=1), *made[1:])


__all__ = ["DeltaState", "Held", "Steps"]
