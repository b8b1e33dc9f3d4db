"""Attention in its four parts: plain and packed keys and values, masks, windows, few and many rows."""

from __future__ import annotations

import itertools

import numpy as np
from products import Matrix, packed
from table import AT_ONCE, BF16, F16, F32, FLAGS, MASK_BF16, MASK_F16, MASK_F32, NO_MASK, Attention, Stored, Table, at
from trial import Result, Trial, calls
from values import NAMES, STORED, floats, stored

FLOATS = (F32, F16, BF16)
MASKS = {NO_MASK: None, FLAGS: None, MASK_F32: F32, MASK_F16: F16, MASK_BF16: BF16}
KEYS = 45


class Attended:
    """Queries that read the same keys and values; `rows` runs some of them."""

    def __init__(
        self, trial: Trial, rows: int, D: int, value_D: int, type: int, bits: int, group: int, mask: int
    ) -> None:
        self.trial, self.count, self.D, self.value_D, self.mask = trial, rows, D, value_D, mask
        self.type, self.bits, self.group = type, bits, group
        self.q_type, self.y_type = trial.pick(*FLOATS), trial.pick(*FLOATS)
        self.scale = D**-0.5
        self.q_stride = int(trial.pick(1, 2))
        self.q = trial.room.put(stored(trial.normal(rows, D * self.q_stride), self.q_type))
        self.y = trial.room.array((rows, value_D), STORED[self.y_type])
        self.keys, self.key_values = self.entries(D)
        self.values, self.value_values = self.entries(value_D)
        self.first = np.where(trial.random.random(rows) < 0.5, 0, trial.random.integers(0, KEYS // 2, rows))
        self.visible = trial.random.integers(KEYS // 2, KEYS + 1, rows)
        self.masks = self.hidden()
        name = f"{bits} bits" if bits else NAMES[type]
        self.name = f"attention, {name}"
        self.what = f"{NAMES[self.q_type]} to {NAMES[self.y_type]}, {D} and {value_D}, mask {mask}, groups of {group}"

    def entries(self, D: int) -> tuple[Stored, np.ndarray]:
        """Keys or values, and what they are worth."""
        if self.bits:
            matrix: Matrix = packed(self.trial, self.bits, self.group, self.type, KEYS, D)
            w, groups = matrix.weights, D // self.group
            return Stored(w.data, w.row_bytes, w.scales, w.biases, groups, groups), matrix.values
        data = self.trial.room.put(stored(self.trial.normal(KEYS, D), self.type))
        return Stored(at(data), data.strides[0], 0, 0, 0, 0), floats(data, self.type)

    def hidden(self) -> np.ndarray | None:
        """A mask for each row; one row of flags sees nothing."""
        random = self.trial.random
        if self.mask == NO_MASK:
            return None
        shown = random.random((self.count, KEYS)) < 0.7
        if self.mask == FLAGS:
            shown[-1] = False
            return self.trial.room.put(shown.astype("u1"))
        values = np.where(shown, self.trial.normal(self.count, KEYS), np.float32(-np.inf))
        values[:, KEYS // 2 - 1] = 0  # seen by all
        return self.trial.room.put(stored(values, MASKS[self.mask]))

    def bound(self) -> float:
        """Scores miss by their chains' roundings, weights by twice that and their sum's, results likewise."""
        q = np.abs(floats(self.q[:, :: self.q_stride], self.q_type).astype("f8"))
        sizes = (q @ np.abs(self.key_values.astype("f8")).T).max() * self.scale
        score = sizes * (self.D / 4 + 5) * 2.0**-23
        return float(np.abs(self.value_values).max() * (2 * score + (KEYS + 16) * 2.0**-22))

    def described(self, chosen: np.ndarray) -> Attention:
        a = self.trial.room.make(
            Attention, rows=len(chosen), mask_kind=self.mask, mask_stride=1, q_stride=self.q_stride
        )
        for i, r in enumerate(chosen):
            a.q[i], a.y[i] = at(self.q[r]), at(self.y[r])
            a.first[i], a.visible[i] = int(self.first[r]), int(self.visible[r])
            if self.masks is not None:
                a.mask[i] = at(self.masks[r])
        a.count, a.D, a.value_D, a.keys, a.values = KEYS, self.D, self.value_D, self.keys, self.values
        a.bits, a.group, a.q_type, a.type, a.y_type = self.bits, self.group, self.q_type, self.type, self.y_type
        a.scale = self.scale
        return a

    def rows(self, first: int, count: int, alone: bool = False) -> np.ndarray:
        """What NEON gives for some rows, compared unless they are alone."""
        a = self.described(np.arange(first, first + count))
        scratch = self.trial.scratch(self.trial.neon("attention_floats", a))
        a.scratch = at(scratch)
        cut = int(self.trial.pick(8, KEYS))

        def call(table: Table) -> None:
            table("begin", a)
            for begin, end in ((0, cut), (cut, KEYS)):
                if begin < end:
                    table("score", a, begin, end)
            for row in range(0, count, AT_ONCE):
                table("weigh", a, row, min(count, row + AT_ONCE))
            apart = table("gathered_apart", a) if cut < KEYS else self.value_D
            for begin in range(0, self.value_D, apart):
                table("gather", a, 0, count, begin, min(self.value_D, begin + apart))

        result = Result(self.y[first : first + count], self.y_type, self.bound())
        if alone:
            return self.trial.run(self.trial.neon, call, [result], [scratch])[0]
        for name in ("attention_floats", "gathered_apart"):
            self.trial.numbers(self.name, name, calls(name, a))
        return self.trial.compare(self.name, f"{self.what}, {count} rows", call, [result], [scratch])[0]


def attentions(trial: Trial) -> None:
    """Every storage with every mask; rows of a task against the rows alone."""
    plain = itertools.product(FLOATS, ((0, 0, 20, 7), (0, 0, 64, 64)))
    codes = itertools.product(FLOATS, ((b, g, g, 2 * g) for b in (4, 8) for g in (32, 64, 128)))
    for type, (bits, group, D, value_D) in (*plain, *codes):
        for mask in MASKS:
            count = int(trial.pick(1, 5, 8, 9, 32))
            task = Attended(trial, count, D, value_D, type, bits, group, mask)
            got = task.rows(0, count)
            for some in {1, 2, 3, 4, int(trial.pick(5, 7)), count}:
                if some <= count:
                    part = task.rows(count - some, some)
                    trial.same(task.name, f"{task.what}, {some} of {count} rows", part, got[count - some :], some)
            for r in range(count):
                trial.same(task.name, f"{task.what}, row {r}", task.rows(r, 1, alone=True)[0], got[r])
            trial.room.clear()
