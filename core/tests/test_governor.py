"""The governor's rules one by one; how well they work together is in test_governor_simulation."""

from __future__ import annotations

import logging
import math
from itertools import pairwise

import pytest

from mlx_spec.acceptance import AcceptanceEstimate
from mlx_spec.costs import CostModel
from mlx_spec.governor import FixedGovernor, Governor, choose_together
from mlx_spec.pilot import FIRST_WAIT, HOPELESS_WAIT, LONGEST_SPAN, LONGEST_WAIT, PLAIN_FIRST, SOONEST


def model(costs: dict[int, float]) -> CostModel:
    """Saved costs in plain steps, one plain step taking 10 ms; not so old that they are doubted."""
    made = CostModel()
    made._saved = {1: {0: 0.01} | {k: 0.01 * steps for k, steps in costs.items()}}
    made.for_batch(1).untimed = 0.0
    return made


@pytest.mark.parametrize(("waited", "wait"), [(0.0, HOPELESS_WAIT), (100.0, HOPELESS_WAIT - 100), (math.inf, SOONEST)])
def test_the_wait_for_a_probe_runs_on_from_request_to_request(waited, wait):
    governor = Governor(3, model({1: 2.0, 2: 3.0, 3: 4.0}))
    governor.model.for_batch(1).untimed = waited
    steps = 0
    while governor.choose(1000) == 0:
        for _ in range(governor.plain_span()):
            governor.observe(0, 0, 0.01)
            steps += 1
    assert steps == wait


@pytest.mark.parametrize("kmax", [0, 1, 3, 15])
@pytest.mark.parametrize("room", [-1, 0, 1, 2, 7, 40])
def test_k_never_exceeds_the_room_left(kmax, room):
    governor = Governor(kmax, model(dict.fromkeys(range(1, kmax + 1), 1.1)))
    assert governor.choose(room) == max(0, min(kmax, room))
    assert FixedGovernor(kmax).choose(room) == max(0, min(kmax, room))


def test_no_room_means_a_plain_step_and_no_long_span():
    governor = Governor(3, model({1: 1.1, 2: 1.2, 3: 1.3}))
    assert governor.choose(0) == 0
    assert governor.plain_span() == 1


def test_an_unknown_machine_is_measured_plain_first():
    governor = Governor(3)
    assert governor.choose(50) == 0
    span = governor.plain_span()
    assert 2 <= span <= 6
    for seconds in (None, *[0.01] * (span - 1)):
        governor.observe(0, 0, seconds)
    assert governor.choose(50) > 0
    assert governor.plain_steps == span


def plain_until_asked(governor: Governor) -> int:
    """Run plain spans until the governor wants to draft; how many steps that took."""
    steps = 0
    while governor.choose(10_000) == 0:
        span = governor.plain_span()
        assert 1 <= span <= LONGEST_SPAN
        for _ in range(span):
            governor.observe(0, 0, 0.01)
        steps += span
    return steps


def test_waits_double_up_to_the_longest_and_reset_when_a_probe_wins():
    governor = Governor(3, model({1: 1.8, 2: 1.9, 3: 2.0}))
    waits = []
    for _ in range(8):
        while (k := governor.choose(10_000)) > 0:
            governor.observe(k, 0, 0.02)
        waits.append(plain_until_asked(governor))
    assert waits[0] == FIRST_WAIT
    assert all(b in (a, 2 * a) or b > a for a, b in pairwise(waits))
    assert max(waits) <= LONGEST_WAIT
    while governor.parked:
        governor.observe(governor.choose(10_000), 3, 0.02)
    assert governor.choose(10_000) == 3
    while (k := governor.choose(10_000)) > 0:
        governor.observe(k, 0, 0.02)
    assert plain_until_asked(governor) == FIRST_WAIT


def test_a_hopeless_machine_starts_parked_and_still_probes():
    governor = Governor(3, model({1: 2.0, 2: 3.0, 3: 4.0}))
    assert governor.choose(1000) == 0
    assert "parked" in governor.state and "plain steps" in governor.state
    assert f"re-probe in {HOPELESS_WAIT} tokens" in governor.state
    assert plain_until_asked(governor) == HOPELESS_WAIT
    assert governor.choose(1000) >= 1
    assert governor.probes == 1


def test_costs_believed_wrongly_are_found_out_while_parked():
    governor = Governor(3, model({1: 2.0, 2: 3.0, 3: 4.0}))
    assert governor.choose(1000) == 0  # saved costs say no, and they are of a faster machine
    shared = governor.model.for_batch(1)
    shared.saved[0] = 0.001
    shared.saved |= {1: 0.002, 2: 0.003, 3: 0.004}
    for _ in range(3):
        shared.observe(3, 0.012)
    steps = 0
    while governor.choose(1000) == 0:
        for _ in range(governor.plain_span()):
            governor.observe(0, 0, 0.01)
            steps += 1
    assert steps == LONGEST_SPAN < HOPELESS_WAIT


