"""States small enough to break in one line: a recurrence with a tape, and K/V states with one fault each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from mlx_spec.state import register_state
from mlx_spec.state.base import Mark, State

WIDTH, DECAY = 5, 0.75


@register_state("toy-recurrence")
class Recurrence(State):
    """h = DECAY * h + x, h (B, WIDTH); a tape of every h since the mark makes going back a lookup."""

    def __init__(self, batch: int = 1):
        self.h = mx.zeros((batch, WIDTH))
        self.tape: list[mx.array] = []  # h after each step since the mark
        self.marked, self.base = [0] * batch, self.h
        self._lengths = [0] * batch

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._lengths)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in [self.h, self.base, *self.tape])

    def step(self, x: mx.array) -> mx.array:
        """x (B, L, WIDTH) -> every h, (B, L, WIDTH)."""
        out = []
        for i in range(x.shape[1]):
            self.h = DECAY * self.h + x[:, i]
            out.append(self.h)
        self.tape += out
        self._lengths = [n + x.shape[1] for n in self._lengths]
        return mx.stack(out, axis=1)

    def mark(self) -> Mark:
        self.marked, self.base, self.tape = list(self._lengths), self.h, []
        return Mark(self.lengths)

    def check_rewind(self, mark: Mark, keep: Sequence[int]) -> None:
        if list(mark.lengths) != self.marked or not all(0 <= k <= len(self.tape) for k in keep):
            raise ValueError(f"cannot keep {list(keep)} of {len(self.tape)} rows after {mark.lengths}")

    def rewind(self, mark: Mark, keep: Sequence[int]) -> None:
        self.check_rewind(mark, keep)
        steps = [self.base, *self.tape]
        self.h = mx.stack([steps[k][b] for b, k in enumerate(keep)])
        self._lengths = [n + k for n, k in zip(mark.lengths, keep, strict=True)]
        self.tape = self.tape[: max(keep)]

    def extract(self, row: int) -> Recurrence:
        return self.select([row])

    @classmethod
    def merge(cls, states: Sequence[State]) -> Recurrence:
        out = cls(0)
        out.h = mx.concatenate([s.h for s in states])
        out._lengths = [n for s in states for n in s._lengths]
        out.mark()
        return out

    def select(self, rows: Sequence[int]) -> Recurrence:
        index = mx.array(list(rows))
        out = type(self)(0)
        out.h, out.base = self.h[index], self.base[index]
        out.tape = [h[index] for h in self.tape]
        out._lengths, out.marked = [self._lengths[r] for r in rows], [self.marked[r] for r in rows]
        return out

    def to_tensors(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        tensors = {"h": self.h, "base": self.base}
        if self.tape:
            tensors["tape"] = mx.stack(self.tape)
        return tensors, {"lengths": self._lengths, "marked": self.marked}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, mx.array], meta: Mapping[str, Any]) -> Recurrence:
        out = cls(0)
        out.h, out.base = tensors["h"], tensors["base"]
        out.tape = list(tensors["tape"]) if "tape" in tensors else []
        out._lengths, out.marked = list(meta["lengths"]), list(meta["marked"])
        return out

    @property
    def offset(self) -> int | mx.array:
        return self._lengths[0]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return None


class Drip:
    """Feeds recurrences: x is looked up by token, so batch size and width change nothing."""

    vocab_size = 64

    def __init__(self) -> None:
        self.table = mx.random.normal((self.vocab_size, WIDTH), key=mx.random.key(3))

    def __call__(self, states: Sequence[Any], tokens: mx.array) -> mx.array:
        return mx.stack([state.step(self.table[tokens]) for state in states], axis=2)
