"""StateContract: going back to a mark leaves exactly what running only the kept rows would have left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import mlx.core as mx
import pytest

from ...state import StateGroup
from ...state.base import Mark, State
from ..compare import close, largest_gap
from ..faults import broken, require
from ..feed import Feed, Forward
from ..watch import first_difference, same_bytes, saved
from .base import Contract, needs

if TYPE_CHECKING:
    from ...models import Target

WIDTHS = (1, 2, 4, 7)  # rows L of the block that is taken back
REWIND = "rewind(mark, keep), and whatever your state overwrites in place during a block"
MakeState = Callable[[], Any]


class StateContract(Contract):
    """What the engine relies on in a state. Fixtures: `make_state`, and `feed` when it is no target's.

    Attributes:
        batch_level: "bitwise" when a row of a batch gets the bytes it gets alone, "close" when rounding differs.
        lengths: positions held before the block; windowed states are also tried around and past the window.
    """

    batch_level: ClassVar[str] = "close"
    lengths: ClassVar[tuple[int, ...]] = (0, 1, 5, 17)

    @pytest.fixture
    def make_state(self, target: Target) -> MakeState:
        """Makes an empty state for one row: a State or a StateGroup. Default: the target's own."""
        return target.make_states

    @pytest.fixture
    def feed(self, target: Target) -> Feed:
        """Appends tokens (B, L) to a group of states and returns what comes out. Default: target.forward."""
        return Forward(target)

    @pytest.fixture
    def bench(self, make_state: MakeState, feed: Feed, seed: int) -> Bench:
        """The state on the bench."""
        return Bench(make_state, feed, seed, type(self))

    def test_it_starts_empty_and_grows_by_what_it_is_fed(self, bench: Bench) -> None:
        """Lengths count positions; two new states share nothing; bytes are counted."""
        states, other = bench.new(), bench.new()
        require(
            states.lengths == (0,),
            bench.name,
            found=f"lengths {states.lengths} when new",
            expected="(0,)",
            look="the constructor: one row, nothing held",
        )
        bench.run(states, 5)
        bench.expect_lengths(states, (5,), "after 5 tokens")
        bench.expect_lengths(other, (0,), "of another new state meanwhile")
        require(states.nbytes > 0, f"{bench.name}.nbytes", found=states.nbytes, expected="bytes held", look="nbytes")

    @pytest.mark.parametrize("width", WIDTHS, ids=lambda n: f"L{n}")
    def test_rewind_equals_running_only_the_kept_rows(self, bench: Bench, width: int) -> None:
        """Every keep from 0 to L: what is held, and what comes out next, has the same bytes."""
        lengths = bench.lengths(self.declares("window"))
        for length in lengths[WIDTHS.index(width) % 2 :: 2]:
            for keep in range(width + 1):
                taken = bench.filled(length)
                mark = taken.mark()
                bench.run(taken, width, keep)
                bench.rewind(taken, mark, [keep])
                only = bench.filled(length)
                if keep:
                    bench.run(only, keep)
                what = f"{bench.name} rewound to keep {keep} of {width} rows after {length}"
                bench.expect_same(taken, only, what, self.level)

    def test_what_was_rejected_leaves_no_trace(self, bench: Bench) -> None:
        """Two blocks with the same kept and different rejected rows, taken back, are the same state."""
        for length in bench.lengths(self.declares("window")):
            pair = []
            for junk in (0, 1):
                states = bench.filled(length)
                mark = states.mark()
                bench.run(states, 5, 2, junk)
                bench.rewind(states, mark, [2])
                pair.append(states)
            bench.expect_same(
                pair[0], pair[1], f"{bench.name} after two blocks that differ in rejected rows only", "bitwise"
            )

    def test_rounds_in_a_row_equal_one_run(self, bench: Bench) -> None:
        """Ten rounds of mark, block and rewind with changing keep, against the kept tokens alone."""
        taken, only = bench.filled(3), bench.filled(3)
        for turn in range(10):
            width, keep = 2 + turn % 4, turn % 3
            mark = taken.mark()
            bench.run(taken, width, keep)
            bench.rewind(taken, mark, [keep])
            if keep:
                bench.run(only, keep)
        bench.expect_same(taken, only, f"{bench.name} after ten rounds", self.level)

    def test_several_blocks_after_one_mark_are_taken_back(self, bench: Bench) -> None:
        """Three appends after a mark, as a drafter makes them: any number of their rows can be kept."""
        for length in bench.lengths(self.declares("window")):
            for keep in range(7):
                taken = bench.filled(length)
                mark = taken.mark()
                for first, width in ((0, 3), (3, 1), (4, 2)):
                    bench.run(taken, width, max(0, min(width, keep - first)))
                bench.rewind(taken, mark, [keep])
                only = bench.filled(length)
                if keep:
                    bench.run(only, keep)
                what = f"{bench.name} of {length} rows after three blocks, rewound to keep {keep} of their 6 rows"
                bench.expect_same(taken, only, what, self.level)

    def test_a_rewind_that_cannot_be_done_changes_nothing(self, bench: Bench) -> None:
        """keep outside 0..L is a ValueError, and the state is as it was."""
        for keep in (-1, 5):
            states = bench.filled(5)
            mark = states.mark()
            bench.run(states, 4)
            try:
                states.rewind(mark, [keep])
            except ValueError:  # as the contract asks
                bench.expect_lengths(states, (9,), f"after a refused rewind to keep {keep} of 4 rows")
                continue
            broken(
                f"{bench.name}.rewind to keep {keep} of 4 rows",
                found=f"no error, lengths {states.lengths}",
                expected="a ValueError",
                look="rewind and check_rewind: 0 <= keep <= rows appended since the mark",
            )

    def test_save_and_load_keep_everything(self, bench: Bench, tmp_path: Path) -> None:
        """Saved before a block, and between a block and its rewind: the loaded state goes on as the first one."""
        for length in bench.lengths(self.declares("window")):
            for late in (False, True):
                states, only = bench.filled(length), bench.filled(length)
                if not late:
                    states = bench.reloaded(states, tmp_path)
                mark = states.mark()
                bench.run(states, 4, 2)
                if late:
                    states = bench.reloaded(states, tmp_path)
                bench.rewind(states, mark, [2])
                bench.run(only, 2)
                when = "between a block and its rewind" if late else "before a block"
                bench.expect_same(states, only, f"{bench.name} of {length} rows, saved and loaded {when}", self.level)

    def test_a_copy_shares_nothing(self, bench: Bench) -> None:
        """What is done to an extracted row does not reach the state it came from."""
        states = bench.filled(6)
        before = saved(states)
        copy = states.extract(0)
        mark = copy.mark()
        bench.run(copy, 4, 4, 1)
        bench.rewind(copy, mark, [1])
        where = first_difference(before, saved(states))
        require(
            not where,
            f"{bench.name} after its extracted copy was used",
            found=f"a difference: {where}",
            expected="no change",
            look="extract(row): the copy may share no array that is written in place",
        )

    @needs("batch")
    def test_rows_of_a_batch_are_taken_back_one_by_one(self, bench: Bench) -> None:
        """Three rows of unequal length keep 0, 2 and 4 of one block: each is what it would be alone."""
        lengths = bench.lengths(self.declares("window"))[-3:]
        keeps = [0, 4, 2]
        together = StateGroup.merge([bench.filled(n, row=b) for b, n in enumerate(lengths)])
        mark = together.mark()
        bench.run_rows(together, 4, keeps)
        bench.rewind(together, mark, keeps)
        for b, (length, keep) in enumerate(zip(lengths, keeps, strict=True)):
            alone = bench.filled(length, row=b)
            if keep:
                bench.run(alone, keep, row=b)
            what = f"row {b} of a batch of {bench.name}, {length} rows and {keep} of 4 kept"
            bench.expect_same(together.extract(b), alone, what, self.batch_level)

    @needs("batch")
    def test_rows_can_be_selected_and_merged_again(self, bench: Bench) -> None:
        """select keeps the rows asked for in that order, merge puts them together again; bytes are kept."""
        lengths = (4, 9, 6)
        rows = [bench.filled(n, row=b) for b, n in enumerate(lengths)]
        together = StateGroup.merge([r.extract(0) for r in rows])
        picked = together.select([2, 0])
        bench.expect_lengths(picked, (6, 4), "after select([2, 0])")
        again = StateGroup.merge([picked.extract(1), together.extract(1), picked.extract(0)])
        for b in range(3):
            where = first_difference(marked(again.extract(b)), marked(rows[b]))
            require(
                not where,
                f"row {b} of {bench.name} after select and merge",
                found=f"a difference: {where}",
                expected="the same bytes",
                look="select, merge and extract: rows keep their order, their length and what they hold",
            )

    @needs("recurrent", "conv")
    def test_it_does_not_grow(self, bench: Bench) -> None:
        """A state of fixed size holds as many bytes after 100 rounds as after one."""
        states, sizes = bench.filled(2), []
        for turn in range(100):
            mark = states.mark()
            bench.run(states, 3, turn % 3)
            bench.rewind(states, mark, [turn % 3])
            states.mark()
            mx.eval(states.arrays())
            sizes.append(states.nbytes)
        require(
            sizes[-1] <= 2 * sizes[4],
            f"{bench.name}.nbytes after 100 rounds",
            found=f"{sizes[-1]}, from {sizes[4]} after 5",
            expected="a size that does not follow the length",
            look="the tape that is kept for rewind: a new mark frees the old one",
        )


