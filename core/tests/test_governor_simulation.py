"""The governor against synthetic machines and texts: what share of the best possible speed it keeps."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from mlx_spec.costs import CostModel
from mlx_spec.governor import FixedGovernor, Governor, choose_together

PLAIN_SECONDS = 0.02


@dataclass
class Machine:
    """Rounds that cost `steps(k)` plain steps, with noise, spikes, slow rounds first at a K, `cold` ones at first."""

    steps: Callable[[int], float]
    noise: float = 0.1
    spikes: float = 0.03
    warm_up: float = 1.0
    seed: int = 0
    speed: float = 1.0
    cold: int = 0
    ran: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def seconds(self, k: int) -> tuple[float, float]:
        """(what a clock shows, what an undisturbed round takes)."""
        clean = PLAIN_SECONDS * self.speed * (1.0 if k == 0 else self.steps(k))
        shown = clean * self.rng.lognormvariate(0, self.noise)
        if self.rng.random() < self.spikes:
            shown *= self.rng.uniform(2, 5)
        if self.cold > 0:
            self.cold -= 1
            shown *= 2
        if k not in self.ran:
            self.ran.add(k)
            shown *= self.warm_up
        return shown, clean


def rate_for(tokens_per_round: float, k: int) -> float:
    """Acceptance per depth at which rounds of k drafts commit that many tokens on average."""
    low, high = 0.0, 1.0
    for _ in range(60):
        mid = (low + high) / 2
        total = sum(mid**i for i in range(k + 1))
        low, high = (mid, high) if total < tokens_per_round else (low, mid)
    return low


@dataclass
class Run:
    """What a simulated reply took."""

    tokens: int
    steps: float  # undisturbed time in plain steps
    chosen: list[tuple[int, int]]  # (token index, K)

    @property
    def speed(self) -> float:
        """Against plain decoding."""
        return self.tokens / self.steps


def simulate(
    governor, machine: Machine, rate: Callable[[int], float], length: int, seed: int = 0, ahead: bool = False
) -> Run:
    """Drive a governor the way the engine does: choose, a round or a span of plain steps, observe.

    ahead: as for a row alone, decide on the next round before this one is over.
    """
    rng = random.Random(1000 + seed)
    done, elapsed, chosen, first = 0, 0.0, [], True
    while done < length:
        room = length - done - 1
        ready = governor.ready(room) if ahead else None
        k = governor.choose(room) if ready is None else ready
        assert 0 <= k <= room or k == 0
        if ahead and k:
            governor.prepare()
        span = 1 if k else min(governor.plain_span(), length - done)
        for step in range(span):
            shown, clean = machine.seconds(k)
            if k == 0:  # steps overlap: the first one of a span shows two builds, the last one none
                shown *= 1.5 if step == 0 else 0.05 if step == span - 1 else 1.0
            accepted = 0
            while accepted < k and rng.random() < rate(done + accepted):
                accepted += 1
            governor.observe(k, accepted, None if first else shown)
            first = False
            chosen.append((done, k))
            elapsed += clean
            done += accepted + 1
    governor.finish()
    return Run(done, elapsed / PLAIN_SECONDS, chosen)


def best_fixed(steps: Callable[[int], float], rate: float, kmax: int) -> float:
    """Speed of the best fixed K in 0..kmax."""
    return max([1.0] + [sum(rate**i for i in range(k + 1)) / steps(k) for k in range(1, kmax + 1)])


def tuned(steps: Callable[[int], float], kmax: int) -> CostModel:
    """A cost model as saved by earlier runs on this machine."""
    model = CostModel()
    model._saved = {1: {k: PLAIN_SECONDS * (steps(k) if k else 1.0) for k in range(kmax + 1)}}
    return model


def linear(at3: float) -> Callable[[int], float]:
    """Costs that grow evenly from one plain step to `at3` plain steps at K = 3."""
    return lambda k: 1 + (at3 - 1) * k / 3


def jump(k: int) -> float:
    """A machine where any verify of several rows is dear, whatever their number."""
    return 3 + k / 3


LOSING = [
    ("linear-4", linear(4), 3.0),
    ("linear-4", linear(4), 1.1),
    ("jump-4", jump, 3.0),
    ("linear-3", linear(3), 2.1),
]


@pytest.mark.parametrize(("name", "steps", "tokens"), LOSING, ids=[f"{n}-{t}" for n, _, t in LOSING])
def test_the_cold_first_steps_of_a_process_are_not_taken_for_what_plain_decoding_costs(name, steps, tokens):
    """Three steps at half the speed open the first of three short replies; a pair that loses must not draft on."""

    def run(seed: int) -> float:
        model, machine, done, spent = CostModel(), Machine(steps, seed=seed), 0, 0.0
        machine.cold = 3
        for reply in range(3):
            out = simulate(Governor(3, model), machine, lambda i: rate_for(tokens, 3), 96, 10 * seed + reply)
            done, spent = done + out.tokens, spent + out.steps
        return done / spent

    assert statistics.fmean(run(seed) for seed in range(20)) > 0.94


@pytest.mark.parametrize(("name", "steps", "tokens"), LOSING, ids=[f"{n}-{t}" for n, _, t in LOSING])
@pytest.mark.parametrize("saved", [False, True], ids=["cold", "saved"])
@pytest.mark.parametrize("ahead", [False, True], ids=["late", "ahead"])
def test_a_losing_pair_costs_little(name, steps, tokens, saved, ahead):
    rate = rate_for(tokens, 3)

    def run(seed: int) -> Run:
        model = tuned(steps, 3) if saved else CostModel()
        return simulate(Governor(3, model), Machine(steps, seed=seed), lambda i: rate, 500, seed, ahead)

    runs = [run(s) for s in range(24)]
    assert mean_of(runs) >= (0.98 if saved else 0.97)
    assert min(r.speed for r in runs) >= (0.97 if saved else 0.95)


def mean_of(runs: Sequence[Run]) -> float:
    """Speed over several runs, total over total."""
    return sum(r.tokens for r in runs) / sum(r.steps for r in runs)


@pytest.mark.parametrize("warm_up", [1.0, 10.0], ids=["steady", "slow-first-rounds"])
@pytest.mark.parametrize("saved", [False, True], ids=["cold", "saved"])
@pytest.mark.parametrize("ahead", [False, True], ids=["late", "ahead"])
def test_a_winning_pair_runs_at_its_best_width(saved, warm_up, ahead):
    steps, rate = linear(1.5), rate_for(3.0, 3)

    def share(seed: int) -> tuple[Run, Run]:
        model = tuned(steps, 3) if saved else CostModel()
        machine = Machine(steps, seed=seed, warm_up=warm_up)
        mine = simulate(Governor(3, model), machine, lambda i: rate, 500, seed, ahead)
        return mine, simulate(FixedGovernor(3), Machine(steps, seed=seed), lambda i: rate, 500, seed)

    pairs = [share(s) for s in range(40)]
    assert mean_of([m for m, _ in pairs]) >= 0.97 * mean_of([f for _, f in pairs])
    assert sum(k > 0 for m, _ in pairs for _, k in m.chosen) > 0.9 * sum(len(m.chosen) for m, _ in pairs)


@pytest.mark.parametrize("saved", [False, True], ids=["cold", "saved"])
@pytest.mark.parametrize("ahead", [False, True], ids=["late", "ahead"])
def test_it_comes_back_when_the_text_turns_predictable(saved, ahead):
    steps, waits = linear(1.8), []
    for seed in range(20):
        model = tuned(steps, 3) if saved else CostModel()
        governor = Governor(3, model)
        run = simulate(governor, Machine(steps, seed=seed), lambda i: 0.1 if i < 300 else 0.95, 1500, seed, ahead)
        early = [k for at, k in run.chosen if 100 <= at < 300]
        assert sum(k == 0 for k in early) > 0.8 * len(early)
        back = next(
            at for i, (at, k) in enumerate(run.chosen) if at >= 300 and all(c for _, c in run.chosen[i : i + 8])
        )
        waits.append(back - 300)
        late = [k for at, k in run.chosen if 900 <= at < 1490]
        assert sum(k > 0 for k in late) > 0.9 * len(late)
    assert max(waits) <= 256


def test_there_is_no_one_way_parking_however_long_it_lasted():
    governor = Governor(3, tuned(linear(1.5), 3))
    run = simulate(governor, Machine(linear(1.5), seed=3), lambda i: 0.0 if i < 20_000 else 0.95, 22_000, 3)
    back = next(at for i, (at, k) in enumerate(run.chosen) if at >= 20_000 and all(c for _, c in run.chosen[i : i + 8]))
    assert back - 20_000 <= 512
    wasted = [k for at, k in run.chosen if at < 20_000 and k > 0]
    assert 10 <= len(wasted) < 0.03 * 20_000


def test_a_machine_where_only_one_draft_pays_gets_one():
    costs = {1: 1.2, 2: 3.0, 3: 4.0}
    rate = rate_for(2.8, 3)
    runs = [simulate(Governor(3), Machine(costs.__getitem__, seed=s), lambda i: rate, 500, s) for s in range(24)]
    chosen = [k for run in runs for _, k in run.chosen]
    assert chosen.count(1) > 0.9 * len(chosen)
    assert mean_of(runs) >= 0.96 * best_fixed(costs.__getitem__, rate, 3)


@pytest.mark.parametrize(("noise", "share"), [(0.2, 0.95), (0.3, 0.93), (0.4, 0.9)])
def test_a_busy_machine_hardly_misleads_where_a_draft_more_costs_little(noise, share):
    """Costs of single widths, each taken for itself, get to 0.94, 0.91 and 0.87 of the best width's speed."""

    def dear_to_begin(k: int) -> float:
        return 2.2 + 0.15 * k

    best, shares = best_fixed(dear_to_begin, 0.95, 7), []
    for seed in range(24):
        model, machine = CostModel(), Machine(dear_to_begin, noise=noise, seed=seed)
        runs = [simulate(Governor(7, model), machine, lambda i: 0.95, 200, 100 * seed + i) for i in range(10)]
        shares.append(mean_of(runs) / best)
    assert statistics.fmean(shares) > share


