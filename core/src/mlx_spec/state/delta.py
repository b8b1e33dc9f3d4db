"""State of a gated-delta layer: a recurrence, the convolution before it, and a tape of the last block.

Neither can be shortened like K/V. A block that may be taken back leaves the state before it (by reference, an
array is never changed) and a tape of a few kilobytes per row: what its steps added. `rewind` runs the kept
steps of the tape again from the state before; the target is not asked a second time. It need not run them at
once: they are owed until somebody wants the state, and a rule that can runs them on the way to its next steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..gated_delta import GatedDelta, Owed
from .base import Mark, State
from .registry import register_state


@dataclass(frozen=True, slots=True)
class Steps:
    """What L steps did, enough to do any prefix of them again.

    Attributes:
        rows: (B, L, C) what was appended to the convolution window.
        k: (B, L, Hk, Dk), g: (B, L, Hv), delta: (B, L, Hv, Dv), as in `mlx_spec.gated_delta`.
    """

    rows: mx.array
    k: mx.array
    g: mx.array
    delta: mx.array

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All four, in order."""
        return self.rows, self.k, self.g, self.delta


class Held:
    """Window (B, K - 1, C) of the convolution and recurrence (B, Hv, Dv, Dk) float32, there or owed."""

    __slots__ = ("_recurrent", "_rule", "owed", "window")

    def __init__(self, window: mx.array, recurrent: mx.array | Owed, rule: GatedDelta | None = None):
        self.window, self._rule = window, rule
        self.owed = recurrent if isinstance(recurrent, Owed) else None
        self._recurrent = None if isinstance(recurrent, Owed) else recurrent

    @property
    def recurrent(self) -> mx.array:
        """The recurrence; what is owed is run now."""
        if self._recurrent is None:
            if self.owed is None or self._rule is None:
                raise RuntimeError("a recurrence that is neither there nor owed")
            self.settle(self._rule.replay(*self.owed.arrays))
        return self._recurrent

    def settle(self, recurrent: mx.array) -> None:
        """Take over what was owed, run by somebody else."""
        self._recurrent, self.owed = recurrent, None

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """Everything held, without running what is owed."""
        return (self.window, *(self.owed.arrays if self.owed else (self.recurrent,)))