class Bench:
    """Makes, fills and compares states of one kind; token ids are seeded per row."""

    def __init__(self, make_state: MakeState, feed: Feed, seed: int, contract: type[StateContract]):
        self.make_state, self.feed, self.seed, self.contract = make_state, feed, seed, contract
        sample = self.new()
        self.window = max((w for s in sample if isinstance(w := getattr(s, "window", None), int)), default=0)
        self.name = type(sample[0]).__name__ if len({type(s) for s in sample}) == 1 else "state group"

    def new(self) -> StateGroup:
        """An empty state as a group."""
        made = self.make_state()
        return made if isinstance(made, StateGroup) else StateGroup([made])

    def lengths(self, windowed: bool) -> list[int]:
        """Positions held before a block."""
        w = self.window
        more = (w - 1, w, w + 1, 3 * w + 2) if windowed and w else ()
        return list(dict.fromkeys([*self.contract.lengths, *more]))

    def ids(self, start: int, count: int, row: int = 0, junk: int = -1) -> list[int]:
        """Seeded ids of positions start.., the same whenever they are asked for; `junk` gives others."""
        salt = 1 + self.seed + 31 * row + 977 * (junk + 1)
        vocab: int = getattr(self.feed, "vocab_size", 64)
        return [
            (salt * 7919 + 104729 * (p + 1) * salt + p * p * 31) % (vocab - 8) + 7 for p in range(start, start + count)
        ]

    def filled(self, length: int, row: int = 0) -> StateGroup:
        """A state that holds `length` positions, fed in chunks of 8 as a prompt would be."""
        states = self.new()
        for start in range(0, length, 8):
            self._feed(states, [self.ids(start, min(8, length - start), row)])
        return states

    def run(self, states: StateGroup, width: int, right: int | None = None, junk: int = 0, row: int = 0) -> None:
        """One block of `width` rows, of which the first `right` (default all) are the row's own tokens."""
        start = states.lengths[0]
        right = width if right is None else right
        self._feed(states, [self.ids(start, right, row) + self.ids(start + right, width - right, row, junk)])

    def run_rows(self, states: StateGroup, width: int, rights: list[int]) -> None:
        """One block over several rows, right for rights[b] tokens of row b."""
        block = [
            self.ids(n, r, b) + self.ids(n + r, width - r, b, 0)
            for b, (n, r) in enumerate(zip(states.lengths, rights, strict=True))
        ]
        self._feed(states, block)

    def rewind(self, states: StateGroup, mark: Mark, keep: list[int]) -> None:
        """Take the state back; whatever goes wrong is a broken contract."""
        wanted = tuple(n + k for n, k in zip(mark.lengths, keep, strict=True))
        try:
            states.rewind(mark, keep)
        except Exception as error:  # the author's code: what it raised is what is reported
            broken(
                f"{self.name}.rewind of rows at {mark.lengths} to keep {keep}",
                found=f"{type(error).__name__}: {error}",
                expected=f"lengths {wanted}",
                look=REWIND,
            )
        self.expect_lengths(states, wanted, f"rewound to keep {keep} after {mark.lengths}")

    def _feed(self, states: StateGroup, block: list[list[int]]) -> mx.array:
        out = self.feed(states, mx.array(block, dtype=mx.int32))
        mx.eval(out, states.arrays())
        return out

    def reloaded(self, states: StateGroup, folder: Path) -> StateGroup:
        """The state after a way through a file."""
        states.save(folder / "state.safetensors")
        return StateGroup.load(folder / "state.safetensors")

    # -- expectations ------------------------------------------------------------------------------------

    def expect_lengths(self, states: StateGroup, wanted: tuple[int, ...], when: str) -> None:
        """Every layer holds `wanted` positions."""
        for i, state in enumerate(states):
            require(
                state.lengths == wanted,
                f"lengths of {type(state).__name__} in layer {i}, {when}",
                found=state.lengths,
                expected=wanted,
                look=REWIND,
            )

    def expect_same(self, a: StateGroup, b: StateGroup, what: str, level: str) -> None:
        """Both hold the same, and give the same when they go on."""
        where = differs(marked(a), marked(b), level)
        kinds = ", ".join(f"{i}: {type(s).__name__}" for i, s in enumerate(a))
        require(
            not where, what, found=f"a difference: {where}", expected=_wanted(level), look=f"{REWIND} (layers {kinds})"
        )
        start = a.lengths[0]
        for step in range(2):
            token = [self.ids(start + step, 1, junk=5)]
            left, right = self._feed(a, token), self._feed(b, token)
            good = same_bytes(left, right) if level == "bitwise" else close(left, right)
            require(
                good,
                f"{what}: what comes out {step + 1} tokens later",
                found=f"a largest difference of {largest_gap(left, right):.3g}",
                expected=_wanted(level),
                look=f"{REWIND}; and the mask or offset given out afterwards",
            )


def marked(states: StateGroup) -> dict[str, mx.array]:
    """What a state saves right after a mark, when nothing before it can be asked for any more."""
    states.mark()
    return saved(states)


def differs(a: dict[str, mx.array], b: dict[str, mx.array], level: str) -> str:
    """Where two saved states differ, "" when they do not; below "bitwise" rounding is no difference."""
    if level == "bitwise":
        return first_difference(a, b)
    return next(_gaps(a, b), "")


def _gaps(a: dict[str, mx.array], b: dict[str, mx.array]) -> Iterator[str]:
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b or a[name].shape != b[name].shape:
            yield f"tensor {name!r} of another shape"
        elif mx.issubdtype(a[name].dtype, mx.floating) and not close(a[name], b[name]):
            yield f"tensor {name!r}, largest difference {largest_gap(a[name], b[name]):.3g}"


def _wanted(level: str) -> str:
    return "the same bytes" if level == "bitwise" else "the same but for rounding"


__all__ = ["Mark", "State", "StateContract"]