@pytest.mark.parametrize("tokens", [3.5, 10.0])
def test_a_wide_drafter_finds_its_width(tokens):
    def steps(k: int) -> float:
        return 1.6 + 0.03 * k

    rate = rate_for(tokens, 15)
    cold = [simulate(Governor(15), Machine(steps, seed=s), lambda i: rate, 500, s) for s in range(16)]
    saved = [
        simulate(Governor(15, tuned(steps, 15)), Machine(steps, seed=s), lambda i: rate, 500, s) for s in range(16)
    ]
    best = best_fixed(steps, rate, 15)
    assert mean_of(cold) >= 0.90 * best
    assert mean_of(saved) >= 0.96 * best
    assert all(k <= 4 for run in cold for _, k in run.chosen[:5])


def test_stale_saved_costs_are_unlearned_in_both_directions():
    rate = rate_for(3.0, 3)
    hopeful = Governor(3, tuned(linear(1.5), 3))
    now_slow = simulate(hopeful, Machine(linear(4), seed=1), lambda i: rate, 2000, 1)
    assert now_slow.speed >= 0.95
    gloomy = Governor(3, tuned(linear(4), 3))
    now_fast = simulate(gloomy, Machine(linear(1.5), seed=1), lambda i: rate, 4000, 1)
    assert sum(k > 0 for at, k in now_fast.chosen if at > 2000) > 0.9 * sum(at > 2000 for at, _ in now_fast.chosen)


