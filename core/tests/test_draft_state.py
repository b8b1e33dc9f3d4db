"""A drafter's per-request state as tensors and as a file: what comes back is what was there."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_spec.draft_state import DraftState
from mlx_spec.errors import LoadError, RefusedError
from mlx_spec.state import KVState, Mark, StateGroup


def filled(count: int, rows: list | None = None) -> DraftState:
    group = StateGroup([KVState(), KVState()])
    for i, state in enumerate(group):
        state.update_and_fetch(*(mx.random.normal((1, 2, count, 8), key=mx.random.key(9 * i + j)) for j in (0, 1)))
    return DraftState(group, {"hidden": mx.arange(5.0)[None]}, rows)


@pytest.mark.parametrize("rows", [None, [{"held": 3}]], ids=str)
def test_a_saved_state_comes_back(tmp_path, rows):
    state = DraftState.merge([filled(7, rows), filled(3, rows)])
    state.states.rewind(Mark((2, 3)), [4, 0])
    state.save(tmp_path / "state.safetensors")
    again = DraftState.load(tmp_path / "state.safetensors")
    assert again.states.lengths == (6, 3)
    assert again.rows == state.rows == (rows or [None]) * 2
    assert mx.array_equal(again.carry["hidden"], state.carry["hidden"])
    for mine, theirs in zip(again.states, state.states, strict=True):
        for b, n in enumerate((6, 3)):
            one, other = mine.extract(b).view(), theirs.extract(b).view()
            assert mx.array_equal(one.keys, other.keys) and one.keys.shape[2] == n
            assert mx.array_equal(one.values, other.values)


def test_a_state_without_caches_comes_back(tmp_path):
    DraftState(carry={"last.hidden": mx.ones((1, 2))}).save(tmp_path / "s")
    again = DraftState.load(tmp_path / "s")
    assert again.states is None and list(again.carry) == ["last.hidden"] and again.rows == [None]


def test_rows_that_have_no_form_in_a_file_are_refused(tmp_path):
    with pytest.raises(
        RefusedError,
        match=r"\(Object of type object is not JSON serializable\), expected values of JSON in DraftState\.rows",
    ):
        DraftState(rows=[object()]).save(tmp_path / "s")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_cut_short_is_refused(tmp_path):
    filled(4).save(tmp_path / "s")
    whole = (tmp_path / "s").read_bytes()
    (tmp_path / "s").write_bytes(whole[:-3])
    with pytest.raises(LoadError, match=r"expected \d+ bytes"):
        DraftState.load(tmp_path / "s")
