"""Norms, rotary positions, activations, short convolutions and choices of the largest."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from table import BF16, F16, F32, Activation, Convolution, Rotation, Table, at
from trial import Result, Trial, calls
from values import NAMES, STORED, ULP, floats, stored

FLOATS = (F32, F16, BF16)
COUNTS = (1, 3, 4, 7, 64, 129)
EDGES = (-87.0, 88.00000762939453, -88.00000762939453, 0.625, 0.9375, 18.75)  # where functions change their form
SPECIAL = (0.0, -0.0, 1e-40, -1e-30, 87.5, -87.5, 1e4, -1e4, np.inf, -np.inf, np.nan, *EDGES)
LARGEST_ANGLE = 8388608.0  # beyond it waves are those of the C library


def special(trial: Trial, count: int, type: int) -> np.ndarray:
    """Stored normal values, some of another size, some of them odd ones."""
    values = trial.normal(count) * np.float32(trial.pick(1, 10))
    places = trial.random.permutation(count)
    for place, value in zip(places[: count // 4], trial.random.permutation(SPECIAL), strict=False):
        values[place] = value
    with np.errstate(over="ignore"):
        return stored(values, type)


def norms(trial: Trial) -> None:
    """Rows of any type and spacing; the scale's sum is a chain per lane."""
    kinds = itertools.product(FLOATS, (False, True), (1, 5, 64, 130), (None, *FLOATS))
    for type, wide, D, weight_type in kinds:
        norm(trial, type, F32 if wide else type, D, weight_type)
        trial.room.clear()


def norm(trial: Trial, type: int, y_type: int, D: int, weight_type: int | None) -> None:
    rows, stride = int(trial.pick(1, 3, 9)), int(trial.pick(1, 2))
    x = trial.room.put(stored(trial.normal(rows, D * stride), type))
    weight = None if weight_type is None else trial.room.put(stored(trial.normal(D), weight_type))
    y = trial.room.array((rows, D), STORED[y_type])
    values = np.abs(floats(x[:, ::stride], type).astype("f8"))
    root = np.sqrt((values**2).mean(-1, keepdims=True) + 1e-6)
    times = 1 if weight is None else np.abs(floats(weight, weight_type))
    bound = values / root * times * ((D / 4 + 8) * 2.0**-24 + 2 * ULP[y_type])

    def some(first: int, count: int) -> Callable[[Table], int | float | None]:
        places = at(x[first:]), type, count, stride, at(weight), weight_type or F32
        return calls("rms", *places, D, 1e-6, at(y[first:]), y_type)

    what = f"{NAMES[type]} to {NAMES[y_type]}, {rows} rows of {D}, {stride} apart"
    got = trial.compare("rms norm", what, some(0, rows), [Result(y, y_type, bound)])[0]
    for r in range(rows):
        alone = trial.run(trial.neon, some(r, 1), [Result(y[r : r + 1], y_type)], [])
        trial.same("rms norm", what, got[r : r + 1], alone[0])