@register_state("delta")
class DeltaState(State):
    """One gated-delta layer's state for B rows, rewound by replay.

    Invariants: `_live` is the state at `lengths`, None while nothing is held. `_base` is the state at the last
    mark and `_tape` what was appended since; the tape of row b begins after its first `_pad[b]` steps, which
    pad it to the longest of a merge. Without a mark nothing is recorded. `_joined` is the convolution's input
    while the tape is one run of a layer: every window that a rewind can return to is a piece of it.
    """

    def __init__(self, batch: int = 1):
        self._lengths = [0] * batch
        self._live: Held | None = None
        self._base: Held | None = None
        self._tape: list[Steps] = []
        self._joined: mx.array | None = None
        self._pad = [0] * batch
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
        self,
        joined: mx.array,
        recurrent: mx.array,
        steps: Steps,
        rule: GatedDelta,
        tape: bool = True,
        paid: bool = False,
    ) -> None:
        """Take over L steps that ran from here.

        Args:
            joined: what `joined` returned, (B, K - 1 + L, C).
            recurrent: the recurrence after the last step; before the first one when `paid`, by `resume`.
            steps: what happened.
            rule: runs kept steps again, should it have to.
            tape: False for a run that nobody takes back, as of a prompt: it is not recorded and ends the mark.
        """
        batch, count = steps.rows.shape[:2]
        after: mx.array | Owed = recurrent
        if paid and self._live is not None:
            self._live.settle(recurrent)
            after = Owed(recurrent, steps.k, steps.g, steps.delta, mx.full((batch,), count, dtype=mx.int32))
        if not tape:
            self._unmark()
        elif self._marked:
            if self._base is None and not self._tape:
                held = Held(joined[:, : joined.shape[1] - count], mx.zeros_like(recurrent))
                self._base = self._live or held
            self._joined = joined if not self._tape else None
            self._tape.append(steps)
        self._live, self._rule = Held(mx.contiguous(joined[:, count:]), after, rule), rule
        self._lengths = [n + count for n in self._lengths]

    # -- State -------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._lengths)

    @property
    def nbytes(self) -> int:
        return sum({id(array): array.nbytes for array in self.arrays()}.values())

    @property
    def tape_nbytes(self) -> int:
        """Bytes recorded since the last mark."""
        return sum(array.nbytes for steps in self._tape for array in steps.arrays)

    def arrays(self) -> list[mx.array]:
        held = [array for part in (self._live, self._base) if part for array in part.arrays]
        return held + [array for steps in self._tape for array in steps.arrays]

    def mark(self) -> Mark:
        self._set_mark()
        return Mark(self.lengths)

    def check_rewind(self, mark: Mark, keep: Sequence[int]) -> None:
        if len(mark.lengths) != len(self._lengths) or len(keep) != len(self._lengths):
            raise ValueError(f"rewind of {len(self._lengths)} rows got {len(mark.lengths)} marks, {len(keep)} keeps")
        taped = self._taped()
        for b, (start, kept) in enumerate(zip(mark.lengths, keep, strict=True)):
            held = self._lengths[b]
            if kept < 0 or not held - taped[b] <= start + kept <= held:
                raise ValueError(
                    f"row {b} cannot keep {kept} rows after its mark at {start}: it holds {held} positions"
                    f" and can return to {held - taped[b]} and later"
                )

    def rewind(self, mark: Mark, keep: Sequence[int]) -> None:
        self.check_rewind(mark, keep)
        wanted = [start + kept for start, kept in zip(mark.lengths, keep, strict=True)]
        if wanted != self._lengths:
            taped = self._taped()
            self._replay([n - (held - t) for n, held, t in zip(wanted, self._lengths, taped, strict=True)])
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
            tape = _one(self._tape)
            tensors |= _named("base_", self._base)
            tensors |= {f"tape_{name}": getattr(tape, name) for name in STEPS}
        return tensors, {"lengths": self._lengths, "pad": self._pad, "marked": self._marked}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, mx.array], meta: Mapping[str, Any]) -> DeltaState:
        state = cls(batch=len(meta["lengths"]))
        state._lengths, state._pad, state._marked = list(meta["lengths"]), list(meta["pad"]), bool(meta["marked"])
        if tensors:
            state._live = _held("", tensors)
        if "tape_k" in tensors:
            state._base = _held("base_", tensors)
            state._tape = [Steps(*(tensors[f"tape_{name}"] for name in STEPS))]
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
        self._base, self._tape, self._pad, self._marked = self._live, [], [0] * len(self._lengths), True
        self._joined = None

    def _unmark(self) -> None:
        self._set_mark()
        self._base, self._marked = None, False

    def _taped(self) -> list[int]:
        """Steps on the tape per row (B,)."""
        total = sum(steps.rows.shape[1] for steps in self._tape)
        return [total - pad for pad in self._pad]

    def _replay(self, counts: Sequence[int]) -> None:
        """Make `_live` the state after the first counts[b] taped steps of row b."""
        base = self._base
        if base is None:
            raise RuntimeError("a tape without the state it begins at")
        if not any(counts):
            self._live = base
            return
        tape = _aligned(_one(self._tape), self._pad)
        keep = mx.array(counts, dtype=mx.int32)
        joined = mx.concatenate([base.window, tape.rows], axis=1) if self._joined is None else self._joined
        window = _from(joined, counts, base.window.shape[1])
        self._live = Held(window, Owed(base.recurrent, tape.k, tape.g, tape.delta, keep), self._rule)

    @classmethod
    def _gather(cls, rows: Sequence[tuple[DeltaState, int]]) -> DeltaState:
        """A new state of these (state, row), in order, tapes included."""
        out = cls(batch=len(rows))
        out._lengths = [state._lengths[row] for state, row in rows]
        like = next((state for state, _ in rows if state._live is not None), None)
        out._marked = any(state._marked for state, _ in rows)
        if like is None or like._live is None or not any(out._lengths):
            return out
        out._rule = like._rule
        out._live = _gathered([state._live for state, _ in rows], [row for _, row in rows], like._live)
        out._base = out._live if out._marked else None
        tapes = [_one(state._tape) if state._tape else None for state, _ in rows]
        width = max(tape.rows.shape[1] if tape else 0 for tape in tapes)
        if width:
            taped = [state._taped()[row] for state, row in rows]
            shape = next(tape for tape in tapes if tape)
            out._tape = [_padded(tapes, [row for _, row in rows], width, shape)]
            out._pad = [width - n for n in taped]
            bases = [state._base if state._tape else state._live for state, _ in rows]
            out._base = _gathered(bases, [row for _, row in rows], like._live)
        return out


