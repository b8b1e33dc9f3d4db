"""The structures of native/kernels.h, and a table of kernels that can be called."""

from __future__ import annotations

import ctypes as c
import mmap
from collections.abc import Callable
from typing import ClassVar

import numpy as np

F32, F16, BF16, E8M0, E4M3 = range(5)  # Type
DENSE, AFFINE, FP4 = range(3)  # Format
ATTENTION_ROWS, AT_ONCE = 32, 8
FORMS = "full", "int8", "int16"  # of activations; one table each
NO_MASK, FLAGS, MASK_F32, MASK_F16, MASK_BF16 = range(5)

Int, Long, Float, Pointer = c.c_int, c.c_int64, c.c_float, c.c_uint64
Fields = list[tuple[str, type]]


def fields(names: str, kind: type) -> Fields:
    return [(name, kind) for name in names.split()]


class Weights(c.Structure):
    _fields_: ClassVar[Fields] = [
        *fields("format type bits group scale_type", Int),
        *fields("data scales biases", Pointer),
        ("row_bytes", Long),
        ("lanes", Pointer),
    ]


class Soon(c.Structure):
    _fields_: ClassVar[Fields] = [("data", Pointer), *fields("bytes apart count", Long)]


class Product(c.Structure):
    _fields_: ClassVar[Fields] = [
        ("w", Weights),
        *fields("x y bias", Pointer),
        *fields("rows N K padded", Long),
        ("compact", c.c_bool),
        *fields("y_type bias_type", Int),
        *fields("scratch soon", Pointer),
        ("soon_count", Long),
        *fields("soon_from soon_to", c.c_double),
    ]


class Stored(c.Structure):
    _fields_: ClassVar[Fields] = [
        ("data", Pointer),
        ("stride", Long),
        *fields("scales biases", Pointer),
        *fields("scale_stride bias_stride", Long),
    ]


class Attention(c.Structure):
    _fields_: ClassVar[Fields] = [
        ("rows", Int),
        *fields("q y", Pointer * ATTENTION_ROWS),
        *fields("first visible", Long * ATTENTION_ROWS),
        ("mask", Pointer * ATTENTION_ROWS),
        ("mask_kind", Int),
        *fields("mask_stride q_stride count D value_D", Long),
        *fields("keys values", Stored),
        *fields("bits group q_type type y_type", Int),
        ("scale", Float),
        ("scratch", Pointer),
    ]


class Rotation(c.Structure):
    _fields_: ClassVar[Fields] = [
        *fields("x y", Pointer),
        ("type", Int),
        *fields("stride dims D", Long),
        ("neighbours", c.c_bool),
        *fields("cosines sines", Pointer),
    ]


class Series(c.Structure):
    _fields_: ClassVar[Fields] = [("data", Pointer), ("type", Int), *fields("step apart", Long)]


class Delta(c.Structure):
    _fields_: ClassVar[Fields] = [
        *fields("rows D", Long),
        ("before", Pointer),
        *fields("row_stride column_stride", Long),
        *fields("settled after", Pointer),
        ("owed", Long),
        *fields("owed_decay owed_keys owed_deltas", Series),
        ("steps", Long),
        *fields("decay keys rate queries values", Series),
        ("deltas", Pointer),
        ("delta_step", Long),
        ("y", Pointer),
        ("y_type", Int),
        ("y_step", Long),
        ("scratch", Pointer),
    ]


class Activation(c.Structure):
    _fields_: ClassVar[Fields] = [
        *fields("act type gate_type x_type", Int),
        ("precise", c.c_bool),
        *fields("gate x", Pointer),
        *fields("gate_apart x_apart", Long),
        ("y", Pointer),
        ("count", Long),
    ]


class Convolution(c.Structure):
    _fields_: ClassVar[Fields] = [
        *fields("x w bias y", Pointer),
        ("type", Int),
        *fields("channels taps step apart w_step", Long),
    ]


STRUCTURES = (
    Weights,
    Soon,
    Product,
    Attention,
    Rotation,
    Activation,
    Convolution,
    Delta,
)  # as `sizes` of fused.cpp has them