def test_the_first_and_last_step_of_a_span_are_not_timed():
    governor = Governor(3)
    assert governor.choose(50) == 0
    for seconds in (0.03, *[0.01] * (governor.plain_span() - 2), 0.0001):
        governor.observe(0, 0, seconds)
    governor.choose(50)
    assert governor.model.for_batch(1).seconds(0) == 0.01


def test_state_is_readable():
    governor = Governor(3, model({1: 1.2, 2: 1.35, 3: 1.5}))
    assert governor.state == "not started"
    assert governor.choose(1) == 1  # the end of a reply leaves no room for a choice worth reporting
    assert governor.state == "not started"
    for _ in range(20):
        governor.observe(governor.choose(1000), 3, 0.015)
    assert governor.state.startswith("K=3: 2.") and governor.state.endswith("x plain estimated")
    assert governor.speculative_rounds == 20
    assert FixedGovernor(4).state == "K=4: fixed (adaptive off)"
    assert Governor(0).state.startswith("K=0")


def test_an_estimate_that_no_round_of_the_reply_bore_out_is_told_as_such():
    unseen = ", by earlier replies: this one drafted nothing"
    governor = Governor(3, model({1: 1.2, 2: 1.35, 3: 1.5}))
    k = governor.choose(1000)
    assert k and governor.state.endswith(f"x plain estimated{unseen}")
    governor.observe(0, 0, 0.01)  # the drafter had nothing to propose
    assert governor.state.endswith(unseen)
    governor.observe(k, k, 0.015)
    assert governor.state.endswith("x plain estimated")
    parked = Governor(3, model({1: 2.0, 2: 3.0, 3: 4.0}))
    assert parked.choose(1000) == 0
    assert parked.state.startswith("parked: ") and parked.state.endswith(unseen)
    assert " tokens/round expected at K=" in parked.state


def test_a_warm_up_of_ten_times_does_not_park():
    governor = Governor(3)
    chosen = []
    for _ in range(20):
        k = governor.choose(1000)
        span = 1 if k else governor.plain_span()
        for step in range(span):
            chosen.append(k)
            slow = 10 if k and chosen.count(k) == 1 else 1
            governor.observe(k, k, None if step == len(chosen) - 1 == 0 else slow * (0.01 if k == 0 else 0.012))
    assert not governor.parked
    assert chosen[-1] == 3
    assert chosen.count(0) == PLAIN_FIRST


def test_without_any_plain_time_the_prior_decides():
    governor = Governor(3)
    assert governor.choose(100) == 0
    for _ in range(8):
        governor.observe(governor.choose(100), 3, 0.02, width=2)  # a row of fixed width never lets it measure
    assert governor.model.for_batch(1).seconds(0) is None
    assert governor.model.for_batch(1).steps(2) == governor.model.prior.steps(2)


def test_plain_steps_beside_a_drafting_row_say_nothing_about_plain_cost():
    shared = model({1: 1.1, 2: 1.2, 3: 1.3})
    governor = Governor(3, shared)
    costs = shared.for_batch(4)
    governor.set_costs(costs)
    governor.observe(0, 0, 0.5, width=3)
    governor.finish()
    assert costs.count(0) == 0 and costs.count(3) == 1


def test_an_empty_draft_is_not_taken_for_a_plain_step():
    shared = model({1: 1.1, 2: 1.2, 3: 1.3})
    governor = Governor(3, shared)
    assert governor.choose(100) == 3
    governor.observe(0, 0, 0.04)
    assert shared.for_batch(1).count(0) == 0


def test_acceptance_is_conditional_per_depth_and_forgets():
    estimate = AcceptanceEstimate(3)
    for _ in range(200):
        estimate.observe(3, 1)
    first, second, third = estimate.rates
    assert first > 0.95 and second < 0.1
    assert third < 0.2  # never reached: follows the depth before
    assert estimate.expected(3) == pytest.approx(1 + first + first * second + first * second * third)
    assert len(estimate.seen()) == 2
    for _ in range(40):
        estimate.observe(3, 0)
    assert estimate.rates[0] < 0.35


def test_finish_teaches_the_next_request():
    shared = model({1: 1.1, 2: 1.2, 3: 1.3})
    first = Governor(3, shared)
    for _ in range(40):
        first.observe(first.choose(1000), 0, 0.013)
    first.finish()
    assert shared.acceptance and shared.acceptance[0] < 0.3
    assert Governor(3, shared).acceptance.rates[0] < Governor(3, model({})).acceptance.rates[0]