STEPS = ("rows", "k", "g", "delta")


def _named(prefix: str, held: Held) -> dict[str, mx.array]:
    return {f"{prefix}window": held.window, f"{prefix}recurrent": held.recurrent}


def _held(prefix: str, tensors: Mapping[str, mx.array]) -> Held:
    return Held(tensors[f"{prefix}window"], tensors[f"{prefix}recurrent"])


def _one(tape: Sequence[Steps]) -> Steps:
    """Consecutive runs as one."""
    if len(tape) == 1:
        return tape[0]
    return Steps(*(mx.concatenate(parts, axis=1) for parts in zip(*(steps.arrays for steps in tape), strict=True)))


def _from(x: mx.array, starts: Sequence[int], count: int) -> mx.array:
    """(B, count, ...): `count` rows of x (B, T, ...) from starts[b] on; zeros past T."""
    missing = max(starts) + count - x.shape[1]
    if missing > 0:
        x = mx.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)])
    if len(set(starts)) == 1:
        return x[:, starts[0] : starts[0] + count]
    return mx.concatenate([x[b : b + 1, start : start + count] for b, start in enumerate(starts)])


def _aligned(tape: Steps, pad: Sequence[int]) -> Steps:
    """The same steps without the padding in front of rows."""
    if not any(pad):
        return tape
    return Steps(*(_from(x, pad, tape.rows.shape[1]) for x in tape.arrays))


def _rows(parts: Sequence[mx.array], rows: Sequence[int]) -> mx.array:
    """parts[i][rows[i]] of every i; a run of rows of one array is taken at once."""
    if all(part is parts[0] for part in parts):
        return parts[0] if list(rows) == list(range(parts[0].shape[0])) else parts[0][mx.array(list(rows))]
    return mx.concatenate([part[row : row + 1] for part, row in zip(parts, rows, strict=True)])


def _gathered(parts: Sequence[Held | None], rows: Sequence[int], like: Held) -> Held:
    """One row of each part; None counts as zeros."""
    blank = Held(mx.zeros_like(like.window[:1]), mx.zeros_like(like.recurrent[:1]))
    index = [0 if part is None else row for part, row in zip(parts, rows, strict=True)]
    whole = [part or blank for part in parts]
    return Held(_rows([p.window for p in whole], index), _rows([p.recurrent for p in whole], index))


def _padded(tapes: Sequence[Steps | None], rows: Sequence[int], width: int, like: Steps) -> Steps:
    """One row of each tape, padded in front to `width` steps."""
    made = []
    for i, name in enumerate(STEPS):
        parts = []
        for tape in tapes:
            x = like.arrays[i][:1, :0] if tape is None else getattr(tape, name)
            missing = width - x.shape[1]
            parts.append(mx.pad(x, [(0, 0), (missing, 0), *[(0, 0)] * (x.ndim - 2)]) if missing else x)
        index = [0 if tape is None else row for tape, row in zip(tapes, rows, strict=True)]
        made.append(_rows(parts, index))
    return Steps(*made)


__all__ = ["DeltaState", "Held", "Steps"]
