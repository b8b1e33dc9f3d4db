"""Costs of rounds: robust to noise, kept on disk, never fatal."""

from __future__ import annotations

import json
import math
import random
import stat
import statistics

import pytest

from mlx_spec import diskcache
from mlx_spec.costs import BatchCosts, CostModel, CostPrior, load_costs, machine_key, typical
from mlx_spec.diskcache import entry_path, read_entry, write_entry


@pytest.fixture(autouse=True)
def _fresh_warnings(monkeypatch):
    monkeypatch.setattr(diskcache, "_said", set())


def warnings_of(caplog) -> list[str]:
    """Messages at warning level."""
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def test_typical_is_near_the_median_and_deaf_to_outliers():
    rng = random.Random(3)
    clean = [rng.lognormvariate(0, 0.1) for _ in range(16)]
    dirty = [*clean[:12], 9.0, 11.0, 7.0, 30.0]
    assert typical(clean) == pytest.approx(statistics.median(clean), rel=0.1)
    assert typical(dirty) == pytest.approx(statistics.median(clean), rel=0.1)
    assert typical([5.0, 1.0]) == 1.0


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 0.0, -1.0])
def test_senseless_timings_are_ignored(seconds):
    costs = BatchCosts()
    costs.observe(2, seconds)
    assert costs.count(2) == 0 and costs.seconds(2) is None


def test_one_sample_or_two_that_disagree_do_not_count_as_measured():
    costs = BatchCosts()
    costs.observe(0, 0.01)
    costs.observe(3, 0.2)
    assert not costs.measured(3)
    costs.observe(3, 0.021)
    assert not costs.measured(3)
    assert costs.steps(3) == costs.prior.steps(3)
    costs.observe(3, 0.0205)
    assert costs.measured(3)
    assert costs.steps(3) == pytest.approx(2.05)


def test_unseen_k_comes_from_its_neighbours_or_the_prior():
    costs = BatchCosts({0: 0.01, 2: 0.014, 4: 0.018}, CostPrior(1.2, 0.05))
    assert costs.steps(3) == pytest.approx(1.6)
    assert costs.steps(6) == pytest.approx(2.2)
    assert costs.steps(1) == pytest.approx(1.2)
    assert BatchCosts(prior=CostPrior(1.2, 0.05)).steps(7) == pytest.approx(1.55)
    assert BatchCosts({0: 0.01, 2: 0.014}).steps(5) == pytest.approx(1.4 + 3 * 0.1)


def test_hope_is_given_to_unseen_k_only():
    costs = BatchCosts({0: 0.01, 3: 0.04})
    assert costs.hoped_steps(3) == costs.steps(3)
    assert costs.hoped_steps(1) < costs.steps(1)
    assert costs.hoped_steps(1) >= 1.0
    assert costs.hoped_steps(5) >= costs.steps(3)


def test_a_slower_machine_scales_saved_costs():
    costs = BatchCosts({0: 0.01, 1: 0.012, 3: 0.02})
    for i in range(6):
        costs.observe(0, 0.03 + i * 1e-6)
    assert costs.seconds(3) == pytest.approx(0.06, rel=0.01)
    assert costs.steps(3) == pytest.approx(2.0, rel=0.01)


def test_new_times_replace_old_ones_once_they_agree():
    costs = BatchCosts()
    for i in range(16):
        costs.observe(3, 0.04 + i * 1e-6)
    costs.observe(3, 0.015)
    assert costs.seconds(3) > 0.035
    costs.observe(3, 0.0151)
    assert costs.seconds(3) < 0.016


def test_a_width_that_was_not_timed_for_long_is_tried_again():
    """Timed while the machine was busy, it would seem dear for good."""
    costs = BatchCosts()
    for k in (3, 5):
        for _ in range(8):
            costs.observe(k, 0.02)
    assert costs.doubt(5) == 1.0 < costs.doubt(3) < 1.02
    for _ in range(100):
        costs.observe(5, 0.02)
    assert costs.doubt(5) == 1.0 and costs.doubt(3) == pytest.approx(1.2, abs=0.02)
    costs.observe(3, 0.02)
    assert costs.doubt(3) == 1.0 and costs.doubt(7) == 1.0  # there is hope for what was never timed
    for _ in range(1000):
        costs.observe(5, 0.02)
    assert costs.doubt(3) == 1.5


