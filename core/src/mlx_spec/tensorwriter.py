"""Safetensors files written piece by piece: sizes are known first, data comes in any order."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from .tensorfiles import DTYPE_BITS


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor to be written: safetensors dtype name and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


class SafetensorsWriter:
    """One file of a checkpoint, in mlx's dialect; used as a context manager.

    Every entry has to be written from its first byte to its last; pieces of different entries may alternate.

    Args:
        metadata: text beside the tensors; the file always says that it is in mlx's dialect.
    """

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None):
        self._path, self._entries = path, {entry.name: entry for entry in entries}
        self._metadata = {"format": "mlx", **(metadata or {})}
        self._at: dict[str, int] = {}
        self._end: dict[str, int] = {}

    def __enter__(self) -> Self:
        header: dict[str, object] = {"__metadata__": self._metadata}
        offset = 0
        for entry in self._entries.values():
            end = offset + entry.nbytes
            header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
            self._at[entry.name], self._end[entry.name] = offset, end
            offset = end
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # data begins at a multiple of 8
        self._start = 8 + len(text)
        self._file = self._path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        return self

    def write(self, name: str, data: npt.NDArray[np.generic]) -> None:
        """The next piece of a tensor, in the bytes it has in the file."""
        self._file.seek(self._start + self._at[name])
        self._file.write(np.ascontiguousarray(data).data)
        self._at[name] += data.nbytes

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None:  # a disk that is full says so here at the latest
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
        short = [name for name, at in self._at.items() if at != self._end[name]]
        if short and kind is None:
            raise ValueError(f"{self._path.name}: {short[0]} was given {self._at[short[0]]} of {self._end[short[0]]}")
