"""The gated delta rule: tapes, steps, states of any size; steps of one call against calls of one step."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from table import BF16, F16, F32, Delta, Series, Table, at
from trial import Result, Trial, calls
from values import NAMES, STORED, floats, stored

FLOATS = (F32, F16, BF16)
MANY = 35  # more steps than a leg has


@dataclass
class Steps:
    """Inputs of some steps: decay and rate in (0, 1), keys and queries of unit length."""

    decay: np.ndarray
    rate: np.ndarray
    keys: np.ndarray
    queries: np.ndarray
    values: np.ndarray
    type: int

    def series(self, name: str, first: int) -> Series:
        array = getattr(self, name)
        step = array.shape[1]
        type = F32 if name in ("decay", "rate") else self.type
        return Series(at(array) + first * array.strides[0], type, step, 1)


def steps_of(trial: Trial, count: int, rows: int, D: int, type: int) -> Steps:
    def unit() -> np.ndarray:
        x = trial.normal(count, D)
        return stored(x / np.sqrt((x**2).sum(-1, keepdims=True)), type)

    put, random = trial.room.put, trial.random
    decay, rate = (put(random.random((count, 1), "f4")) for _ in range(2))
    return Steps(decay, rate, put(unit()), put(unit()), put(stored(trial.normal(count, rows), type)), type)


class Ruled:
    """A state, what is owed to it and the steps after; `call` runs some of the steps."""

    def __init__(self, trial: Trial, rows: int, D: int, type: int, owed: int, steps: int) -> None:
        self.trial, self.rows, self.D, self.type, self.owed_count, self.count = trial, rows, D, type, owed, steps
        room = trial.room
        self.apart = int(trial.pick(1, 1, 3))
        self.before = room.put(trial.normal(rows, D * self.apart))
        self.owed, self.steps = steps_of(trial, owed, rows, D, type), steps_of(trial, steps, rows, D, type)
        self.settled, self.after = (room.array((rows, D), "f4") for _ in range(2))
        self.deltas, self.y = room.array((steps, rows), "f4"), room.array((steps, rows), STORED[type])
        self.scratch = trial.scratch(trial.neon("delta_floats", self.described(0, steps, True)))

    def described(self, first: int, count: int, owed: bool) -> Delta:
        """Steps `first` to `first + count`, from the state that was given or from the one after."""
        d = self.trial.room.make(
            Delta, rows=self.rows, D=self.D, steps=count, settled=at(self.settled), after=at(self.after)
        )
        fresh = first == 0
        d.before, d.column_stride = (at(self.before), self.apart) if fresh else (at(self.after), 1)
        d.row_stride = self.D * d.column_stride
        d.owed = self.owed_count if owed else 0
        d.owed_decay, d.owed_keys = self.owed.series("decay", 0), self.owed.series("keys", 0)
        d.owed_deltas = self.owed.series("values", 0)
        for name in ("decay", "rate", "keys", "queries", "values"):
            setattr(d, name, self.steps.series(name, first))
        d.deltas, d.delta_step = at(self.deltas) + first * self.deltas.strides[0], self.rows
        d.y, d.y_type, d.y_step = at(self.y) + first * self.y.strides[0], self.type, self.rows
        return d

    def results(self) -> list[Result]:
        """No step makes a row longer by more than its value; every sum misses by its chain's roundings."""
        longest = np.sqrt((self.before.astype("f8") ** 2).sum(-1)).max(initial=0)
        added = sum(np.abs(floats(s.values, self.type)).max(-1).sum() for s in (self.owed, self.steps))
        size = (longest + added) * (self.D / 4 + 8) * (self.owed_count + self.count + 1) * 2.0**-23
        arrays = ((self.settled, F32), (self.after, F32), (self.deltas, F32), (self.y, self.type))
        return [Result(array, type, size) for array, type in arrays]

    def compare(self) -> None:
        what = f"{NAMES[self.type]}, {self.rows} rows of {self.D}, {self.owed_count} owed, {self.count} steps"
        whole = self.described(0, self.count, True)
        needed = [table("delta_floats", whole) for table in (self.trial.neon, self.trial.fused)]
        if needed[0] != needed[1]:
            self.trial.fail("gated delta rule", f"{what}: found {needed[0]} floats of scratch, expected {needed[1]}")
        whole.scratch = at(self.scratch)
        results = self.results()
        call = calls("delta", whole)
        got = self.trial.compare("gated delta rule", what, call, results, [self.scratch])
        singles = [self.described(i, 1, i == 0) for i in range(self.count)]
        for one in singles[1:]:
            one.settled = 0
        for one in singles:
            one.scratch = at(self.scratch)

        def step_by_step(table: Table) -> None:
            for one in singles:
                table("delta", one)

        alone = self.trial.run(self.trial.neon, step_by_step, results, [self.scratch]) if singles else got
        for a, b in zip(got, alone, strict=True):
            self.trial.same("gated delta rule", f"{what}, step by step", a, b, len(singles))


def deltas(trial: Trial) -> None:
    for type, rows, D in itertools.product(FLOATS, (1, 4, 8, 11), (3, 8, 20, 128)):
        for owed, steps in ((0, 1), (0, 4), (3, 0), (2, 5), (1, 9)):
            Ruled(trial, rows, D, type, owed, steps).compare()
            trial.room.clear()
    for type in FLOATS:
        for owed, steps in ((MANY, 2), (2, MANY), (MANY, MANY)):
            Ruled(trial, 5, 12, type, owed, steps).compare()
            trial.room.clear()