# Members of Kernels in their order: what a function returns and takes, or the kind of a number.
P, Q = Pointer, Long
MEMBERS: dict[str, tuple | type] = {
    "name": Pointer,
    "scratch_floats": (Q, P),
    "columns": (Q, P),
    "product": (None, P, Q, Q),
    "prepare": (None, P, P, Int, Q, Q, Q, P),
    "compacts": (c.c_bool, P, Int),
    "compact": (c.c_bool, P, P, Int, Q, Q, P),
    "lane_floats": (Q, P, Q, Q),
    "put_in_lanes": (None, P, Q, Q, P),
    "width": Int,
    "direct": (c.c_bool, P, Int, Q),
    "rms": (None, P, Int, Q, Q, P, Int, Q, Float, P, Int),
    "attention_floats": (Q, P),
    "begin": (None, P),
    "score": (None, P, Q, Q),
    "weigh": (None, P, Int, Int),
    "gathered_apart": (Q, P),
    "gather": (None, P, Int, Int, Q, Q),
    "waves": (None, P, Q, Int, P, P),
    "rotate": (None, P),
    "activate": (None, P),
    "soft_cap": (None, P, Int, Q, Float, P),
    "convolve": (None, P),
    "delta_floats": (Q, P),
    "delta": (None, P),
    "largest": (Float, P, Int, Q),
    "exp_sum": (Float, P, Int, Q, Float),
    "first_best": (Q, P, Int, Q, Float, Float),
    "round_to": (Float, Float, Int),
    "rowwise": (None, Int, P, P, Int, Q, P),
    "read": (Float, P, Q),
    "multiply_add": (Float, Q),
    "multiply_adds_a_round": Int,
}


class KernelTable(c.Structure):
    _fields_: ClassVar[Fields] = [
        (name, Pointer if isinstance(kind, tuple) else kind) for name, kind in MEMBERS.items()
    ]


class Table:
    """Kernels by name: `table("rms", ...)` calls one, by `call(address, kinds, arguments)`."""

    def __init__(self, name: str, members: KernelTable, call: Callable) -> None:
        self.name, self.members, self.call = name, members, call

    def __call__(self, name: str, *arguments: object) -> int | float | None:
        kinds = MEMBERS[name]
        taken = [at(a) if isinstance(a, c.Structure) else a for a in arguments]
        if len(taken) != len(kinds) - 1:
            raise TypeError(f"{name}: found {len(taken)} arguments, expected {len(kinds) - 1}.")
        return self.call(getattr(self.members, name), kinds, taken)


def host_call(address: int, kinds: tuple, arguments: list) -> int | float | None:
    return c.CFUNCTYPE(*kinds)(address)(*arguments)


def host_tables(library: str, form: int) -> tuple[Table, Table]:
    """For one of FORMS the tables of fused.cpp and kernels_portable.cpp, compiled for this machine."""
    lib = c.CDLL(library)
    sizes = list((c.c_int64 * len(STRUCTURES)).in_dll(lib, "sizes"))
    here = [c.sizeof(structure) for structure in STRUCTURES]
    if sizes != here:
        raise SystemExit(
            f"kernels.h: found structures of {sizes} bytes, expected {here}. Bring tools/neon/table.py up to date."
        )
    tables = []
    for name in ("fused", "portable"):
        give = getattr(lib, f"{name}_table")
        give.restype, give.argtypes = c.c_void_p, (c.c_int,)
        tables.append(Table(name, KernelTable.from_address(give(form)), host_call))
    return tables[0], tables[1]


class Room:
    """Memory that this machine and the emulated one have at the same addresses, handed out piece by piece."""

    EDGE = 64  # bytes around a piece, which nobody may write

    def __init__(self, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(-1, size)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address = self.bytes.ctypes.data
        self.clear()

    def clear(self) -> None:
        self.used = 0

    def array(self, shape: int | tuple[int, ...], dtype: type | str) -> np.ndarray:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        start = self.used + self.EDGE
        self.used = start + (count + 63) // 64 * 64
        if self.used + self.EDGE > self.size:
            raise MemoryError(f"room: found {self.size} bytes, expected {self.used} or more.")
        self.bytes[start - self.EDGE : self.used + self.EDGE] = 0xA5
        return self.bytes[start : start + count].view(dtype).reshape(shape)

    def put(self, values: np.ndarray) -> np.ndarray:
        piece = self.array(values.shape, values.dtype)
        piece[...] = values
        return piece

    def make(self, structure: type[c.Structure], **members: object) -> c.Structure:
        made = structure.from_buffer(self.array(c.sizeof(structure), np.uint8))
        c.memset(c.addressof(made), 0, c.sizeof(structure))
        for name, value in members.items():
            setattr(made, name, value)
        return made


def at(piece: np.ndarray | c.Structure | None) -> int:
    """Where an array or a structure begins, 0 for none."""
    if piece is None:
        return 0
    return c.addressof(piece) if isinstance(piece, c.Structure) else piece.ctypes.data
