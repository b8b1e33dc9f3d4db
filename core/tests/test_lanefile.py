"""A lane in a file: what was saved between two rounds is what goes on."""

from __future__ import annotations

import mlx.core as mx
import pytest
from pairs import make_pair, tiny_target

from mlx_spec.draft_state import DraftState
from mlx_spec.engine import Engine
from mlx_spec.errors import LoadError, RefusedError
from mlx_spec.lane import Lane
from mlx_spec.lanefile import load_lane, save_lane
from mlx_spec.lookup import PromptLookupDrafter
from mlx_spec.request import Request
from mlx_spec.sampling import Sampling
from mlx_spec.testing.drafters import ScriptedDrafter


def lane_of(drafter=None, lengths=(5, 9)) -> Lane:
    """A lane of two rows, some rounds into their replies."""
    engine = Engine(make_pair(tiny_target("gemma3"), drafter), max_rows=2)
    for n in lengths:
        engine.submit(Request([(3 * i + n) % 200 for i in range(n)], Sampling(), 40, ignore_eos=True, adaptive=False))
    for _ in range(5):
        engine.step()
    lane = engine._advancer.lane
    assert lane is not None and lane.size == 2
    return lane


def scripted() -> ScriptedDrafter:
    return ScriptedDrafter(lambda tokens, k: [1] * k)


def test_a_lane_comes_back(tmp_path):
    lane = lane_of(scripted())
    save_lane(lane, tmp_path / "lane")
    again = load_lane(tmp_path / "lane", lane.target, lane.drafter)
    assert again.tokens == lane.tokens and again.lengths == lane.states.lengths == again.states.lengths
    assert again.anchors.tolist() == [tokens[-1] for tokens in lane.tokens]
    assert again.draft_state.rows == [None, None]
    logits = [one.target.forward(one.anchors[:, None], one.states).logits for one in (lane, again)]
    assert mx.array_equal(*logits)


def test_a_step_under_way_cannot_be_saved(tmp_path):
    lane = lane_of()
    with pytest.raises(ValueError, match=r"holds \(\d+, \d+\) positions of"):
        save_lane(lane, tmp_path / "lane")


def test_a_drafter_whose_objects_have_no_form_in_a_file_is_named(tmp_path):
    lane = lane_of(scripted())
    lane.draft_state.rows = [object(), object()]
    with pytest.raises(
        RefusedError,
        match=r"found rows of object \(Object of type object is not JSON serializable\), expected values of JSON",
    ):
        save_lane(lane, tmp_path / "lane")
    assert not list(tmp_path.glob("lane*"))


def test_a_lane_of_prompt_lookup_says_what_to_do_instead(tmp_path):
    lane = lane_of(scripted())
    lane.draft_state = DraftState.merge([PromptLookupDrafter().make_state() for _ in range(2)])
    with pytest.raises(RefusedError) as caught:
        save_lane(lane, tmp_path / "lane")
    assert caught.value.code == "R02" and "found rows of LookupRow (" in str(caught.value)
    assert "Save the tokens instead and prefill them again" in str(caught.value)
    assert not list(tmp_path.glob("lane*"))


def test_a_damaged_file_is_refused(tmp_path):
    lane = lane_of(scripted())
    save_lane(lane, tmp_path / "lane")
    (tmp_path / "lane").write_bytes((tmp_path / "lane").read_bytes()[:-8])
    with pytest.raises(LoadError, match="saved state"):
        load_lane(tmp_path / "lane", lane.target, None)
