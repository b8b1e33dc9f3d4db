"""Numbers behind `spec bench`: medians, ratios, differences; and the bundled texts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_spec.benchmark.statistics import Spread, first_difference, geometric_mean, paired_ratios, settled, verdict
from mlx_spec.benchmark.workloads import NAMES, Workload, bundled, from_files
from mlx_spec.errors import UsageError

positive = st.floats(0.01, 1e6)


def test_spread_keeps_every_value():
    spread = Spread.of([3.0, 1.0, 2.0, 10.0])
    assert (spread.median, spread.low, spread.high) == (2.5, 1.0, 10.0)
    assert spread.values == (3.0, 1.0, 2.0, 10.0)
    assert spread.relative == pytest.approx(3.6)
    with pytest.raises(ValueError, match="no values"):
        Spread.of([])


def test_ratios_are_taken_pair_by_pair():
    # The machine is half as fast in the second pair: the pairs agree, the two medians would not.
    assert paired_ratios([30.0, 15.0, 33.0], [20.0, 10.0, 22.0]).values == (1.5, 1.5, 1.5)
    with pytest.raises(ValueError):
        paired_ratios([1.0], [1.0, 2.0])


@given(st.lists(positive, min_size=1, max_size=6))
def test_geometric_mean_cancels_inverse_ratios(values):
    mean = geometric_mean(values)
    assert min(values) * (1 - 1e-9) <= mean <= max(values) * (1 + 1e-9)
    assert geometric_mean([*values, *(1 / v for v in values)]) == pytest.approx(1.0)


def test_geometric_mean_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no values"):
        geometric_mean([])


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_first_difference(left, right):
    at = first_difference(left, right)
    if at is None:
        assert left == right
    else:
        assert left[:at] == right[:at] and left[at : at + 1] != right[at : at + 1]
    assert first_difference(right, left) == at


@pytest.mark.parametrize(
    ("ratios", "text"),
    [([1.2, 1.1, 1.3], "faster 3/3"), ([0.9, 0.8, 0.7], "slower 3/3"), ([1.1, 0.9, 0.8, 1.0], "faster 1/4")],
)
def test_verdict(ratios, text):
    assert verdict(ratios) == text


@pytest.mark.parametrize(
    ("rates", "expected"), [([], False), ([9.0], False), ([5.0, 9.0], False), ([5.0, 9.0, 9.5], True)]
)
def test_settled_looks_at_the_last_two(rates, expected):
    assert settled(rates) is expected


# -- texts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_bundled_texts(name):
    workload = bundled(name)
    assert workload.name == name and workload.about
    assert len(workload.texts) >= 6 and len(set(workload.texts)) == len(workload.texts)
    assert all(60 < len(text.encode()) < 1000 for text in workload.texts)
    assert workload.warm_up not in workload.measured
    assert [workload.choose(trial) for trial in range(len(workload.measured) + 1)] == [
        *((trial, False) for trial in range(len(workload.measured))),
        (0, True),
    ]


def test_the_lookup_texts_repeat_themselves():
    """Most of an edit stands in its prompt already; prose does not."""

    def repeated(text: str) -> float:
        grams = [text[i : i + 12] for i in range(len(text) - 12)]
        return 1 - len(set(grams)) / len(grams)

    lookup, prose = (math.fsum(map(repeated, bundled(name).texts)) for name in ("lookup", "prose"))
    assert lookup > 5 * prose


def test_own_texts(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"text {name}", encoding="utf-8")
    both = from_files([str(tmp_path / "a"), str(tmp_path / "b")])
    assert (both.measured, both.warm_up) == (("text a",), "text b")
    alone = Workload("file", "", ("only",))
    assert (alone.measured, alone.warm_up, alone.choose(2)) == (("only",), "only", (0, True))


@pytest.mark.parametrize("content", [None, b"", b" \n", b"\xff\xfe\xff"])
def test_unusable_own_texts_are_refused(tmp_path, content):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match="--prompt-file .*text"):
        from_files([str(path)])