def test_batch_sizes_are_kept_apart():
    model = CostModel()
    model.for_batch(1).observe(2, 0.01)
    assert model.for_batch(5).count(2) == 0
    assert model.for_batch(1) is model.for_batch(1)


def test_table_lists_what_is_known():
    costs = BatchCosts({0: 0.01, 2: 0.02})
    costs.observe(2, 0.021, 0.004)
    rows = {row["k"]: row for row in costs.table()}
    assert set(rows) == {0, 2}
    assert rows[2]["samples"] == 1 and rows[2]["draft_seconds"] == 0.004
    assert rows[2]["steps"] == pytest.approx(2.0)


def filled(tmp_path) -> CostModel:
    """A model with enough samples to be saved."""
    model = load_costs("pair", tmp_path)
    for i in range(5):
        model.for_batch(1).observe(0, 0.01 + i * 1e-5)
        model.for_batch(4).observe(3, 0.03 + i * 1e-5)
    model.learn_acceptance([0.8, 0.6])
    return model


def test_costs_come_back_from_disk(tmp_path):
    model = filled(tmp_path)
    assert model.save()
    again = load_costs("pair", tmp_path)
    assert again.for_batch(1).seconds(0) == pytest.approx(0.01, rel=0.01)
    assert again.for_batch(4).seconds(3) == pytest.approx(0.03, rel=0.01)
    assert again.acceptance == [0.8, 0.6]
    assert load_costs("other", tmp_path).for_batch(1).seconds(0) is None
    assert len(list((tmp_path / "costs").iterdir())) == 1
    assert not model.save()  # nothing new


def test_a_save_keeps_batch_sizes_of_earlier_runs(tmp_path):
    assert filled(tmp_path).save()
    second = load_costs("pair", tmp_path)
    for i in range(9):
        second.for_batch(2).observe(1, 0.02 + i * 1e-5)
    assert second.save()
    third = load_costs("pair", tmp_path)
    assert {b for b in (1, 2, 4) if third.for_batch(b).saved} == {1, 2, 4}


