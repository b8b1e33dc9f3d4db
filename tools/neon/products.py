"""Products of rows with weights of every format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from table import AFFINE, BF16, DENSE, E4M3, E8M0, F16, F32, FP4, Product, Soon, Table, Weights, at
from trial import Result, Trial, calls
from values import FP4_VALUES, NAMES, STORED, ULP, floats, scale_floats, stored, unpacked

FLOATS = (F32, F16, BF16)
ROWS = 11  # from nine on weights are decoded first, and multiplied with four rows at a time
ODD_NAN = {F32: np.uint32(0xFFC12345).view("f4"), F16: np.uint16(0xFE12).view("f2"), BF16: 0xFFC1}
SHAPES = ((37, 5), (16, 1), (21, 33), (5, 130), (17, 1030))  # (N, K) of dense weights; several parts of K in the last


@dataclass
class Matrix:
    """Weights, and what they are worth."""

    name: str
    weights: Weights
    values: np.ndarray  # (N, K)
    parts: tuple[np.ndarray, ...] = ()  # of affine weights: codes (N, K), scales and biases (N, K / group)


def dense(trial: Trial, type: int, N: int, K: int) -> Matrix:
    data = trial.room.put(stored(trial.normal(N, K), type))
    weights = Weights(format=DENSE, type=type, data=at(data), row_bytes=data.strides[0])
    return Matrix(f"dense {NAMES[type]}", weights, floats(data, type))


def packed(trial: Trial, bits: int, group: int, scale_type: int, N: int, K: int, odd: float | None = None) -> Matrix:
    """Codes, scales, biases; an odd value is the last scale of a column and the first bias of another."""
    data = trial.room.put(trial.random.integers(0, 256, (N, K * bits // 8), "u1"))
    scales = trial.room.put(stored(trial.normal(N, K // group) / 2**bits, scale_type))
    biases = trial.room.put(stored(trial.normal(N, K // group), scale_type))
    if odd is not None:
        scales[0, -1] = biases[N // 2, 0] = stored(np.float32([odd]), scale_type)[0]
    weights = Weights(format=AFFINE, bits=bits, group=group, scale_type=scale_type, row_bytes=data.strides[0])
    weights.data, weights.scales, weights.biases = at(data), at(scales), at(biases)
    parts = unpacked(data, bits), floats(scales, scale_type), floats(biases, scale_type)
    with np.errstate(invalid="ignore"):
        values = parts[0].astype("f4") * parts[1].repeat(group, -1) + parts[2].repeat(group, -1)
    return Matrix(f"affine {bits} bits", weights, values, parts)


def fp4(trial: Trial, group: int, N: int, K: int) -> Matrix:
    scale_type = E4M3 if group == 16 else E8M0
    data = trial.room.put(trial.random.integers(0, 256, (N, K // 2), "u1"))
    codes = (
        trial.random.integers(0, 120, (N, K // group))
        if group == 16
        else trial.random.integers(118, 128, (N, K // group))
    )
    scales = trial.room.put(codes.astype("u1"))
    weights = Weights(format=FP4, bits=4, group=group, scale_type=scale_type, row_bytes=data.strides[0])
    weights.data, weights.scales = at(data), at(scales)
    values = FP4_VALUES[unpacked(data, 4)] * scale_floats(scales, scale_type).repeat(group, -1)
    return Matrix("fp4", weights, values)


class Multiplied:
    """Rows times a matrix: prepared as the library does it, then some of them at a time."""

    compact = False
    everywhere: tuple[str, ...] = ("scratch_floats", "columns")  # numbers that every table has to give
    asked: tuple[tuple[str, bool], ...] = (("compacts", False), ("direct", True))  # likewise, and whether K is told

    def __init__(
        self,
        trial: Trial,
        matrix: Matrix,
        x: np.ndarray,
        x_type: int,
        y_type: int,
        bias_type: int | None,
        stride: int | None = None,
    ) -> None:
        self.trial, self.matrix, self.y_type = trial, matrix, y_type
        room, weights = trial.room, matrix.weights
        self.N, self.K = matrix.values.shape
        self.padded = (self.K + 3) // 4 * 4
        self.group = f"product, {matrix.name}"
        self.what = f"{NAMES[x_type]} to {NAMES[y_type]}, groups of {weights.group}, N {self.N}, K {self.K}"
        self.w = room.make(Weights)
        for name, _ in Weights._fields_:
            setattr(self.w, name, getattr(weights, name))
        self.stride = stride or int(trial.pick(1, 1, 2))
        spread = room.put(np.repeat(x, self.stride, 1))
        self.x = floats(x, x_type)
        self.prepared = self.prepare(spread, x_type)
        self.bias = None if bias_type is None else room.put(stored(trial.normal(self.N), bias_type))
        self.bias_type = bias_type or F32
        self.y = room.array((len(x), self.N), STORED[y_type])
        self.pointers = room.array((2, len(x)), "u8")
        self.soon = room.make(Soon, data=at(spread), bytes=64, apart=128, count=2)

    def prepare(self, spread: np.ndarray, type: int) -> Sequence[np.ndarray]:
        rows = at(spread) + spread.strides[0] * np.arange(len(spread))
        prepared = self.trial.room.array((len(spread), self.padded), "f4")

        def call(table: Table) -> None:
            for row, out in zip(rows, prepared, strict=True):
                table("prepare", self.w, int(row), type, self.stride, self.K, self.padded, at(out))

        what = f"{NAMES[type]}, K {self.K}, {self.stride} apart"
        self.trial.compare("prepared rows", what, call, [Result(prepared)])
        for name, told in self.asked:
            more = (self.K,) if told else ()
            self.trial.numbers("prepared rows", name, calls(name, self.w, type, *more))
        return prepared

    def bound(self) -> tuple[np.ndarray, np.ndarray]:
        """Exact results, and how far they may be missed by K / 4 steps of a chain, its tree and the bias."""
        x, w = self.x.astype("f8"), self.matrix.values.astype("f8")
        bias = 0 if self.bias is None else floats(self.bias, self.bias_type).astype("f8")
        with np.errstate(invalid="ignore"):
            exact, sizes = x @ w.T + bias, np.abs(x) @ np.abs(w).T + np.abs(bias)
        return exact, np.nan_to_num(sizes, posinf=0) * (self.K / 4 + 5) * 2.0**-24

    def described(self, count: int, soon: bool) -> Product:
        p = self.trial.room.make(
            Product, w=self.w, x=at(self.pointers[0]), y=at(self.pointers[1]), rows=count, N=self.N
        )
        p.K, p.padded, p.bias, p.bias_type, p.y_type = self.K, self.padded, at(self.bias), self.bias_type, self.y_type
        p.compact = self.compact
        if soon:
            p.soon, p.soon_count, p.soon_to = at(self.soon), 1, 1.0
        return p

    def rows(self, first: int, count: int, bound: np.ndarray) -> np.ndarray:
        """Rows `first` on, compared; what NEON gave."""
        chosen = range(first, first + count)
        self.pointers[0, :count] = [at(self.prepared[r]) for r in chosen]
        self.pointers[1, :count] = [at(self.y[r]) for r in chosen]
        soon = self.trial.pick(True, False)
        products = {table: self.described(count, soon) for table in self.trial.tables}
        scratch = [self.trial.scratch(table("scratch_floats", p)) for table, p in products.items()]
        for p, room in zip(products.values(), scratch, strict=True):
            p.scratch = at(room)
        for name in self.everywhere:
            self.trial.numbers(self.group, name, calls(name, p))
        cut = int(self.trial.pick(self.N, 16))  # where one thread's columns may end

        def call(table: Table) -> None:
            for begin, end in ((0, min(cut, self.N)), (cut, self.N)):
                if begin < end:
                    table("product", products[table], begin, end)

        result = Result(self.y[first : first + count], self.y_type, 2 * bound[first : first + count], one_nan=True)
        return self.trial.compare(self.group, f"{self.what}, {count} rows", call, [result], scratch)[0]


def multiply(
    trial: Trial,
    matrix: Matrix,
    x_type: int,
    y_type: int,
    bias_type: int | None,
    odd: float | None = None,
    kind: type[Multiplied] = Multiplied,
) -> None:
    """ROWS rows by a matrix, the first with an odd value."""
    K = matrix.values.shape[1]
    x = stored(trial.normal(ROWS, K), x_type)
    if odd is not None:
        x[0, K // 2] = stored(np.float32([odd]), x_type)[0] if odd == odd else ODD_NAN[x_type]
    at_a_time(kind(trial, matrix, x, x_type, y_type, bias_type))


def at_a_time(product: Multiplied) -> None:
    """All counts of rows against exact values and against the rows alone."""
    trial, y_type, rows = product.trial, product.y_type, len(product.x)
    exact, bound = product.bound()
    alone = np.stack([product.rows(r, 1, bound)[0] for r in range(rows)])
    limit = bound + ULP[y_type] * np.abs(np.nan_to_num(exact)) + 2.0**-24
    trial.check(product.group, product.what, floats(alone, y_type), exact, limit)
    for count in range(2, rows + 1):
        first = int(trial.random.integers(0, rows - count + 1))
        got = product.rows(first, count, bound)
        trial.same(product.group, f"{product.what}, {count} rows", got, alone[first : first + count], count)
    many = product.rows(0, rows, bound)
    trial.same(product.group, f"{product.what}, {rows} rows", many, alone, rows)


def products(trial: Trial) -> None:
    """Every format with every kind of activation, result and bias at some size."""

    def one(matrix: Matrix, odd: float | None = None) -> None:
        x_type, y_type, bias_type = trial.pick(*FLOATS), trial.pick(*FLOATS), trial.pick(None, *FLOATS)
        multiply(trial, matrix, x_type, y_type, bias_type, odd)
        trial.room.clear()

    for type in FLOATS:
        for N, K in SHAPES:
            one(dense(trial, type, N, K))
        for odd in (np.nan, np.inf, 1e-40):
            one(dense(trial, type, 19, 34), odd)
    for bits in (2, 3, 4, 5, 6, 8):
        for group in (32, 64, 128):
            for scale_type in FLOATS:
                one(packed(trial, bits, group, scale_type, 21, 3 * group))
        one(packed(trial, bits, 64, BF16, 17, 1088))
        one(packed(trial, bits, 32, F16, 3, 64), np.nan)
    for group in (16, 32):
        for N, K in ((21, 96), (5, 32), (17, 1056)):
            one(fp4(trial, group, N, K))
