"""Where a block ends: stop ids and the length limit."""

from __future__ import annotations

import itertools

import mlx.core as mx
import pytest

from mlx_spec.accept import RowPlan, RowResult, accept
from mlx_spec.cutting import cut, in_step
from mlx_spec.sampling import Sampling
from mlx_spec.types import Draft, Verdict

STOP = 7


@pytest.mark.parametrize("limit", range(1, 7))
def test_report_45_a_stop_inside_the_limit_wins_and_one_beyond_it_does_not(limit: int) -> None:
    block = [1, 2, STOP, 3, 4]
    verdict = cut(block, {STOP}, limit, accepted=4)
    if limit >= 3:
        assert verdict == Verdict(3, (1, 2, STOP), 3, "stop")
    else:
        assert verdict == Verdict(limit, tuple(block[:limit]), limit, "length")


@pytest.mark.parametrize("place", range(6))
def test_report_43_a_stop_ends_the_block_wherever_it_stands(place: int) -> None:
    block = [STOP if i == place else i + 10 for i in range(6)]
    for stops in ({STOP}, frozenset({99, STOP}), (STOP,)):
        assert cut(block, stops, 100) == Verdict(place + 1, tuple(block[: place + 1]), 0, "stop")
    assert cut(block, {99}, 100) == Verdict(6, tuple(block), 0, "")


def test_keep_counts_the_tokens_and_nothing_passes_the_limit() -> None:
    for length, limit, stop in itertools.product(range(5), range(6), range(6)):
        block = list(range(length))
        verdict = cut(block, {stop}, limit, accepted=max(0, length - 1))
        assert verdict.keep == len(verdict.tokens) <= limit or (limit == 0 and verdict.keep == 0)
        assert verdict.tokens == tuple(block[: verdict.keep]) and verdict.accepted <= verdict.keep
        ended = stop < min(length, limit)
        assert (verdict.reason == "stop") == ended
        assert (verdict.reason == "length") == (not ended and length >= limit)


def test_no_room_at_all_is_length_and_emits_nothing() -> None:
    assert cut([STOP], {STOP}, 0) == Verdict(0, (), 0, "length")
    assert cut([1], {STOP}, -3) == Verdict(0, (), 0, "length")


@pytest.mark.parametrize(("right", "rate"), [(0, 0.0), (2, 0.5), (4, 1.0)])
def test_report_125_acceptance_is_what_was_tested(right: int, rate: float) -> None:
    """WRONG 0 %, MIXED(2) of 4 50 %, ORACLE 100 %; tokens behind a row's count were not drafted."""
    target = [3, 1, 4, 1, 5]
    logits = mx.eye(9)[mx.array([target] * 2)]
    guess = [t if i < right else 8 for i, t in enumerate(target[:4])]
    plan = [RowPlan(Sampling()), RowPlan(Sampling())]
    found = accept(plan, logits, Draft(mx.array([guess, target[:4]]), [4, 2])).read()
    assert found[0].accepted / len(found[0].draft_ids) == rate
    assert (found[1].accepted, found[1].draft_ids) == (2, [3, 1])


def test_rows_in_step_keep_the_fewest_accepted_drafts_and_one_token_more() -> None:
    logprobs = [(token, -0.5, []) for token in (1, 2, 3)]
    long = RowResult([1, 2, 3], 2, [1, 2, 9], error="not finite", logprobs=logprobs)
    short = RowResult([4, 5], 1, [4, 8, 9], draft_fault="id out of range")
    assert in_step([long, short]) == [RowResult([1, 2], 1, [1, 2, 9], logprobs=logprobs[:2]), short]
    failing = RowResult([7], 1, [7, 8], error="not finite")
    assert in_step([failing, long])[0] == failing, "the row that cannot go on is the one that says so"
    assert in_step([long]) == [long] and in_step([]) == []
