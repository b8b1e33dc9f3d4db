"""What every comparison does: a call by three tables on the same bytes, and what is counted of it."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from table import F32, Room, Table
from values import ULP, alike, floats, share

FILL = 0x5C  # what results hold before a call


@dataclass
class Count:
    """One line of the report."""

    group: str
    reference: str  # what has to give the same bytes
    cases: int = 0
    values: int = 0
    rows: int = 0  # compared with the same rows alone
    exact: bool = True  # whether the portable table has to give the same bytes
    portable: float = 0.0  # the largest part of its bound that a difference takes
    failures: list[str] = field(default_factory=list)

    def line(self) -> str:
        parts = [f"{self.cases} cases", f"{self.values} values as {self.reference} gives them"]
        parts.append("as the portable one does" if self.exact else f"portable within {self.portable:.2f} of the bound")
        if self.rows:
            parts.append(f"{self.rows} rows as alone")
        state = f"{len(self.failures)} DIFFERENCES" if self.failures else "ok"
        return f"{self.group:<24} {state}: {', '.join(parts)}"


@dataclass
class Result:
    """Part of what a call writes."""

    array: np.ndarray
    type: int = F32
    bound: np.ndarray | float | None = None  # of the difference to the portable table; none for bytes
    one_nan: bool = False  # whether any NaN has the bytes of every other


class Trial:
    """Three tables, memory that all of them see, and random numbers.

    `fused` is the one that has to give the same bytes as NEON's, `portable` the one that may differ by roundings.
    All of them round rows to `form`.
    """

    def __init__(
        self,
        neon: Table,
        fused: Table,
        portable: Table,
        room: Room,
        reference: str = "the fused table",
        form: str = "full",
    ) -> None:
        self.neon, self.fused, self.portable, self.room, self.reference = neon, fused, portable, room, reference
        self.tables = neon, fused, portable
        self.form = form
        self.random = np.random.default_rng(20)
        self.counts: dict[str, Count] = {}

    def count(self, group: str) -> Count:
        return self.counts.setdefault(group, Count(group, self.reference))

    def pick(self, *values: object) -> object:
        return values[self.random.integers(len(values))]

    def normal(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape, "f4")

    def scratch(self, count: int) -> np.ndarray:
        return self.room.array(max(count, 1), "f4")

    def run(
        self, table: Table, call: Callable[[Table], object], results: list[Result], free: list[np.ndarray]
    ) -> list[np.ndarray]:
        """What a table gives; whatever is neither a result nor free to write has to stay."""
        for result in results:
            result.array.view(np.uint8)[...] = FILL
        before = self.room.bytes[: self.room.used].copy()
        call(table)
        changed = self.room.bytes[: self.room.used] != before
        for array in [*(r.array for r in results), *free]:
            start = array.ctypes.data - self.room.address
            changed[start : start + array.nbytes] = False
        if changed.any():
            raise SystemExit(f"{table.name}: found {changed.sum()} bytes written beside its results, expected none.")
        return [result.array.copy() for result in results]

    def compare(
        self, group: str, what: str, call: Callable[[Table], object], results: list[Result], free: list[np.ndarray] = ()
    ) -> list[np.ndarray]:
        """Compares what the three tables give, and returns what NEON's gave."""
        count = self.count(group)
        got = self.run(self.neon, call, results, list(free))
        fused = self.run(self.fused, call, results, list(free))
        portable = self.run(self.portable, call, results, list(free))
        count.cases += 1
        for i, result in enumerate(results):
            count.values += got[i].size
            if not alike(got[i], fused[i], result.type, result.one_nan):
                self.fail(group, f"{what}, result {i}: {difference(got[i], fused[i], result.type)}")
            if result.bound is None:
                if not alike(got[i], portable[i], result.type, result.one_nan):
                    self.fail(group, f"{what}, result {i}, portable: {difference(got[i], portable[i], result.type)}")
                continue
            count.exact = False
            wanted = floats(portable[i], result.type)
            bound = (
                np.asarray(result.bound, "f8")
                + ULP[result.type] * np.abs(np.nan_to_num(wanted.astype("f8")))
                + 2.0**-24
            )
            part = share(floats(got[i], result.type), wanted, bound)
            count.portable = max(count.portable, part)
            if part > 1:
                self.fail(group, f"{what}, result {i}, portable: {part:.2f} of the bound")
        return got

    def numbers(
        self, group: str, what: str, call: Callable[[Table], float | int | bool], bound: float | None = None
    ) -> None:
        """The same for a number that is returned."""
        place = self.room.array(1, "f4")
        if bound is None:
            given = [call(table) for table in self.tables]
            if isinstance(given[0], int):
                self.count(group).values += 1
                if given != [given[0]] * 3:
                    self.fail(group, f"{what}: found {given[0]}, expected {given[1]}, portable {given[2]}")
                return

        def store(table: Table) -> None:
            place[0] = c.c_float(call(table)).value

        self.compare(group, what, store, [Result(place, F32, bound)])

    def same(self, group: str, what: str, got: np.ndarray, want: np.ndarray, rows: int = 1) -> None:
        """Bytes that have to be those of rows computed alone."""
        self.count(group).rows += rows
        if got.tobytes() != want.tobytes():
            self.fail(group, f"{what}: found other bytes than those of the row alone")

    def check(self, group: str, what: str, got: np.ndarray, want: np.ndarray, bound: np.ndarray) -> None:
        """Values against exact ones."""
        part = share(got, want, bound)
        if part > 1:
            self.fail(
                group, f"{what}: found {part:.2f} times the difference from exact values that is expected at most"
            )

    def fail(self, group: str, what: str) -> None:
        self.count(group).failures.append(what)


def calls(name: str, *arguments: object) -> Callable[[Table], int | float | None]:
    """A call of one kernel, by any table."""
    return lambda table: table(name, *arguments)


def difference(got: np.ndarray, want: np.ndarray, type: int) -> str:
    """The first one, in words."""
    a, b = got.reshape(-1), want.reshape(-1)
    kind = "u4" if type == F32 else "u2"
    i = int(np.flatnonzero(a.view(kind) != b.view(kind))[0])
    return f"element {i} of {a.size}: found {floats(a, type)[i]!r}, expected {floats(b, type)[i]!r}"