@pytest.mark.parametrize("processes", [1, 6], ids=["one", "each"])
@pytest.mark.parametrize("length", [40, 100])
def test_short_replies_do_not_keep_bad_costs_alive(processes, length):
    """Costs taken on a busy machine forbid drafting; replies shorter than any wait must find out together."""

    def truth(k: int) -> float:
        return 1.3 + 0.1 * k

    saved = {0: PLAIN_SECONDS, **dict.fromkeys((1, 2, 3), 7.0 * PLAIN_SECONDS)}
    speeds = []
    for seed in range(6):
        if processes > 1 or seed == 0:
            model = CostModel()
            model._saved = {1: saved}
        run = simulate(Governor(3, model), Machine(truth, seed=seed), lambda i: rate_for(3.3, 3), length, seed)
        saved = model.for_batch(1).merged()
        speeds.append(run.speed)
    assert min(speeds) > 0.93
    assert statistics.mean(speeds[2:]) > 1.4


def test_a_machine_that_slows_down_as_a_whole_changes_nothing():
    rate = rate_for(3.0, 3)
    runs = [
        simulate(Governor(3, tuned(linear(1.5), 3)), Machine(linear(1.5), speed=4.0, seed=s), lambda i: rate, 500, s)
        for s in range(8)
    ]
    assert sum(k > 0 for r in runs for _, k in r.chosen) > 0.85 * sum(len(r.chosen) for r in runs)


