"""Values as callers give them, read without trusting their methods. No mlx import."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from itertools import islice

MAX_ITEMS = 1 << 21
"""Longest list of ids that is read; more than any context or vocabulary has."""


def shown(value: object) -> str:
    """A short repr for a message."""
    try:
        text = repr(value)
    except Exception:  # somebody else's __repr__
        text = "something that cannot be shown"
    return text if len(text) <= 60 else text[:57] + "..."


def as_integer(value: object) -> int | None:
    """The int that a number of any library is, None for fractions, booleans, texts, and arrays of several."""
    if isinstance(value, bool):
        return None
    try:
        number = operator.index(value)  # type: ignore[arg-type]
        return number if bool(value == number) else None  # some arrays cut fractions off in __index__
    except Exception:  # somebody else's __index__ or __eq__
        return None


def as_items(value: object) -> list[object] | None:
    """The items of a list, range or array, None for texts, mappings, sets and what cannot be iterated.

    Reads no more than MAX_ITEMS + 1 of them.
    """
    if isinstance(value, (str, bytes, bytearray, memoryview, Mapping, set, frozenset)):
        return None
    try:
        items = value.tolist() if hasattr(value, "tolist") else value
        return list(islice(items, MAX_ITEMS + 1)) if isinstance(items, Iterable) else None
    except Exception:  # somebody else's __iter__
        return None