def test_a_draft_shorter_than_asked_counts_as_drafted():
    estimate = AcceptanceEstimate(4)
    for _ in range(50):
        estimate.observe(2, 2)
    assert len(estimate.seen()) == 2
    assert min(estimate.rates[:2]) > 0.9


def test_company_decides_together_and_nobody_exceeds_its_room():
    shared = model({1: 1.1, 2: 1.12, 3: 1.14, 4: 1.16})
    rows = [Governor(4, shared), Governor(2, shared), Governor(4, shared), None]
    assert choose_together(rows, [50, 50, 1, 50]) == [4, 2, 1, 0]
    assert choose_together(rows, [0, 0, 0, 9]) == [0, 0, 0, 0]
    assert choose_together([None, None], [5, 5]) == [0, 0]


def test_a_round_of_a_lane_is_timed_once():
    shared = model({})
    shared._saved = {1: {0: 0.01, 1: 0.011, 2: 0.012}, 3: {0: 0.02, 1: 0.022, 2: 0.024}}
    rows = [Governor(2, shared) for _ in range(3)]
    for row in rows:
        row.set_costs(shared.for_batch(3))
    budget = choose_together(rows, [50, 50, 50])
    assert budget == [2, 2, 2]
    for row, accepted in zip(rows, (2, 0, 1), strict=True):
        row.observe(2, accepted, 0.025, width=2)
    choose_together(rows, [50, 50, 50])
    assert shared.for_batch(3).count(2) == 1
    assert [row.tokens for row in rows] == [3, 1, 2]


def test_a_fixed_row_sets_the_least_width():
    shared = model({1: 2.0, 2: 3.0, 3: 4.0})
    rows = [Governor(3, shared), FixedGovernor(2)]
    assert choose_together(rows, [50, 50]) == [2, 2]
    assert choose_together([rows[0]], [50]) == [0]


def test_a_batch_size_never_seen_is_measured_plainly_first():
    shared = model({1: 1.1, 2: 1.2, 3: 1.3})
    governor = Governor(3, shared)
    assert governor.choose(50) == 3
    governor.set_costs(shared.for_batch(2))
    assert governor.choose(50) == 0
    for _ in range(governor.plain_span()):
        governor.observe(0, 0, 0.02)
    assert governor.choose(50) > 0
    governor.set_costs(shared.for_batch(1))
    assert governor.choose(50) == 3


def test_rows_leave_and_the_rest_goes_on_from_the_same_place():
    shared = model({1: 2.0, 2: 3.0, 3: 4.0})
    rows = [Governor(3, shared) for _ in range(3)]
    assert choose_together(rows, [900] * 3) == [0, 0, 0]
    for _ in range(30):
        for row in rows:
            row.observe(0, 0, 0.01)
    assert choose_together(rows[1:], [900] * 2) == [0, 0]
    assert rows[1].plain_span() == rows[2].plain_span() == LONGEST_SPAN
    assert f"re-probe in {HOPELESS_WAIT - 30} tokens" in rows[1].state == rows[2].state
    assert plain_until_asked(rows[2]) == HOPELESS_WAIT - 30


def test_a_reproducible_row_ignores_its_company():
    shared = model({1: 1.1, 2: 1.2, 3: 1.3})
    loud = [Governor(3, shared) for _ in range(2)]
    mine = Governor(3, shared, reproducible=True)
    mine.set_costs(shared.for_batch(3))
    alone = Governor(3, shared, reproducible=True)
    for drafted in [3, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 3]:  # silences are noticed as if nobody else drafted
        k = alone.choose(50)
        assert choose_together([*loud, mine], [50, 50, 50])[2] == k
        alone.observe(min(drafted, k), 0, 0.01)
        for governor, count in zip([*loud, mine], [3, 3, min(drafted, k)], strict=True):
            governor.observe(count, 0, 0.02, width=3)
    assert mine.tokens == alone.tokens == 16 and "nothing to propose" in alone.state


def test_a_choice_made_ahead_is_what_would_be_chosen_and_serves_one_round():
    governors = [Governor(5, model({k: 1 + 0.02 * k for k in range(1, 6)})) for _ in range(2)]
    for governor in governors:
        assert governor.choose(50) == 5
        governor.observe(5, 3, 0.02)
    assert governors[0].ready(50) is None  # nobody prepared it
    governors[0].prepare()
    governors[0].observe(5, 0, 0.02)  # brought by the round that was under way
    assert governors[0].ready(50) == governors[1].choose(50)
    assert governors[0].ready(50) is None
    governors[0].prepare()
    assert governors[0].ready(4) is None and governors[0].ready(50) is None  # no room for all drafts: choose again
    assert governors[0].acceptance.rates[0] < governors[1].acceptance.rates[0]


