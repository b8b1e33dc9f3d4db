"""Metadata of a GGUF file, read with the type it has to have."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..errors import LoadError, shorten
from .refusals import wrong

T = TypeVar("T")


class Metadata:
    """Typed reads of one file's metadata; every error names file and key."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = ""):
        self.path, self._values, self.prefix = path, values, prefix

    def under(self, prefix: str) -> Metadata:
        """The same metadata, read by keys below `prefix`."""
        return Metadata(self.path, self._values, prefix)

    def __contains__(self, key: str) -> bool:
        return self.prefix + key in self._values

    def keys(self) -> list[str]:
        """Keys below the prefix, without it."""
        return [key.removeprefix(self.prefix) for key in self._values if key.startswith(self.prefix)]

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(key, default)
        if type(value) is not int or value <= 0:
            raise self.wrong(key, value, "a positive integer")
        return value

    def index(self, key: str) -> int | None:
        """An integer of at least 0, or None when the file has no such key."""
        value = self._values.get(self.prefix + key)
        if value is not None and (type(value) is not int or value < 0):
            raise self.wrong(key, value, "an integer of at least 0")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A positive number, as short as the float32 it is stored in can be written."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.wrong(key, value, "a positive number")
        return shortest(float(value))

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        return self._typed(key, default, str, "a string")

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        return self._typed(key, default, bool, "a boolean")

    def texts(self, key: str) -> list[str]:
        """A list of strings."""
        value = self._typed(key, None, list, "a list of strings")
        if not all(isinstance(item, str) for item in value):
            raise self.wrong(key, value, "a list of strings")
        return value

    def numbers(self, key: str, count: int, default: float) -> list[float]:
        """`count` numbers; `default` for each when the file has no such key."""
        value = self._typed(key, [default] * count, list, "a list of numbers")
        if len(value) != count or not all(isinstance(item, int | float) for item in value):
            raise self.wrong(key, value, f"{count} numbers")
        return value

    def wrong(self, key: str, value: object, expected: str) -> LoadError:
        """The error for a value that cannot be used."""
        if isinstance(value, list):
            found = f"a list of {len(value)}"
        else:
            found = "nothing" if value is None else f"{type(value).__name__} {shorten(repr(value), 60)}"
        return wrong(self.path, self.prefix + key, found, expected)

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is; `default` when there is none."""
        value = self._values.get(self.prefix + key)
        return default if value is None else value

    def _typed(self, key: str, default: T | None, kind: type[T], expected: str) -> T:
        value = self.get(key, default)
        if not isinstance(value, kind):
            raise self.wrong(key, value, expected)
        return value


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 is 1e-05."""
    stored = struct.pack("<f", value)
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == stored:
            return short
    return value
