"""Attention K/V of full-attention layers: left-aligned rows with a length each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any, ClassVar, NamedTuple, TypeVar

import mlx.core as mx

from .base import Mark, State
from .buffer import STEP, Buffer, Piece, assemble, round_up
from .masks import ragged_mask, uniform_mask
from .registry import register_state
from .view import KVView

Self = TypeVar("Self", bound="KVState")

BLOCK_ROWS = 16
"""Widest block that may start before the forward over it is built; longer ones are prompts."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the next N rows go and what attention reads then; a pure function of host ints.

    `make_mask` and `update_and_fetch` both ask for it, so the mask made from one layer is right for every
    layer of the same history.

    Attributes:
        origins: position of physical row 0 per row, after any compaction this append needs.
        capacity: physical rows needed.
        lo, hi: physical slice that is read.
    """

    origins: tuple[int, ...]
    capacity: int
    lo: int
    hi: int


class Room(NamedTuple):
    """Storage of one row, (1, Hkv, capacity, D) each: read from physical row `low`, write from `start` on."""

    keys: mx.array
    values: mx.array
    low: int
    start: int


@register_state("kv")
class KVState(State):
    """K/V (B, Hkv, capacity, D) that grows by 256 rows; rolling a row back lowers its length.

    With all lengths equal (B = 1 above all) every step is one slice update that MLX does in place, the
    result is `[..., :n, :]` and the masks are None and "causal": byte for byte what mlx-lm's `KVCache`
    gives. Rows of different length are written one by one, read up to the longest and masked by position.
    """

    PARTS: ClassVar[tuple[str, ...]] = ("keys", "values")
    DENSE: ClassVar[bool] = True
    """Stores K/V as they are given, so that appending one row is nothing but two slice updates."""
    starts: bool = False
    """Whether the device begins with a block as soon as it is appended here; `StateGroup` chooses the layers."""
    read: bool = False
    """Whether somebody was given the K/V to read since the last mark."""

    def __init__(self, batch: int = 1):
        self._buffer = Buffer()
        self._lengths = [0] * batch
        self._origins = [0] * batch

    # -- State -----------------------------------------------------------------------------------------

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._lengths)

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def arrays(self) -> list[mx.array]:
        return list(self._buffer.arrays)

    def mark(self) -> Mark:
        self.read = False
        return Mark(self.lengths)

    def check_rewind(self, mark: Mark, keep: Sequence[int]) -> None:
        starts, lengths = mark.lengths, self._lengths
        if len(starts) != len(lengths) or len(keep) != len(lengths):
            raise ValueError(f"rewind of {len(lengths)} rows got {len(starts)} marks, {len(keep)} keeps")
        for b, held in enumerate(lengths):
            if not 0 <= keep[b] <= held - starts[b]:
                raise ValueError(
                    f"row {b} cannot keep {keep[b]} rows after its mark at {starts[b]}: it holds {held} positions"
                )

    def rewind(self, mark: Mark, keep: Sequence[int]) -> None:
        self.check_rewind(mark, keep)
        self._lengths = list(map(add, mark.lengths, keep))

    def extract(self: Self, row: int) -> Self:
        return self.select([row])

    def select(self: Self, rows: Sequence[int]) -> Self:
        return self._gather([(self, row) for row in rows])

    @classmethod
    def merge(cls: type[Self], states: Sequence[Self]) -> Self:  # type: ignore[override]
        if not states:
            raise ValueError("merge needs at least one state")
        settings = [(type(s), s._settings()) for s in states]
        if any(s != settings[0] for s in settings):
            raise ValueError(f"cannot merge states of different kinds: {settings}")
        return states[0]._gather([(s, row) for s in states for row in range(len(s._lengths))])

    def to_tensors(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        packed = self.select(range(len(self._lengths)))  # drops stale and spare rows
        used = packed._used()
        tensors = dict(zip(self.PARTS, packed._buffer.read(0, used), strict=True)) if used else {}
        return tensors, {**self._settings(), "lengths": packed._lengths, "origins": packed._origins}

    @classmethod
    def from_tensors(cls: type[Self], tensors: Mapping[str, mx.array], meta: Mapping[str, Any]) -> Self:
        settings = {k: v for k, v in meta.items() if k not in ("lengths", "origins", "floors")}
        state = cls(**settings, batch=len(meta["lengths"]))
        state._lengths, state._origins = list(meta["lengths"]), list(meta["origins"])
        if tensors:
            stored = Buffer([tensors[name] for name in cls.PARTS])
            pieces = [Piece(stored, b, 0, stored.capacity) for b in range(len(state._lengths))]
            state._buffer = assemble(pieces, state._capacity_for(stored.capacity))
        return state

    # -- what mlx-lm's modules ask of a cache ----------------------------------------------------------

    @property
    def offset(self) -> int | mx.array:
        return self._lengths[0] if _equal(self._lengths) else mx.array(self._lengths, dtype=mx.int32)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        rows, _, count, _ = keys.shape
        if self.DENSE and rows == len(self._lengths) == 1:
            span = self._span(count)
            if span is not None:
                fetched = self._append_in_place(keys, values, count, *span)
                self._start(count)
                return fetched
        fetched = self._append(keys, values)
        self._start(count)
        return fetched

    def _start(self, count: int) -> None:
        if self.starts and 1 < count <= BLOCK_ROWS:
            mx.async_eval(self._buffer.arrays[0])

    def _append_in_place(self, keys: mx.array, values: mx.array, count: int, lo: int, start: int) -> tuple[Any, Any]:
        """The step of one row in the fewest host operations: every plain token passes here once a layer."""
        held, end = self._buffer.arrays, start + count
        held[0][..., start:end, :] = keys
        held[1][..., start:end, :] = values
        self._lengths[0] += count
        return held[0][..., lo:end, :], held[1][..., lo:end, :]

    def room(self, count: int) -> Room | None:
        """Where an operation that attends may store `count` rows itself; None when they have to be appended.

        They have to with several rows, quantised storage, or when the storage must grow or move first. Whoever
        takes the room hands the filled storage back to `fill` before anything else happens to this state.
        """
        if not self.DENSE or len(self._lengths) != 1:
            return None
        span = self._span(count)
        return None if span is None else Room(self._buffer.arrays[0], self._buffer.arrays[1], *span)

    def lent(self, position: int, window: int | None = None) -> Room | None:
        """Storage for an operation that reads the keys a query at `position` sees: rows `low` up to `start`.

        None with several rows, quantised or empty storage. Nothing may be appended before the operation is built.
        """
        if not self.DENSE or len(self._lengths) != 1:
            return None
        origin = self._origins[0]
        low = 0 if window is None else max(0, position - window + 1 - origin)
        end = min(self._lengths[0], position + 1) - origin
        self.read = True
        return Room(self._buffer.arrays[0], self._buffer.arrays[1], low, end) if low < end else None

    def fill(self, keys: mx.array, values: mx.array, count: int) -> None:
        """Take back the storage of `room`, filled with `count` rows; let go of the arrays it was before."""
        self._buffer.arrays[:] = (keys, values)
        self._lengths[0] += count
        self._start(count)

    def _span(self, count: int) -> tuple[int, int] | None:
        """(lo, start): what a row reads from and is written at, None unless `count` rows fit as things are."""
        start = self._lengths[0]
        return (0, start) if start + count <= self._buffer.capacity else None

    def _append(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        if keys.shape[0] != len(self._lengths):
            raise ValueError(f"state of {len(self._lengths)} rows was given keys for {keys.shape[0]}")
        parts = self._encode(keys, values)
        layout = self._layout(keys.shape[2])
        self._make_room(layout, parts)
        self._buffer.write([n - o for n, o in zip(self._lengths, self._origins, strict=True)], parts)
        self._lengths = [n + keys.shape[2] for n in self._lengths]
        return self._decode(self._buffer.read(layout.lo, layout.hi))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if not _equal(self._lengths):
            return ragged_mask(self._origins, self._lengths, N, max(self._lengths) + N, window_size)
        if window_size is None and not return_array:
            return None if N == 1 else "causal"
        if window_size is None and N == 1:
            return None
        n = self._lengths[0]
        return uniform_mask(0, n, N, n + N, window_size)

    def view(self) -> KVView:
        """What is stored, for reading. Raises ValueError while there is nothing."""
        if self._used() == 0:
            raise ValueError("an empty state has no K/V to view")
        return self._view(0)

    # -- what a kind of attention state may change -----------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        """Constructor arguments other than batch; states merge when these are equal."""
        return {}

    def _encode(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        return [keys, values]

    def _decode(self, arrays: Sequence[mx.array]) -> tuple[Any, Any]:
        return arrays[0], arrays[1]

    def _layout(self, N: int) -> Layout:
        hi = max(self._lengths) + N
        return Layout(tuple(self._origins), hi, 0, hi)

    def _capacity_for(self, rows: int) -> int:
        """Physical rows to allocate for `rows` used ones."""
        return round_up(rows, STEP)

    def _keep_from(self, row: int) -> int:
        """First position of `row` that may still be read."""
        return 0

    def _copy_row_facts(self, into: KVState, rows: Sequence[tuple[KVState, int]]) -> None:
        """Carry per-row host facts beyond length and origin to a gathered state."""

    # -- shared machinery ------------------------------------------------------------------------------

    def _used(self) -> int:
        return max(n - o for n, o in zip(self._lengths, self._origins, strict=True))

    def _make_room(self, layout: Layout, parts: Sequence[mx.array]) -> None:
        self._buffer.reserve(parts, self._capacity_for(layout.capacity), self._used())

    def _gather(self: Self, rows: Sequence[tuple[Self, int]]) -> Self:
        """A new state of these (state, row) in order, holding only rows that may still be read."""
        out = type(self)(**self._settings(), batch=len(rows))
        out._lengths = [s._lengths[r] for s, r in rows]
        out._origins = [s._keep_from(r) for s, r in rows]
        pieces = [Piece(s._buffer, r, s._keep_from(r) - s._origins[r], s._lengths[r] - s._origins[r]) for s, r in rows]
        out._buffer = assemble(pieces, self._capacity_for(max((p.hi - p.lo for p in pieces), default=0)))
        self._copy_row_facts(out, rows)
        return out

    def _view(self, lo: int, bits: int | None = None, group_size: int | None = None) -> KVView:
        self.read = True
        keys, values = self._decode(self._buffer.read(lo, self._used()))
        return KVView(keys, values, tuple(o + lo for o in self._origins), self.lengths, bits, group_size)


def _equal(values: Sequence[int]) -> bool:
    return len(values) == 1 or all(v == values[0] for v in values)
