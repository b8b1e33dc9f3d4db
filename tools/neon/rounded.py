"""Rows rounded to whole numbers, their products with codes, and what stays exact in rounded tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from products import FLOATS, ODD_NAN, ROWS, Matrix, Multiplied, at_a_time, dense, fp4, multiply, packed
from table import BF16, F16, F32, MEMBERS, Table, Weights, at
from trial import Result, Trial, calls
from values import NAMES, floats, stored

TOGETHER = 32  # elements of a row that share a factor
SMALL, LARGE = 2.0**-100, 2.0**112  # what the largest of a group may be, LARGE excluded
WHOLE = {"int8": 127, "int16": 127 * 128}  # the largest whole number
EVEN_FIRST = [0, 2, 4, 6, 1, 3, 5, 7]  # places of eight elements, by codes of four bits
GROUPS = (32, 64, 128)
COLUMNS = (1, 3, 5, 7, 18, 21, 37)
LENGTHS = (1, 2, 3, 5, 9, 10)  # in groups: 64 bytes of codes are one to eight of them
LONG = 67 * 32
MANY = 19  # more rows than two times eight
BELOW = float(np.nextafter(np.float32(LARGE), np.float32(0)))
TINY = float(np.nextafter(np.float32(SMALL), np.float32(0)))
# Alone in a group of zeros; float16 holds some of them as zero or infinity.
EXTREMES = (np.nan, np.inf, -np.inf, 2.0**113, LARGE, -LARGE, -TINY, 1e-35, 1e-40, BELOW, SMALL, -1.0)
# What tables have of their own, besides their names.
OF_PRODUCTS = {"name", "scratch_floats", "product", "compacts", "compact", "direct"}


@dataclass
class Rounded:
    """What `compact` has to make of rows, computed once more."""

    taken: np.ndarray  # whether it takes a row
    whole: np.ndarray  # (rows, K / 32, 32)
    factors: np.ndarray  # (rows, K / 32)
    form: str

    def laid(self, row: int, bits: int, group: int) -> np.ndarray:
        """A row as it lies in memory."""
        whole, factors = self.whole[row], self.factors[row]
        order = whole.reshape(-1, 8)[:, EVEN_FIRST] if bits == 4 else whole
        sums = whole.sum(-1)
        shares = (factors * sums.astype("f4")).reshape(-1, group // TOGETHER)
        of_weights = np.zeros(len(shares), "f4")
        for share in shares.T:
            of_weights = of_weights + share
        if self.form == "int16":  # four high bytes, then their low ones
            four = order.reshape(-1, 4)
            high = (four + 64) >> 7
            order = np.stack([high, four - 128 * high], axis=1)
        parts = order.astype("i1"), factors, (128 * sums).astype("i4"), of_weights
        return np.concatenate([np.ascontiguousarray(part).reshape(-1).view("f4") for part in parts])


def rounded(x: np.ndarray, form: str) -> Rounded:
    most = np.float32(WHOLE[form])
    groups = x.reshape(len(x), -1, TOGETHER)
    largest = np.abs(groups).max(-1)  # NaN where there is any
    taken = ((largest == 0) | ((largest >= SMALL) & (largest < LARGE))).all(-1)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        inverse = np.where(largest == 0, np.float32(0), most / largest)
        whole = np.rint(groups * inverse[..., None])
    return Rounded(taken, np.where(taken[:, None, None], whole, 0).astype("i4"), largest / most, form)


class Compact(Multiplied):
    """Rounded rows times a matrix. The first `count` are multiplied; the others are only prepared."""

    compact = True
    everywhere = ("columns",)  # tables put different counts of rows together, and need other scratch for those

    def __init__(self, *arguments: object, count: int) -> None:
        self.count = count
        super().__init__(*arguments)

    def prepare(self, spread: np.ndarray, type: int) -> Sequence[np.ndarray]:
        matrix, room, trial = self.matrix, self.trial.room, self.trial
        self.expected = rounded(self.x, trial.form)
        written = self.K // 4 * (2 if trial.form == "int16" else 1) + 2 * (self.K // TOGETHER) + self.K // self.w.group
        made = [room.array(written, "f4") for _ in spread]  # bytes around each of them are watched
        taken = room.array(len(spread), "f4")

        def call(table: Table) -> None:
            for r, out in enumerate(made):
                taken[r] = table("compact", self.w, at(spread[r]), type, self.stride, self.K, at(out))

        group = f"rows, {matrix.name}"
        what = f"{NAMES[type]}, groups of {self.w.group}, K {self.K}, {self.stride} apart"
        results = [Result(taken), *(Result(out, one_nan=True) for out in made)]
        got = trial.compare(group, what, call, results)
        if (got[0] != self.expected.taken).any():
            trial.fail(group, f"{what}: found rows {np.flatnonzero(got[0])} taken, expected others")
        for r in np.flatnonzero(self.expected.taken):
            if got[1 + r].tobytes() != self.expected.laid(r, self.w.bits, self.w.group).tobytes():
                trial.fail(group, f"{what}: found row {r} to be other bytes than computed here")
            made[r][...] = got[1 + r]  # the portable table wrote last
        self.x = self.x[: self.count]
        return made

    def bound(self) -> tuple[np.ndarray, np.ndarray]:
        """Exact results, and how far a chain of K / 32 sums and as many biases as groups may miss them."""
        rows, (codes, scales, biases) = len(self.x), self.matrix.parts
        whole, factors = self.expected.whole[:rows].astype("f8"), self.expected.factors[:rows].astype("f8")
        times = self.w.group // TOGETHER
        bias = 0 if self.bias is None else floats(self.bias, self.bias_type).astype("f8")
        with np.errstate(invalid="ignore"):
            dots = np.einsum("rgk,ngk->rng", whole, codes.reshape(self.N, -1, TOGETHER).astype("f8"))
            scaled = dots * factors[:, None] * scales.astype("f8").repeat(times, -1)
            shifts = (whole.sum(-1) * factors)[:, None] * biases.astype("f8").repeat(times, -1)
            exact = (scaled + shifts).sum(-1) + bias
            sizes = (np.abs(scaled) + np.abs(shifts)).sum(-1) + np.abs(bias)
        if self.y_type == F16:
            exact = np.where(np.abs(exact) >= 65520, np.copysign(np.inf, exact), exact)
        roundings = self.K / TOGETHER + self.K / self.w.group + 5
        return exact, np.nan_to_num(sizes, posinf=0) * roundings * 2.0**-24


def rows_of(trial: Trial, type: int, K: int, count: int) -> np.ndarray:
    """Rows that hold extremes and others, at least `count` of which are taken; those come first."""
    x = trial.normal(count - 3, K) * np.float32(trial.pick(1, 1, 1000))
    x[1, K // 2 :] = 0
    x[2] = trial.pick(0.0, -0.0)
    whole = WHOLE[trial.form]
    x[3] = trial.random.integers(-whole + 1, whole - 1, K) + 0.5  # ties
    x[3, ::TOGETHER] = whole
    x[4, :TOGETHER] = 0
    extremes = np.zeros((len(EXTREMES), K), "f4")
    extremes[:, :-TOGETHER] = trial.normal(len(EXTREMES), K - TOGETHER)
    extremes[:, K - 1 - int(trial.random.integers(TOGETHER))] = EXTREMES
    with np.errstate(over="ignore"):
        rows = stored(np.concatenate([x, extremes]), type)
    rows[count - 3, 0] = ODD_NAN[type]
    return rows[np.argsort(~rounded(floats(rows, type), trial.form).taken, kind="stable")]


def compact(trial: Trial, matrix: Matrix, x_type: int, stride: int, count: int = ROWS) -> None:
    x = rows_of(trial, x_type, matrix.values.shape[1], count)
    y_type, bias_type = trial.pick(*FLOATS), trial.pick(None, *FLOATS)
    at_a_time(Compact(trial, matrix, x, x_type, y_type, bias_type, stride, count=count))
    trial.room.clear()


def forms(trial: Trial, matrix: Matrix, rounds: bool) -> None:
    """What tables say about the form of rows."""
    w, K = trial.room.make(Weights), matrix.values.shape[1]
    for name, _ in Weights._fields_:
        setattr(w, name, getattr(matrix.weights, name))
    for type in FLOATS:
        for name, more, expected in (("compacts", (), rounds), ("direct", (K,), False)):  # rows are always copied
            what, call = f"{name} of {NAMES[type]} by {matrix.name}", calls(name, w, type, *more)
            trial.numbers("forms of rows", what, call)
            if call(trial.neon) != expected:
                trial.fail("forms of rows", f"{what}: found {not expected}, expected {expected}")
    trial.room.clear()


def others(trial: Trial) -> Iterator[Matrix]:
    """Weights by which no row is rounded."""
    for type in FLOATS:
        yield dense(trial, type, 19, 34)
        yield dense(trial, type, 5, 128)
    for bits, group in itertools.product((2, 3, 5, 6), GROUPS):
        yield packed(trial, bits, group, trial.pick(*FLOATS), 21, 3 * group)
    for group in (16, 32):
        yield fp4(trial, group, 21, 96)


def rounded_products(trial: Trial) -> None:
    """Every width, group and type at some size and with some bias, then sizes of their own."""
    for bits, group, type in itertools.product((4, 8), GROUPS, FLOATS):
        forms(trial, packed(trial, bits, group, type, 5, 2 * group), True)
        for x_type, stride in itertools.product(FLOATS, (1, 2)):
            N, K = int(trial.pick(*COLUMNS)), int(trial.pick(*LENGTHS)) * group
            compact(trial, packed(trial, bits, group, type, N, K), x_type, stride)
    for bits in (4, 8):
        for length in LENGTHS:
            compact(trial, packed(trial, bits, 32, BF16, 5, 32 * length), F32, 1)
        for type in FLOATS:
            compact(trial, packed(trial, bits, 32, type, 19, LONG), type, 1)
            compact(trial, packed(trial, bits, 64, type, 7, 320), type, 1, MANY)
            for odd in (np.nan, np.inf):
                compact(trial, packed(trial, bits, 32, type, 6, 96, odd), BF16, 1)
    for matrix in others(trial):
        forms(trial, matrix, False)


class Refused(Multiplied):
    """Rows multiplied as floats though the table rounds others, of which tables say different things."""

    asked = ()


def exact_products(trial: Trial) -> None:
    """Here the table of exact products stands for the fused one: what is not rounded has its bytes."""

    def one(matrix: Matrix, kind: type[Multiplied], odd: float | None = None) -> None:
        x_type, y_type, bias_type = trial.pick(*FLOATS), trial.pick(*FLOATS), trial.pick(None, *FLOATS)
        multiply(trial, matrix, x_type, y_type, bias_type, odd, kind)
        trial.room.clear()

    for matrix in others(trial):
        one(matrix, Multiplied)
    for bits, group, odd in itertools.product((4, 8), GROUPS, (np.nan, np.inf, 2.0**13)):
        one(packed(trial, bits, group, trial.pick(*FLOATS), 21, 3 * group), Refused, odd)
    for name in MEMBERS.keys() - OF_PRODUCTS:
        if getattr(trial.neon.members, name) != getattr(trial.fused.members, name):
            trial.fail("other kernels", f"{name}: found another function than in the exact table")
