"""Random values of every stored type, their exact values, and what two results may differ by."""

from __future__ import annotations

import numpy as np
from table import BF16, E4M3, E8M0, F16, F32

STORED = {F32: "f4", F16: "f2", BF16: "u2"}
NAMES = {F32: "float32", F16: "float16", BF16: "bfloat16", E8M0: "e8m0", E4M3: "e4m3"}
ULP = {F32: 2.0**-23, F16: 2.0**-10, BF16: 2.0**-7}  # of one: two results next to each other
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], "f4")


def stored(values: np.ndarray, type: int) -> np.ndarray:
    """Values as an array of that type holds them; bfloat16 cut off, so that any bits occur."""
    values = np.ascontiguousarray(values, "f4")
    return (values.view("u4") >> 16).astype("u2") if type == BF16 else values.astype(STORED[type])


def floats(array: np.ndarray, type: int) -> np.ndarray:
    """The values of a stored array, exactly."""
    if type == BF16:
        return (array.astype("u4") << 16).view("f4")
    return array.astype("f4")


def scale_floats(codes: np.ndarray, type: int) -> np.ndarray:
    """The values of scales; bytes are E8M0 or E4M3."""
    if type == E8M0:
        return np.exp2(codes.astype("f8") - 127).astype("f4")
    if type == E4M3:
        exponent, mantissa = (codes >> 3 & 15).astype("f8"), (codes & 7).astype("f8")
        size = np.where(exponent == 0, mantissa * 2.0**-9, np.exp2(exponent - 7) * (1 + mantissa / 8))
        return np.where(codes & 128, -size, size).astype("f4")
    return floats(codes, type)


def unpacked(data: np.ndarray, bits: int) -> np.ndarray:
    """Codes of `bits` bits from rows of bytes, lowest bit first."""
    ones = np.unpackbits(data, axis=-1, bitorder="little")
    groups = ones.reshape(*data.shape[:-1], -1, bits)
    return (groups * (1 << np.arange(bits))).sum(-1).astype("u1")


def alike(a: np.ndarray, b: np.ndarray, type: int, one_nan: bool = False) -> bool:
    """Whether two stored arrays have the same bytes; any NaN is like another, unless there is one only."""
    if a.tobytes() == b.tobytes() or one_nan:
        return a.tobytes() == b.tobytes()
    both = np.isnan(floats(a, type)) & np.isnan(floats(b, type))
    kind = "u4" if type == F32 else "u2"
    return bool(np.all(both | (a.view(kind) == b.view(kind))))


def share(got: np.ndarray, want: np.ndarray, bound: np.ndarray | float) -> float:
    """The largest part of its bound that a difference takes; infinite for other infinities and NaN."""
    with np.errstate(invalid="ignore"):
        got, want = got.astype("f8"), want.astype("f8")
        finite = np.isfinite(want)
        if not np.array_equal(got[~finite], want[~finite], equal_nan=True):
            return float("inf")
        off = np.abs(got - want)[finite]
        limit = np.broadcast_to(np.asarray(bound, "f8"), want.shape)[finite]
        parts = np.where(off == 0, 0, off / np.maximum(limit, 1e-300))
    return float(np.nan_to_num(parts, nan=np.inf).max(initial=0))
