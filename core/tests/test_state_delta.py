"""DeltaState: what a tape holds and costs, rows of unequal tapes, and what is refused."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_spec.gated_delta import GatedDelta
from mlx_spec.state import DeltaState, StateGroup
from mlx_spec.state.base import Mark
from mlx_spec.testing import GatedDeltas
from mlx_spec.testing.watch import first_difference, saved

feed = GatedDeltas()


def ids(start, count, salt=0):
    return [[(salt * 17 + p * p * 31 + p * 7) % 60 for p in range(start, start + count)]]


def filled(length, salt=0, junk=0):
    """A group that holds `length` positions and was never marked; `junk` more that do not belong to it."""
    group = StateGroup([DeltaState()])
    for start in range(0, length, 8):
        feed(group, mx.array(ids(start, min(8, length - start), salt)))
    if junk:
        group.mark()
        feed(group, mx.array(ids(50, junk, salt + 1)))
    return group


def same(a, b):
    """Both hold the same, mark or no mark."""
    for group in (a, b):
        group.mark()
    return first_difference(saved(a), saved(b)) == ""


def test_a_state_nobody_marked_records_nothing_and_cannot_go_back():
    group = filled(11)
    assert group[0].tape_nbytes == 0
    with pytest.raises(ValueError, match="it holds 11 positions and can return to 11 and later"):
        group.rewind(Mark((9,)), [1])
    assert group.lengths == (11,)


def test_a_tape_is_kilobytes_and_a_new_mark_frees_it():
    group = filled(9)
    before = group.nbytes
    mark = group.mark()
    feed(group, mx.array(ids(9, 4)))
    window = 3 * feed.rows.shape[1]  # before the block; the one after it is a piece of the same array
    assert group[0].tape_nbytes == 4 * (window + 4 * (feed.rows.shape[1] + 2 * 32 + 6 + 6 * 24))  # rows, k, g, delta
    assert group.nbytes == 2 * before - 4 * window + group[0].tape_nbytes
    tape = group[0].tape_nbytes
    group.rewind(mark, [2])
    assert group[0].tape_nbytes == 0 and group.nbytes <= before + tape + 4  # owed: the steps, and how many count
    mx.eval(group[0].recurrent(()), group[0]._live.window)
    assert group.nbytes == before


@pytest.mark.parametrize("keep", [0, 1, 2, 3])
def test_a_rewind_makes_no_array_but_the_count(keep):
    group = filled(5)
    mark = group.mark()
    feed(group, mx.array(ids(5, 3)))
    held = group.arrays()
    group.rewind(mark, [keep])
    new = [array for array in group.arrays() if all(array is not one for one in held)]
    assert [array.tolist() for array in new] == ([[keep]] if keep in (1, 2) else [])


def test_layers_that_keep_the_same_share_the_count():
    group = StateGroup([DeltaState(), DeltaState()])
    mark = group.mark()
    feed(group, mx.array(ids(0, 3)))
    group.rewind(mark, [2])
    assert group[0].owed.keep is group[1].owed.keep


def test_keeping_no_row_gives_back_the_arrays_of_the_mark(monkeypatch):
    group = filled(5)
    mark, held = group.mark(), group[0]._live
    feed(group, mx.array(ids(5, 3)))
    monkeypatch.setattr(GatedDelta, "replay", lambda *_: pytest.fail("replayed"))
    group.rewind(mark, [0])
    assert group[0]._live is held


def test_a_prompt_is_not_recorded_and_ends_the_mark():
    state = DeltaState()
    group = StateGroup([state])
    feed(group, mx.array(ids(0, 4)))
    group.mark()
    feed(group, mx.array(ids(4, 2)))
    joined = state.joined(feed.rows[mx.array(ids(6, 8))], 3)
    tape = state._tape[0]
    state.append(state._live.recurrent, type(tape)(joined, mx.zeros((1, 8, 2, 32)), *tape[2:]), feed.rule, tape=False)
    assert state.tape_nbytes == 0 and state.lengths == (14,)
    with pytest.raises(ValueError, match="can return to 14 and later"):
        state.rewind(Mark((4,)), [2])


def test_rows_with_tapes_of_unequal_length_are_merged_and_taken_back_each_to_its_own():
    groups = [filled(6, 1, junk=5), filled(3, 2), filled(9, 3, junk=2), filled(0, 4, junk=3)]
    together = StateGroup.merge(groups)
    assert together.lengths == (11, 3, 11, 3)
    feed(together, mx.array([ids(20, 2, b)[0] for b in range(4)]))
    together.rewind(Mark((6, 3, 9, 0)), [0, 0, 0, 0])
    for b, length in enumerate((6, 3, 9, 0)):
        assert same(together.extract(b), filled(length, b + 1)), b


def test_rows_picked_from_a_pending_block_can_still_go_back():
    together = StateGroup.merge([filled(6, 1), filled(4, 2), filled(9, 3)])
    mark = together.mark()
    feed(together, mx.array([ids(n, 4, b + 1)[0] for b, n in enumerate(mark.lengths)]))
    picked = together.select([2, 0])
    picked.rewind(Mark((9, 6)), [3, 1])
    for b, (salt, length) in enumerate(((3, 12), (1, 7))):
        assert same(picked.extract(b), filled(length, salt)), b


def test_a_row_that_was_given_nothing_looks_new():
    group = filled(0, junk=3)
    group.rewind(Mark((0,)), [0])
    assert saved(group) == {} == saved(StateGroup([DeltaState()]))


def test_wrong_numbers_of_rows_are_refused():
    group = filled(4)
    with pytest.raises(ValueError, match="state of 1 rows was given 2"):
        feed(group, mx.array([[1], [2]]))
    with pytest.raises(ValueError, match="rewind of 1 rows got 2 marks, 1 keeps"):
        group[0].rewind(Mark((4, 4)), [0])
    with pytest.raises(ValueError, match="cannot merge states of different kinds"):
        DeltaState.merge([])


def test_it_has_no_keys_and_values():
    state = DeltaState(2)
    assert state.make_mask(5) is None and state.offset == 0
    with pytest.raises(TypeError, match="DeltaState holds no K/V to append to"):
        state.update_and_fetch(mx.zeros(1), mx.zeros(1))


def test_a_thousand_rejected_rounds_leave_the_bytes_of_the_prompt():
    group = filled(7)
    expected = saved(filled(7))
    for turn in range(1000):
        mark = group.mark()
        feed(group, mx.array(ids(100 + turn, 4)))
        group.rewind(mark, [0])
    mark = group.mark()
    assert first_difference(saved(group), expected) == ""
