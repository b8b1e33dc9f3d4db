"""K/V of sliding-window layers: bounded, in time order, able to go back after the window has wrapped."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import mlx.core as mx

from .base import Mark
from .buffer import STEP, Piece, assemble, round_up
from .kv import KVState, Layout
from .masks import ragged_mask, uniform_mask
from .registry import register_state
from .view import KVView

LANES = 32
"""Positions to which slices are aligned on a GPU: lanes over which its kernels deal out the keys."""

Self = TypeVar("Self", bound="WindowState")


def default_align() -> int:
    """1 where MLX adds keys up one after the other (CPU, except Apple's), so that a step needs no mask."""
    serial = mx.default_device() == mx.Device(mx.cpu) and sys.platform != "darwin"
    return 1 if serial else LANES


@register_state("window")
class WindowState(KVState):
    """The last `window` rows and some slack, in the order of time, position `origin[b]` first.

    A query sees the keys with 0 <= query - key < window. The buffer holds window + slack rows and never
    more; when an append does not fit, rows that can not be needed any more are dropped in one move, about
    once in max(64, window / 4) appended rows.

    Going back: `rewind` may return to any length from the last mark on, also across a move and also after
    the window has wrapped, while at most `max_width` rows were appended since that mark. Past that the mark
    is void and going back to it raises ValueError.

    What is read: from the first key that the first query sees, rounded down to a multiple of `align`, to
    the last row. With all rows in step that depends on lengths alone, never on when rows were dropped. So
    the row a block computes at some position and a single step there read keys whose physical indices
    differ by a multiple of `align`, hidden keys only in front and behind. Measured on MLX CPU with
    `mx.fast.scaled_dot_product_attention` (f32, bf16 and f16, 200 to 4100 keys): masked keys in front or
    behind, a bool mask, "causal" and no mask over the exact slice all give the same bytes, because that
    backend adds keys up one after the other and a hidden key adds zero. The alignment is for kernels that
    deal keys out over lanes, where an unaligned start would change which keys are added up first; where
    none does, `default_align` is 1 and a single step needs no mask.

    Until the window is full a step at B = 1, L = 1 is byte for byte mlx-lm's `RotatingKVCache`; after that
    the order of keys differs from its ring.
    """

    def __init__(self, window: int, max_width: int = 64, batch: int = 1, align: int | None = None):
        align = default_align() if align is None else align
        if min(window, max_width, align) < 1:
            raise ValueError(f"window {window}, max_width {max_width} and align {align} must be at least 1")
        super().__init__(batch)
        self.window, self.max_width, self.align = window, max_width, align
        self._floors = [0] * batch  # lowest length each row may go back to
        self._mask: tuple[tuple[int, ...], mx.array] | None = None  # of the last block, and what it is for
        needed = window + align + max_width
        self._capacity = round_up(needed + max(64, window // 4), align)

    @property
    def capacity(self) -> int:
        """Most physical rows ever kept: what a rewind needs, plus room to make moves rare."""
        return self._capacity

    @property
    def origins(self) -> tuple[int, ...]:
        """Position of physical row 0 per row (B,)."""
        return tuple(self._origins)

    # -- going back ------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        self._floors = list(self._lengths)
        return super().mark()

    def check_rewind(self, mark: Mark, keep: Sequence[int]) -> None:
        super().check_rewind(mark, keep)
        for b, floor in enumerate(self._floors):
            if mark.lengths[b] + keep[b] < floor:
                raise ValueError(
                    f"row {b} of a window of {self.window} cannot go back to {mark.lengths[b] + keep[b]}: its last "
                    f"mark, or the last append past max_width {self.max_width}, is at {floor}"
                )

    # -- appending -------------------------------------------------------------------------------------

    def _span(self, count: int) -> tuple[int, int] | None:
        n, origin, room = self._lengths[0], self._origins[0], self._buffer.capacity
        if n - origin + count > room or room > self.capacity:
            return None
        if n + count - self._floors[0] > self.max_width:
            self._floors[0] = n + count
        return self._aligned(n - self.window + 1) - origin, n - origin

    def _append(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        out = super()._append(keys, values)
        for b, n in enumerate(self._lengths):
            if n - self._floors[b] > self.max_width:
                self._floors[b] = n
        if self._buffer.capacity > self.capacity:  # a long chunk was attended to; keep its tail only
            self._move([self._keep_from(b) for b in range(len(self._lengths))], self.capacity)
        return out

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        window = self.window if window_size is None else min(window_size, self.window)
        if N == self.align == len(self._lengths) == 1 and window == self.window and not return_array:
            return None  # what is read is what the window holds
        layout = self._layout(N)
        n, T = self._lengths[0], layout.hi - layout.lo
        starts = [o + layout.lo for o in layout.origins]
        if any(p != (n, starts[0]) for p in zip(self._lengths, starts, strict=True)):
            return ragged_mask(starts, self._lengths, N, T, window)
        if not return_array:
            if N == 1 and n - window + 1 <= starts[0]:
                return None
            if n + N <= window:  # then starts[0] is 0
                return "causal"
        if self.max_width < N:
            return uniform_mask(starts[0], n, N, T, window)
        asked = (n - starts[0], N, T, window)  # the same in every round once the window is full
        if self._mask is None or self._mask[0] != asked:
            self._mask = asked, uniform_mask(0, *asked)
        return self._mask[1]

    def view(self) -> KVView:
        """What is stored and can be seen from positions lengths[b] - 1 on; ValueError while empty."""
        if self._used() == 0:
            raise ValueError("an empty state has no K/V to view")
        firsts = [self._aligned(n - self.window) - o for n, o in zip(self._lengths, self._origins, strict=True)]
        return self._view(max(0, min(firsts)))

    # -- layout ----------------------------------------------------------------------------------------

    def _aligned(self, position: int) -> int:
        return max(0, position) // self.align * self.align

    def _keep_from(self, row: int) -> int:
        # One row more than the query at the floor sees: a drafter may look from the position before it.
        return max(self._origins[row], self._aligned(self._floors[row] - self.window))

    def _layout(self, N: int) -> Layout:
        origins = tuple(self._origins)
        end = max(n + N - o for n, o in zip(self._lengths, origins, strict=True))
        if end > self.capacity:
            origins = tuple(self._compacted_origin(b, N) for b in range(len(origins)))
            end = max(n + N - o for n, o in zip(self._lengths, origins, strict=True))
        lo = min(self._aligned(n - self.window + 1) - o for n, o in zip(self._lengths, origins, strict=True))
        return Layout(origins, end, lo, end)

    def _compacted_origin(self, row: int, N: int) -> int:
        n = self._lengths[row]
        if n + N - self._floors[row] <= self.max_width:
            return self._keep_from(row)
        return max(self._origins[row], self._aligned(n - self.window))  # the append voids the mark

    def _capacity_for(self, rows: int) -> int:
        return rows if rows > self.capacity else min(self.capacity, round_up(rows, STEP))

    def _make_room(self, layout: Layout, parts: Sequence[mx.array]) -> None:
        if self._buffer.arrays and layout.origins != self.origins:
            self._move(layout.origins, self._capacity_for(max(layout.capacity, self._buffer.capacity)))
        super()._make_room(layout, parts)

    def _move(self, origins: Sequence[int], capacity: int) -> None:
        """Drop the rows before `origins` and hold the rest in `capacity` physical rows."""
        facts = zip(self._lengths, self._origins, origins, strict=True)
        pieces = [Piece(self._buffer, b, new - old, n - old) for b, (n, old, new) in enumerate(facts)]
        self._buffer = assemble(pieces, capacity)
        self._origins = list(origins)

    # -- carrying rows about ---------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        return {"window": self.window, "max_width": self.max_width, "align": self.align}

    def _copy_row_facts(self, into: KVState, rows: Sequence[tuple[KVState, int]]) -> None:
        into._floors = [s._floors[r] for s, r in rows]  # type: ignore[attr-defined]

    def to_tensors(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        tensors, meta = super().to_tensors()
        return tensors, {**meta, "floors": list(self._floors)}

    @classmethod
    def from_tensors(cls: type[Self], tensors: Mapping[str, mx.array], meta: Mapping[str, Any]) -> Self:
        state = super().from_tensors(tensors, meta)
        state._floors = list(meta["floors"])
        return state