def test_a_model_without_key_stays_off_the_disk(tmp_path):
    model = CostModel("", tmp_path)
    for i in range(20):
        model.for_batch(1).observe(0, 0.01 + i * 1e-5)
    assert not model.save(force=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"version": 99}', b'{"version": 1, "batches": [1]}', b"[" * 100_000],
    ids=["empty", "cut", "list", "binary", "version", "shape", "deep"],
)
def test_a_corrupt_file_is_a_miss_with_one_warning(tmp_path, caplog, content):
    path = entry_path("costs", f"pair-{machine_key()}", tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    for _ in range(3):
        assert load_costs("pair", tmp_path).for_batch(1).seconds(0) is None
    assert len(warnings_of(caplog)) <= 1
    assert filled(tmp_path).save()
    assert load_costs("pair", tmp_path).for_batch(1).seconds(0) is not None


def test_values_that_make_no_sense_are_left_out(tmp_path):
    batches = {"1": {"0": 0.01, "1": -1, "2": "x", "3": None, "-4": 0.1, "5": 1e9, "6": True}, "x": {"0": 1}, "2": 7}
    text = json.dumps({"version": 1, "batches": batches, "acceptance": [0.5, 2]})
    path = entry_path("costs", f"pair-{machine_key()}", tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    model = load_costs("pair", tmp_path)
    assert model.for_batch(1).saved == {0: 0.01}
    assert model.for_batch(2).saved == {}
    assert model.acceptance == []


def test_an_unusable_folder_costs_one_warning(tmp_path, caplog):
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    for _ in range(3):
        assert not write_entry("costs", "k", {"a": 1}, blocker)
        assert read_entry("costs", "k", blocker) is None
    said = warnings_of(caplog)
    assert 1 <= len(said) <= 2 and all(str(blocker) in m for m in said)


def test_a_full_disk_leaves_the_old_entry_and_no_litter(tmp_path, caplog, monkeypatch):
    assert write_entry("costs", "k", {"a": 1}, tmp_path)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(diskcache.json, "dump", full)
    for _ in range(2):
        assert not write_entry("costs", "k", {"a": 2}, tmp_path)
    assert read_entry("costs", "k", tmp_path) == {"a": 1}
    assert len(list((tmp_path / "costs").iterdir())) == 1
    assert len(warnings_of(caplog)) == 1 and "No space left" in warnings_of(caplog)[0]


def test_entry_names_stay_inside_the_folder(tmp_path):
    path = entry_path("costs", "../../etc/x\0y", tmp_path)
    assert path.parent == tmp_path / "costs"
    assert write_entry("costs", "../../etc/x", {"a": 1}, tmp_path)
    assert stat.S_ISREG(next((tmp_path / "costs").iterdir()).stat().st_mode)


def test_a_narrow_round_costs_no_more_than_a_wide_one():
    """Timed on a busier machine it may seem to; a wide round counts once it was timed often enough."""
    costs = BatchCosts()
    for seconds in (0.01, 0.01, 0.01):
        costs.observe(0, seconds)
    for k, seconds in ((1, 0.04), (2, 0.03), (3, 0.02)):
        costs.observe(k, seconds)
        costs.observe(k, seconds)
    assert [costs.steps(k) for k in (1, 2, 3)] == [4, 3, 2]
    costs.observe(3, 0.02)
    assert [costs.steps(k) for k in (1, 2, 3)] == [2, 2, 2]
    assert BatchCosts({0: 0.01, 1: 0.03, 2: 0.02}).steps(1) == 2
    assert BatchCosts({0: 0.01, 1: 0.02, 2: 0.03}).steps(2) == 3


def test_a_saved_cost_beyond_reason_does_not_bury_a_width():
    """Saved while the machine was busy, by a run that is long over."""
    costs = BatchCosts({0: 0.001, 1: 0.0019, 2: 0.03, 3: 0.031})
    assert costs.steps(1) == pytest.approx(1.9)
    assert costs.steps(2) == pytest.approx(3.4) and costs.steps(3) == pytest.approx(4.9)
    for _ in range(3):  # what this run has seen is believed
        costs.observe(2, 0.03)
    assert costs.steps(2) == pytest.approx(30.0)


def test_a_width_that_was_not_timed_is_saved_as_it_was(tmp_path):
    """Drift is a guess from the others: applied save after save, its errors would add up."""
    first = CostModel("pair", tmp_path)
    for k, seconds in ((0, 0.001), (1, 0.0019), (2, 0.0033)):
        for _ in range(4):
            first.for_batch().observe(k, seconds)
    assert first.save()
    for slower in (3.0, 0.3, 3.0):
        costs = CostModel("pair", tmp_path).load()
        for k, seconds in ((0, 0.001), (1, 0.0019)):
            for _ in range(4):
                costs.for_batch().observe(k, seconds * slower)
        assert costs.save()
        assert CostModel("pair", tmp_path).load().for_batch().saved[2] == 0.0033


def noisy(noise: float, jump: float = 0.0, counts: int = 16, seed: int = 4) -> BatchCosts:
    """Costs of K = 0..7 that grow evenly but for a `jump` at 5, timed `counts` times each."""
    rng, costs = random.Random(seed), BatchCosts()
    for _ in range(counts):
        for k in range(8):
            clean = 0.01 * (1.0 if k == 0 else 2.0 + 0.1 * k + jump * (k >= 5))
            costs.observe(k, clean * (1.0 if k == 0 else rng.lognormvariate(0, noise)))
    return costs


def test_where_timings_vary_more_than_a_draft_costs_the_line_through_all_counts():
    """Taken one by one, a wider round would seem as cheap as a narrower one, and the other way round."""
    for seed in range(20):
        costs = noisy(0.25, seed=seed)
        rises = [costs.steps(k + 1) - costs.steps(k) for k in range(1, 7)]
        alone = [(costs.seconds(k + 1) - costs.seconds(k)) / costs.seconds(0) for k in range(1, 7)]
        assert max(rises) - min(rises) < 0.25 * (max(alone) - min(alone)) and min(rises) >= 0


def test_a_step_in_costs_stays_where_timings_hardly_vary():
    costs = noisy(0.004, jump=0.6)
    assert costs.steps(5) - costs.steps(4) == pytest.approx(0.7, abs=0.05)
    assert costs.steps(7) - costs.steps(6) == pytest.approx(0.1, abs=0.05)


def test_few_timings_or_few_values_of_k_are_no_line():
    costs = noisy(0.25, counts=2)
    assert costs._noise() == 0.0
    three = BatchCosts()
    for i in range(8):
        for k, seconds in ((0, 0.01), (1, 0.02), (2, 0.035), (3, 0.036)):
            three.observe(k, seconds * (1 + 0.1 * (i % 3)))
    assert three._noise() > 0.0
    assert three.steps(2) == pytest.approx(three.seconds(2) / three.seconds(0))