def test_equal_observations_make_equal_choices():
    rate = rate_for(2.2, 3)
    runs = [simulate(Governor(3), Machine(linear(1.8), seed=5), lambda i: rate, 600, 5) for _ in range(2)]
    assert runs[0].chosen == runs[1].chosen


def test_reproducible_choices_ignore_the_clock():
    rate = rate_for(2.2, 3)
    runs = [
        simulate(
            Governor(3, tuned(linear(1.8), 3), reproducible=True), Machine(steps, seed=seed), lambda i: rate, 600, 5
        )
        for steps, seed in ((linear(1.8), 1), (linear(9.0), 2), (linear(1.01), 3))
    ]
    assert runs[0].chosen == runs[1].chosen == runs[2].chosen
    assert len({k for _, k in runs[0].chosen}) > 1


def test_a_second_request_starts_tuned():
    model, rate, speeds = CostModel(), rate_for(3.0, 3), []
    for seed in range(4):
        speeds.append(simulate(Governor(3, model), Machine(linear(4), seed=seed), lambda i: rate, 500, seed).speed)
    assert statistics.mean(speeds[1:]) >= 0.985


def simulate_lane(
    rates: Sequence[float], steps: Callable[[int], float], length: int, seed: int, model: CostModel
) -> float:
    """Tokens per row and plain step of a lane whose rows are accepted at `rates`."""
    rng, machine = random.Random(seed), Machine(steps, seed=seed)
    rows = [Governor(3, model) for _ in rates]
    for row in rows:
        row.set_costs(model.for_batch(len(rows)))
    elapsed = 0.0
    while rows[0].tokens < length:
        budget = choose_together(rows, [10_000] * len(rows))
        span = 1 if any(budget) else min(row.plain_span() for row in rows)
        for step in range(span):
            shown, clean = machine.seconds(max(budget))
            if not any(budget):
                shown *= 1.5 if step == 0 else 0.05 if step == span - 1 else 1.0
            elapsed += clean
            for row, rate, k in zip(rows, rates, budget, strict=True):
                accepted = 0
                while accepted < k and rng.random() < rate:
                    accepted += 1
                row.observe(k, accepted, shown, width=max(budget))
    return statistics.mean(row.tokens for row in rows) / (elapsed / PLAIN_SECONDS)


@pytest.mark.parametrize(
    ("rates", "at3"), [([0.9] * 4, 2.0), ([0.9, 0.1, 0.1, 0.1], 2.0), ([0.9, 0.9, 0.3], 1.5), ([0.05] * 2, 1.8)]
)
def test_a_lane_gets_what_is_best_for_all_its_rows(rates, at3):
    def fixed(k: int) -> float:
        return statistics.mean(sum(r**i for i in range(k + 1)) for r in rates) / linear(at3)(k)

    best = max([1.0] + [fixed(k) for k in (1, 2, 3)])
    speeds = [simulate_lane(rates, linear(at3), 500, seed, CostModel()) for seed in range(12)]
    assert statistics.mean(speeds) >= 0.96 * best