def rotations(trial: Trial) -> None:
    """Cosines and sines, and rows turned by them."""
    for type in FLOATS:
        for count, size, far in ((1, 1, 0), (37, 1e3, 0), (64, 1e6, 0), (9, 1, 1e9)):
            angles = trial.room.put(trial.normal(count) * np.float32(size) + np.float32(far))
            waves = trial.room.array((2, count), "f4")
            bound = None if far == 0 else 2 * ULP[type]
            call = calls("waves", at(angles), count, type, at(waves[0]), at(waves[1]))
            name = "waves, far angles" if far else "waves"
            trial.compare(name, f"{NAMES[type]}, {count} angles", call, [Result(waves, F32, bound)])
        for D, dims, neighbours in itertools.product((10, 64, 80), (0, 6, 10), (False, True)):
            for dims_here, stride in itertools.product({dims, D // 4 * 2}, (1, 2)):
                rotate(trial, type, D, dims_here, neighbours, stride)
        trial.room.clear()


def rotate(trial: Trial, type: int, D: int, dims: int, neighbours: bool, stride: int) -> None:
    x = trial.room.put(stored(trial.normal(D * stride), type))
    y = trial.room.array(D, STORED[type])
    padded = (dims // 2 + 3) // 4 * 4
    turns = trial.room.put(np.stack([np.cos(np.arange(padded)), np.sin(np.arange(padded))]).astype("f4"))
    r = trial.room.make(Rotation, x=at(x), y=at(y), type=type, stride=stride, dims=dims, D=D, neighbours=neighbours)
    r.cosines, r.sines = at(turns[0]), at(turns[1])
    what = f"{NAMES[type]}, {dims} of {D}, neighbours {neighbours}, {stride} apart"
    trial.compare("rotate", what, calls("rotate", r), [Result(y, type)])


def activations(trial: Trial) -> None:
    """Activations with and without a factor, and the soft cap, whose exponentials are polynomials."""
    for act, type, precise, alone in itertools.product((0, 1), FLOATS, (False, True), (False, True)):
        for count in COUNTS:
            gate_type, x_type = (trial.pick(*FLOATS) if precise else type), (trial.pick(*FLOATS) if precise else type)
            aparts = int(trial.pick(1, 2)), int(trial.pick(1, 3))
            gate = trial.room.put(special(trial, count * aparts[0], gate_type))
            x = None if alone else trial.room.put(stored(trial.normal(count * aparts[1]), x_type))
            y = trial.room.array(count, STORED[type])
            a = trial.room.make(Activation, act=act, type=type, gate_type=gate_type, x_type=x_type, precise=precise)
            a.gate, a.x, a.y, a.count, a.gate_apart, a.x_apart = at(gate), at(x), at(y), count, *aparts
            size = np.nan_to_num(np.abs(floats(gate[:: aparts[0]], gate_type).astype("f8")), posinf=0)
            if x is not None:
                size = size * np.abs(floats(x[:: aparts[1]], x_type))
            name = "silu" if act == 0 else "gelu"
            what = f"{NAMES[type]}, {count}, precise {precise}"
            bound = size * (2.0**-20 + 4 * ULP[type])
            trial.compare(name, what, calls("activate", a), [Result(y, type, bound)])
            trial.room.clear()
    for type, count, cap in itertools.product(FLOATS, COUNTS, (1.5, 30.0)):
        x = trial.room.put(special(trial, count, type))
        y = trial.room.array(count, STORED[type])
        call = calls("soft_cap", at(x), type, count, cap, at(y))
        bound = cap * (2.0**-20 + 4 * ULP[type])
        trial.compare("soft cap", f"{NAMES[type]}, {count}, cap {cap}", call, [Result(y, type, bound)])
        trial.room.clear()


def pairs_of_rows(trial: Trial) -> None:
    """Two rows to one."""
    for (op, name), type, count in itertools.product(enumerate(("add", "multiply", "silu", "gelu")), FLOATS, COUNTS):
        a, b = (trial.room.put(special(trial, count, type)) for _ in range(2))
        y = trial.room.array(count, STORED[type])
        with np.errstate(invalid="ignore"):
            sizes = np.abs(floats(a, type).astype("f8") * floats(b, type))
        bound = None if op < 2 else np.nan_to_num(sizes, posinf=0) * (2.0**-20 + 4 * ULP[type])
        call = calls("rowwise", op, at(a), at(b), type, count, at(y))
        group = "add, multiply" if op < 2 else "silu and gelu of rows"
        trial.compare(group, f"{name}, {NAMES[type]}, {count}", call, [Result(y, type, bound)])
        trial.room.clear()


def convolutions(trial: Trial) -> None:
    for type, channels, apart, biased in itertools.product(FLOATS, (1, 6, 33), (1, 3), (False, True)):
        taps = int(trial.pick(1, 4))
        x = trial.room.put(stored(trial.normal(taps, channels * apart), type))
        w = trial.room.put(stored(trial.normal(taps, channels), type))
        bias = trial.room.put(stored(trial.normal(channels), type)) if biased else None
        y = trial.room.array(channels, STORED[type])
        v = trial.room.make(Convolution, x=at(x), w=at(w), bias=at(bias), y=at(y), type=type, channels=channels)
        v.taps, v.step, v.apart, v.w_step = taps, channels * apart, apart, channels
        size = np.abs(floats(x[:, ::apart], type) * floats(w, type)).sum(0) + (
            0 if bias is None else np.abs(floats(bias, type))
        )
        result = Result(y, type, size * (taps + 2) * 2.0**-24)
        what = f"{NAMES[type]}, {channels} channels, {taps} taps"
        trial.compare("convolution", what, calls("convolve", v), [result])
        trial.room.clear()


def choices(trial: Trial) -> None:
    """The largest, the sum of exponentials, the first of those like the best; rounding of values."""
    for type, n in itertools.product(FLOATS, (0, 1, 5, 64, 65, 1031)):
        for odd in (False, True):
            values = stored(trial.normal(n) * 5, type)
            if odd and n:
                values[n // 2] = stored(np.float32([np.nan]), type)[0]
            x = trial.room.put(values)
            best = float(np.nan_to_num(floats(values, type)).max(initial=0))
            what = f"{NAMES[type]}, {n}"
            trial.numbers("greedy choice", what, calls("largest", at(x), type, n))
            sums = calls("exp_sum", at(x), type, n, best)
            trial.numbers("sum of exponentials", what, sums, (n / 4 + 4) * n * 2.0**-22)
            shift = best - float(trial.pick(0, 0.125))
            first = calls("first_best", at(x), type, n, shift, best)
            trial.numbers("greedy choice", what, first)
        trial.room.clear()
    x = trial.room.put(np.float32([0, -87, -87.5, -1, -3]))
    trial.numbers("sum of exponentials", "edges", calls("exp_sum", at(x), F32, 5, 0.0), 1e-5)
    for type in FLOATS:
        for value in (*SPECIAL, 1.00390625, 65519.0, 65520.0, 6e-8, 3.4e38, *map(float, trial.normal(40))):
            trial.numbers("rounding", f"{value} to {NAMES[type]}", calls("round_to", value, type))
    x = trial.room.put(trial.normal(1000))
    trial.numbers("benchmarks", "read", calls("read", at(x), 1000), 1e-3)
    trial.numbers("benchmarks", "multiply_add", calls("multiply_add", 100), 1e-3)
