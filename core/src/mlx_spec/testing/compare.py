"""Comparisons that say where two things part: replies, logits rows, drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .faults import broken, require
from .watch import same_bytes


def same_reply(found: Sequence[int], expected: Sequence[int], what: str, look: str) -> None:
    """Token-identical, or the index at which the replies part."""
    if list(found) == list(expected):
        return
    at = next(
        (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), min(len(found), len(expected))
    )
    broken(
        what,
        found=f"token {_at(found, at)} at reply position {at} (reply {list(found)})",
        expected=f"{_at(expected, at)}, as plain decoding gives ({list(expected)})",
        look=look,
    )


def _at(tokens: Sequence[int], i: int) -> str:
    return str(tokens[i]) if i < len(tokens) else "nothing"


def tolerance(dtype: Any) -> float:
    """How far numbers of this dtype may be apart when only the order of additions differs."""
    return {mx.float32: 1e-3, mx.float16: 3e-2}.get(dtype, 2e-1)


def largest_gap(a: mx.array, b: mx.array) -> float:
    """Largest absolute difference; impossible entries (-inf in both) count as equal."""
    x, y = a.astype(mx.float32), b.astype(mx.float32)
    gap = mx.where(x == y, 0.0, mx.abs(x - y))
    return float(mx.max(mx.where(mx.isnan(gap), float("inf"), gap)).item()) if gap.size else 0.0


def close(a: mx.array, b: mx.array) -> bool:
    """Equal but for rounding, judged by dtype and size of the numbers."""
    finite = mx.where(mx.isfinite(b), mx.abs(b.astype(mx.float32)), 0.0)
    scale = max(1.0, float(mx.max(finite).item())) if b.size else 1.0
    return a.shape == b.shape and largest_gap(a, b) <= tolerance(b.dtype) * scale


def same_logits(found: mx.array, expected: mx.array, level: str, what: str, look: str) -> None:
    """Rows (..., V): equal bytes at level "bitwise", equal argmax and close numbers below it."""
    require(
        found.shape == expected.shape,
        what,
        found=f"shape {found.shape}",
        expected=f"shape {expected.shape}",
        look=look,
    )
    if level == "bitwise":
        require(
            same_bytes(found, expected),
            what,
            found=f"{_unequal(found, expected)}, largest difference {largest_gap(found, expected):.3g}",
            expected="the same bytes",
            look=look,
        )
        return
    picked, wanted = mx.argmax(found, axis=-1), mx.argmax(expected, axis=-1)
    good = close(found, expected) and bool(mx.array_equal(picked, wanted).item())
    require(
        good,
        what,
        found=f"tokens {picked.tolist()}, largest difference {largest_gap(found, expected):.3g}",
        expected=f"tokens {wanted.tolist()} and numbers that differ by rounding only",
        look=look,
    )


def _unequal(a: mx.array, b: mx.array) -> str:
    if a.dtype != b.dtype:
        return f"dtype {a.dtype} and {b.dtype}"
    return f"{int((a != b).sum().item())} of {a.size} values different"
