"""The assistant: one lane or many, dense or quantised K/V, and what it does when there is nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gemma4_oracles.ours import Ours, greedy_draft, lane_of, open_ref

from mlx_spec.errors import LoadError
from mlx_spec.lane import Lane
from mlx_spec.state import KVView
from mlx_spec_gemma4 import drafter as module
from mlx_spec_gemma4.config import assistant_card
from mlx_spec_gemma4.drafter import Gemma4Drafter

WINDOW = 8
K = 4


def prompt(committed: int, seed: int = 0) -> list[int]:
    """Ids whose last one is the anchor."""
    return [int(t) for t in np.random.default_rng([seed, committed]).integers(7, 300, committed + 1)]


@pytest.mark.parametrize("options", [{"tied": False}, {"quantise": 4}], ids=str)
@pytest.mark.parametrize("lengths", [(3, 12, 21), (WINDOW, WINDOW, WINDOW), (1, WINDOW + 1, 2)], ids=str)
def test_rows_of_a_ragged_lane_draft_as_they_do_alone(loaded: Callable[..., Ours], options: Any, lengths: Any) -> None:
    pair = loaded("E", seed=4, **options)
    prompts = [prompt(n, seed=b) for b, n in enumerate(lengths)]
    tokens, rows = greedy_draft(lane_of(pair.target, pair.drafter, prompts)[0], [K] * 3)
    for b, ids in enumerate(prompts):
        alone, logits = greedy_draft(lane_of(pair.target, pair.drafter, [ids])[0], [K])
        assert tokens[b] == alone[0]
        possible = np.isfinite(logits[:, 0])
        assert np.array_equal(np.isfinite(rows[:, b]), possible)
        assert np.abs(rows[:, b][possible] - logits[:, 0][possible]).max() < 1e-3


def test_rows_have_their_own_budget(loaded: Callable[..., Ours]) -> None:
    pair = loaded("E")
    lane, _ = lane_of(pair.target, pair.drafter, [prompt(5), prompt(9), prompt(14)])
    lane.bind_draw(lambda logits, step: (mx.argmax(logits, axis=-1).astype(mx.int32), None))
    draft = pair.drafter.propose(lane, [2, 0, 3])
    assert draft.tokens.shape == (3, 3)
    assert draft.tokens.dtype == mx.int32
    assert draft.counts == [2, 0, 3]
    assert draft.probs is None


def test_nothing_committed_means_nothing_drafted(loaded: Callable[..., Ours]) -> None:
    pair = loaded("E")
    lane = Lane(pair.target, pair.drafter, pair.target.make_states(), pair.drafter.make_state())
    lane.tokens, lane.anchors = [[9]], mx.array([9], dtype=mx.int32)
    draft = pair.drafter.propose(lane, [K])
    assert draft.tokens.shape == (1, 0)
    assert draft.counts == [0]


def test_a_row_that_just_began_does_not_disturb_the_others(loaded: Callable[..., Ours]) -> None:
    pair = loaded("E")
    lane, _ = lane_of(pair.target, pair.drafter, [prompt(12)])
    alone, _ = greedy_draft(lane, [K])
    fresh = pair.target.make_states()
    both = Lane(pair.target, pair.drafter, type(fresh).merge([lane.states, fresh]), pair.drafter.make_state())
    both.tokens = [lane.tokens[0], [9]]
    both.anchors = mx.array([lane.tokens[0][-1], 9], dtype=mx.int32)
    both.fresh = lane.fresh
    hidden = lane.fresh[0].taps["hidden"]
    both.fresh[0].taps["hidden"] = mx.concatenate([hidden, mx.zeros_like(hidden)])
    both.fresh[0].keep = [1, 0]
    draws = []

    def draw(logits: mx.array, step: int) -> tuple[mx.array, None]:
        draws.append(logits)
        return mx.argmax(logits, axis=-1).astype(mx.int32), None

    both.bind_draw(draw)
    draft = pair.drafter.propose(both, [K, K])
    assert draft.counts == [K, 0]
    assert draft.tokens[0].tolist() == alone[0]
    assert mx.isfinite(mx.stack(draws)).all()


class Unpacked:
    """A state whose view holds the same K/V, dequantised."""

    def __init__(self, state: Any):
        self.state = state

    def view(self) -> KVView:
        view = self.state.view()
        if view.bits is None:
            return view
        keys, values = (mx.dequantize(*part, view.group_size, view.bits) for part in (view.keys, view.values))
        return KVView(keys, values, view.origin, view.lengths)


@pytest.mark.parametrize("lengths", [(13,), (5, WINDOW + 6)], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_kv_is_read_as_if_it_were_unpacked(loaded: Callable[..., Ours], bits: int, lengths: Any) -> None:
    pair = loaded("E", seed=4)
    prompts = [prompt(n) for n in lengths]
    lane, _ = lane_of(pair.target, pair.drafter, prompts, kv_bits=bits, kv_group_size=32)
    assert lane.states[pair.drafter.sources["full_attention"]].view().bits == bits
    tokens, rows = greedy_draft(lane, [K] * len(prompts))
    lane.states = [Unpacked(state) for state in lane.states]
    expected, others = greedy_draft(lane, [K] * len(prompts))
    assert tokens == expected
    assert np.abs(rows - others).max() < 1e-3


def test_centroid_head_leaves_other_tokens_impossible(loaded: Callable[..., Ours]) -> None:
    pair = loaded("E", ordered=True)
    _, rows = greedy_draft(lane_of(pair.target, pair.drafter, [prompt(9)])[0], [K])
    possible = np.isfinite(rows).sum(axis=-1)
    assert (possible == pair.target.vocab_size * 4 // 16).all()  # 4 of 16 centroids
    assert (rows[~np.isfinite(rows)] == -np.inf).all()


def test_every_step_of_a_block_stands_at_one_position(
    loaded: Callable[..., Ours], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = loaded("E", seed=4)
    lane, _ = lane_of(pair.target, pair.drafter, [prompt(12)])
    step = pair.drafter.stepper(lane)
    hidden = lane.last_tap("hidden")
    one, _ = step(lane.anchors, hidden)
    again, _ = step(lane.anchors, hidden)
    assert mx.array_equal(one, again)
    monkeypatch.setattr(module, "POSITION_SHIFT", 0)
    other, _ = pair.drafter.stepper(lane)(lane.anchors, hidden)
    assert not mx.allclose(one, other, rtol=0, atol=1e-3)  # the position matters, and is read from one place


def test_bfloat16_drafter_on_a_float32_target(loaded: Callable[..., Ours], pair_dirs: Any) -> None:
    pair = loaded("E", seed=4)
    expected, _ = greedy_draft(lane_of(pair.target, pair.drafter, [prompt(12)])[0], [1])
    ref = open_ref(pair_dirs("E", seed=4, dtype="bfloat16")[1])
    drafter = Gemma4Drafter.load(ref, assistant_card(ref), pair.target)
    tokens, rows = greedy_draft(lane_of(pair.target, drafter, [prompt(12)])[0], [1])
    assert tokens == expected
    assert np.isfinite(rows).all()


def test_weights_cast_after_the_first_draft_are_the_ones_used(pair_dirs: Any) -> None:
    pair = Ours(*pair_dirs("E", seed=4))
    lane, _ = lane_of(pair.target, pair.drafter, [prompt(12)])
    _, before = greedy_draft(lane, [1])
    pair.drafter.model.set_dtype(mx.bfloat16)
    _, after = greedy_draft(lane, [1])
    assert 0 < np.abs(before - after).max() < 0.5


def test_a_target_of_another_family_is_refused(pair_dirs: Any) -> None:
    class Other:
        model_type = "llama"

    ref = open_ref(pair_dirs("E")[1])
    with pytest.raises(LoadError, match=r"a target of model_type 'llama', expected a Gemma 4 target"):
        Gemma4Drafter.load(ref, assistant_card(ref), Other())
