"""The header of a GGUF file: metadata, and where each tensor lies; every size is checked.

Format: docs/gguf.md of ggml-org/ggml, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..tensorfiles import check_regular, unreadable
from .refusals import damaged, no_gguf

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # of tensor data, unless general.alignment says otherwise
MAX_AXES, MAX_NESTING = 4, 4
STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file: shape with the rows first, ggml type number, byte position of its data."""

    name: str
    shape: tuple[int, ...]
    type: int
    start: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Gguf:
    """A parsed header."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    nbytes: int  # of the whole file


def read_gguf(path: Path) -> Gguf:
    """Header of a GGUF file; LoadError for anything that is none, or is cut short or damaged."""
    try:
        check_regular(path)
        with path.open("rb") as stream:
            cursor = _Cursor(path, stream)
            tensors, metadata = _counts(cursor)
            values = _metadata(cursor, metadata)
            return Gguf(path, values, _tensors(cursor, tensors, values), cursor.size)
    except OSError as error:
        raise unreadable(path, error) from error


class _Cursor:
    """Reads forward through the header, never past the end of the file."""

    def __init__(self, path: Path, stream: BinaryIO):
        self.path, self._stream = path, stream
        self.size = path.stat().st_size
        self.position = 0

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes."""
        left = self.size - self.position
        if count > left:
            lack = f"{count} bytes: its header is damaged, or cut at least {count - left} bytes short"
            raise damaged(self.path, f"{left} bytes left of {self.size} for {what}", lack)
        self.position += count
        return self._stream.read(count)

    def number(self, code: str, what: str) -> Any:
        """One number of a struct format."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code), what))[0]

    def text(self, what: str) -> str:
        """A string with its length in front."""
        data = self.take(self.number("Q", what), what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise damaged(self.path, f"{what} that is not UTF-8", "UTF-8 text") from error

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        """A metadata value: int, float, bool, str, or a list of them."""
        if kind == STRING:
            return self.text(what)
        if kind == ARRAY and depth < MAX_NESTING:
            return self._array(what, depth)
        if kind in NUMBERS:
            number = self.number(NUMBERS[kind], what)
            return bool(number) if kind == BOOL else number
        raise damaged(self.path, f"value type {kind} for {what}", "one of the 13 types of the format")

    def _array(self, what: str, depth: int) -> list[Any]:
        kind, count = self.number("I", what), self.number("Q", what)
        if kind in NUMBERS:
            code = NUMBERS[kind]
            data = self.take(count * struct.calcsize(code), what)
            values = struct.unpack(f"<{count}{code}", data)
            return [bool(v) for v in values] if kind == BOOL else list(values)
        left = self.size - self.position
        if count > left:  # each element takes at least a byte: no loop over a wild count
            lack = f"a byte for each at least: its header is damaged, or cut at least {count - left} bytes short"
            raise damaged(self.path, f"{left} bytes left of {self.size} for {count} elements of {what}", lack)
        return [self.value(kind, what, depth + 1) for _ in range(count)]


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """Numbers of tensors and of metadata entries."""
    magic = cursor.take(min(4, cursor.size), "the first bytes")
    if magic != MAGIC:
        raise no_gguf(cursor.path, magic, MAGIC)
    version = cursor.number("I", "the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        found = "a big-endian file" if swapped in VERSIONS else f"version {version}"
        raise damaged(cursor.path, found, "a little-endian file of version 2 or 3")
    return cursor.number("Q", "the number of tensors"), cursor.number("Q", "the number of metadata entries")


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text("a metadata key")
        value = cursor.value(cursor.number("I", key), key)
        if key in found:
            raise damaged(cursor.path, f"metadata key {key} twice", "each key once")
        found[key] = value
    return found


def _tensors(cursor: _Cursor, count: int, metadata: dict[str, Any]) -> dict[str, Tensor]:
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment % 8:
        raise damaged(cursor.path, f"general.alignment {alignment!r}", "a positive multiple of 8")
    found: dict[str, Tensor] = {}
    for _ in range(count):
        tensor = _tensor(cursor)
        if tensor.start % alignment:
            raise damaged(cursor.path, f"tensor {tensor.name} at byte {tensor.start}", f"a multiple of {alignment}")
        if tensor.name in found:
            raise damaged(cursor.path, f"tensor {tensor.name} twice", "each tensor once")
        found[tensor.name] = tensor
    start = -(-cursor.position // alignment) * alignment
    return {name: Tensor(name, t.shape, t.type, start + t.start) for name, t in found.items()}


def _tensor(cursor: _Cursor) -> Tensor:
    """One entry of the tensor table; its position is relative to the data's."""
    name = cursor.text("a tensor name")
    axes = cursor.number("I", f"tensor {name}")
    if not 1 <= axes <= MAX_AXES:
        raise damaged(cursor.path, f"tensor {name} with {axes} axes", f"1 to {MAX_AXES}")
    shape = tuple(cursor.number("Q", f"tensor {name}") for _ in range(axes))[::-1]
    if min(shape) == 0:
        raise damaged(cursor.path, f"tensor {name} of shape {list(shape)}", "no empty axis")
    return Tensor(name, shape, cursor.number("I", f"tensor {name}"), cursor.number("Q", f"tensor {name}"))
