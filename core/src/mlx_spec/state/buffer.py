"""Rows of tensors with spare room: the storage under every attention state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

STEP = 256
"""Rows by which a buffer grows, as mlx-lm's caches do."""


def round_up(value: int, step: int) -> int:
    """Smallest multiple of `step` that is not below `value`."""
    return -(-value // step) * step


class Piece(NamedTuple):
    """Rows lo..hi (physical) of batch row `row` of some buffer; the source of one assembled row."""

    source: Buffer
    row: int
    lo: int
    hi: int


class Buffer:
    """Tensors (B, H, capacity, width) that grow together; K and V dense are two, quantised six.

    Attributes:
        arrays: the tensors; empty until the first write tells their shapes. Each has one owner, this
            object, so that MLX may write a step in place instead of copying the whole buffer.
    """

    def __init__(self, arrays: Sequence[mx.array] = ()):
        self.arrays = list(arrays)

    @property
    def capacity(self) -> int:
        """Rows there is room for, 0 when nothing was ever written."""
        return self.arrays[0].shape[2] if self.arrays else 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(a.nbytes for a in self.arrays)

    def reserve(self, like: Sequence[mx.array], capacity: int, used: int) -> None:
        """Make room for `capacity` rows, keeping the first `used`; `like` gives batch, heads, widths, dtypes."""
        if not self.arrays:
            self.arrays = [_zeros(a, a.shape[0], capacity) for a in like]
        elif self.capacity < capacity:
            self.arrays = [_grown(a, capacity, used) for a in self.arrays]

    def write(self, starts: Sequence[int], parts: Sequence[mx.array]) -> None:
        """Put parts[i] (B, H, N, width) at physical rows starts[b]..starts[b]+N of every batch row.

        Plain int slices only: these are the updates MLX does in place when nobody else holds the array.
        """
        count = parts[0].shape[2]
        shared = all(s == starts[0] for s in starts)
        for i, part in enumerate(parts):
            if shared:
                self.arrays[i][..., starts[0] : starts[0] + count, :] = part
                continue
            for b, start in enumerate(starts):
                self.arrays[i][b : b + 1, :, start : start + count, :] = part[b : b + 1]

    def read(self, lo: int, hi: int) -> list[mx.array]:
        """Physical rows lo..hi of every tensor; the tensor itself when that is all of it."""
        if lo == 0 and hi == self.capacity:
            return list(self.arrays)
        return [a[..., lo:hi, :] for a in self.arrays]


def assemble(pieces: Sequence[Piece], capacity: int) -> Buffer:
    """A new buffer whose batch row i holds pieces[i] from physical row 0 on, zeros elsewhere.

    Serves growing, compacting, extracting, merging and selecting alike; shares nothing with its sources.
    Empty pieces may come from buffers that never saw a row. Raises ValueError when shapes or dtypes differ.
    """
    filled = [p.source for p in pieces if p.source.arrays]
    if not filled or capacity == 0:
        return Buffer()
    _check_alike(filled)
    out = [_zeros(a, len(pieces), capacity) for a in filled[0].arrays]
    whole = _whole_batch(pieces)
    for i in range(len(out)):
        if whole is not None:
            out[i][..., : whole.hi - whole.lo, :] = whole.source.arrays[i][..., whole.lo : whole.hi, :]
            continue
        for b, (source, row, lo, hi) in enumerate(pieces):
            if hi > lo:
                out[i][b : b + 1, :, : hi - lo, :] = source.arrays[i][row : row + 1, :, lo:hi, :]
    return Buffer(out)


def _zeros(like: mx.array, batch: int, capacity: int) -> mx.array:
    return mx.zeros((batch, like.shape[1], capacity, like.shape[3]), like.dtype)


def _grown(array: mx.array, capacity: int, used: int) -> mx.array:
    room = _zeros(array, array.shape[0], capacity - used)
    return mx.concatenate([array[..., :used, :], room], axis=2) if used else room


def _whole_batch(pieces: Sequence[Piece]) -> Piece | None:
    """The one piece that stands for all, when they are the same rows of all batch rows of one buffer."""
    first = pieces[0]
    if len(pieces) != first.source.arrays[0].shape[0] if first.source.arrays else True:
        return None
    same = all(p.source is first.source and p.row == b and p[2:] == first[2:] for b, p in enumerate(pieces))
    return first if same and first.hi > first.lo else None


def _check_alike(buffers: Sequence[Buffer]) -> None:
    kinds = {tuple((a.shape[1], a.shape[3], a.dtype) for a in b.arrays) for b in buffers}
    if len(kinds) > 1:
        raise ValueError(f"cannot join rows of different heads, widths or dtypes: {sorted(map(str, kinds))}")