def test_plain_steps_and_probes_are_not_decided_ahead():
    losing = Governor(3, model({1: 9.0, 2: 9.0, 3: 9.0}))
    assert losing.choose(50) == 0
    losing.prepare()
    assert losing.ready(50) is None
    follows = Governor(3, model({1: 1.1, 2: 1.1, 3: 1.1}), reproducible=True)
    assert follows.choose(50) == 3
    follows.prepare()
    assert follows.ready(50) is None  # what a round brings has to decide on the next one


def test_nothing_is_logged_while_choosing(caplog):
    with caplog.at_level(logging.DEBUG):
        Governor(3).choose(10)
    assert not caplog.records


@pytest.mark.parametrize(("costs", "most"), [({1: 1.15, 2: 1.25, 3: 1.35}, 4), ({1: 1.05, 2: 1.1, 3: 1.15}, 12)])
def test_a_drafter_that_is_always_wrong_is_parked_in_a_few_rounds(costs, most):
    governor, rounds = Governor(3, model(costs)), 0
    while (k := governor.choose(10_000)) > 0:
        governor.observe(k, 0, 0.01 * costs[k])
        rounds += 1
    assert rounds <= most


def test_refusals_in_a_row_count_for_little_once_something_was_accepted():
    late, never = AcceptanceEstimate(3), AcceptanceEstimate(3)
    late.observe(3, 3)
    for _ in range(4):
        late.observe(3, 0)
        never.observe(3, 0)
    assert never.rates[0] < 0.12 < 0.3 < late.rates[0]
    never.observe(3, 1)  # one draft that holds brings back what was believed before
    assert never.rates[0] > 0.3


def test_a_state_promises_only_what_is_measured():
    fresh = Governor(3)
    for _ in range(PLAIN_FIRST + 1):
        fresh.observe(fresh.choose(1000), 0, 0.01)
    assert fresh.choose(1000) == 1 and fresh.state == "K=1: being measured"

    good = Governor(3, model({1: 1.2, 2: 1.35, 3: 1.5}))
    for _ in range(20):
        good.observe(good.choose(1000), 3, 0.015)
    before = good.state
    good.observe(good.choose(1), 1, 0.012)  # the last tokens of a reply, which leave no room for more
    assert before.startswith("K=3: 2.") and good.state[:7] == before[:7]

    governor = Governor(3, model({1: 1.8, 2: 1.9, 3: 2.0}))
    while (k := governor.choose(1000)) > 0:
        governor.observe(k, 0, 0.02)
    assert governor.state.endswith("x); re-probe in 8 tokens") and "(0." in governor.state
    for _ in range(8):
        governor.observe(0, 0, 0.01)
    assert governor.choose(1000) > 0 and governor.state.endswith("x); probing now")
    for steps in (1, 2, 3):
        governor.model.for_batch(1).saved[steps] = 0.01
        for _ in range(16):
            governor.model.for_batch(1).observe(steps, 0.01)
    assert (
        governor.state.startswith("parked at 0.") and "x at K=" in governor.state and " by now give " in governor.state
    )


def test_a_win_that_rests_on_an_old_plain_cost_is_looked_at_again():
    """Plain steps were timed on a busy machine; short replies that draft throughout find it out together."""
    costs = model({1: 1.0, 2: 1.0, 3: 1.0})
    plain, replies = 0, 0
    while plain == 0 and replies < 60:
        governor, tokens = Governor(3, costs), 0
        while tokens < 100:
            k = governor.choose(100)
            for _ in range(1 if k else governor.plain_span()):
                governor.observe(k, min(k, 2), 0.01 if k else 0.002)
                tokens += min(k, 2) + 1
            plain += k == 0
        governor.finish()
        replies += 1
    assert 10 < replies < 40  # far apart, since it costs something each time
    assert costs.for_batch(1).steps(3) > 2


def test_a_wait_runs_on_into_the_next_request_until_a_probe_wins():
    costs = model({1: 1.8, 2: 1.9, 3: 2.0})
    first = Governor(3, costs)
    for _ in range(4):
        while (k := first.choose(10_000)) > 0:
            first.observe(k, 0, 0.02)
        waited = plain_until_asked(first)
    first.observe(first.choose(10_000), 0, 0.02)
    assert waited > SOONEST
    second = Governor(3, costs)
    for _ in range(30):  # it drafts first, and parks as soon as it has seen as little
        if (k := second.choose(10_000)) == 0:
            break
        second.observe(k, 0, 0.02)
    assert plain_until_asked(second) > 2 * SOONEST
    while second.parked:
        second.observe(second.choose(10_000), 3, 0.02)
    third = Governor(3, costs)
    while (k := third.choose(10_000)) > 0:
        third.observe(k, 0, 0.02)
    assert plain_until_asked(third) == FIRST_WAIT
