"""Sampling settings: what is accepted, what is refused and how it is said."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

from mlx_spec.errors import UsageError
from mlx_spec.sampling import MAX_STOP_LENGTH, MAX_STOPS, Sampling


class Hostile:
    """Looks like a number and like a list, and is neither."""

    def __index__(self) -> int:
        raise RuntimeError("scripted")

    def __iter__(self):
        raise RuntimeError("scripted")


class HostileNumber(Fraction):
    """A number that cannot be read."""

    def __float__(self) -> float:
        raise RuntimeError("scripted")


NOT_NUMBERS = [math.nan, math.inf, -math.inf, True, False, "0.5", "4", b"1", [], {}, object(), 1 + 2j, 10**400]
NUMBERS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
WHOLE = ["top_k", "seed", "min_tokens", "logprobs", "repetition_context_size", "presence_context_size"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", NOT_NUMBERS, ids=lambda v: repr(v)[:12])
def test_what_is_no_finite_number_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UsageError) as caught:
        Sampling(**{name: value})
    assert str(caught.value).startswith(f"{name}: found ") and ", expected a number " in str(caught.value)
    assert caught.value.exit_code == 2 and caught.value.next_step


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [*NOT_NUMBERS, 1.9, 2.0], ids=lambda v: repr(v)[:12])
def test_what_is_no_integer_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"^{name}: found .* expected an integer from"):
        Sampling(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", 100.1),
        ("temperature", 999999),
        ("top_p", -0.5),
        ("top_p", 0),
        ("top_p", 2),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("top_k", -2),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("acceptance", "greedy"),
        ("acceptance", 1),
        ("repetition_penalty", -1.0),
        ("repetition_context_size", 0),
        ("logprobs", 21),
        ("logprobs", -1),
        ("min_tokens", -1),
        ("logit_bias", [1]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: 1e9}),
        ("logit_bias", {1: "2"}),
        ("stop", 5),
        ("stop", [1]),
        ("stop", [None]),
        ("stop", ["x"] * (MAX_STOPS + 1)),
        ("stop", "y" * (MAX_STOP_LENGTH + 1)),
        ("stop_ids", "12"),
        ("stop_ids", 3),
        ("stop_ids", [-1]),
        ("stop_ids", [True]),
        ("stop_ids", range(10**12)),
        ("stop_ids", np.array([[1, 2], [3, 4]])),
        ("stop_ids", Hostile()),
        ("logit_bias", {Hostile(): 1.0}),
        ("temperature", HostileNumber(1)),
        ("acceptance", np.array(["rejection", "coupled"])),
        ("processors", "f"),
        ("processors", [1]),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"^{name}"):
        Sampling(**{name: value})


def test_long_values_are_shortened_in_the_message() -> None:
    with pytest.raises(UsageError) as caught:
        Sampling(stop=["y" * 10_000])
    assert "10000 characters" in str(caught.value) and len(str(caught.value)) < 200


def test_unknown_names_are_refused_and_known_ones_listed() -> None:
    with pytest.raises(UsageError, match="^temprature: found an unknown sampling setting.*temperature"):
        Sampling.from_mapping({"temprature": 1})
    assert Sampling.from_mapping({"temperature": 1, "top_k": 5}) == Sampling(temperature=1.0, top_k=5)


def test_accepted_forms_are_normalised() -> None:
    s = Sampling(top_k=-1, stop=["a", "", "a"], stop_ids=[3, 3, 4], logit_bias={"7": 1, 8: -2.5}, processors=max)
    assert (s.top_k, s.stop, s.stop_ids, s.logit_bias) == (0, ("a",), (3, 4), {7: 1.0, 8: -2.5})
    assert s.processors == (max,)
    assert Sampling(stop=None, stop_ids=None, logit_bias=None, processors=None) == Sampling()
    assert Sampling(stop="x").stop == ("x",)
    for none in ("", [""], []):
        assert Sampling(stop=none).stop == ()
    assert len(Sampling(stop=[f"s{i}" for i in range(50)]).stop) == 50
    assert hash(Sampling(logit_bias={1: 2.0})) == hash(Sampling(logit_bias={1: 2.0}))


def test_settings_are_frozen_and_copies_are_checked() -> None:
    settings = Sampling(temperature=0.5)
    with pytest.raises(AttributeError):
        settings.temperature = 1.0
    assert settings.replace(top_k=3).shape_key == (0.5, 1.0, 0.0, 3)
    with pytest.raises(UsageError, match="^top_k"):
        settings.replace(top_k="3")


def test_ids_beyond_the_vocabulary_are_refused_when_it_is_known() -> None:
    Sampling(logit_bias={9: 1.0}, stop_ids=[9]).check_ids(10)
    for settings in (Sampling(logit_bias={10: 1.0}), Sampling(stop_ids=[10])):
        with pytest.raises(UsageError, match="token id 10, expected ids from 0 to 9"):
            settings.check_ids(10)


@pytest.mark.parametrize(
    ("settings", "law"),
    [
        ({}, "greedy"),
        ({"seed": 1}, "greedy"),
        ({"acceptance": "coupled"}, "greedy"),
        ({"temperature": 1e-3}, "greedy"),  # report 40: a tiny temperature behaves as 0
        ({"temperature": 1e-5, "seed": 4}, "greedy"),
        ({"temperature": 1e-8, "acceptance": "rejection"}, "greedy"),
        ({"temperature": 0.2}, "rejection"),
        ({"temperature": 0.2, "seed": 0}, "coupled"),
        ({"temperature": 0.2, "seed": 0, "acceptance": "rejection"}, "rejection"),
        ({"temperature": 0.2, "acceptance": "coupled"}, "coupled"),
    ],
)
def test_law_follows_temperature_seed_and_choice(settings: dict[str, object], law: str) -> None:
    assert Sampling(**settings).law == law


def test_noise_seed_is_the_seed_or_a_fresh_one() -> None:
    assert Sampling(seed=-3).noise_seed() == -3
    fresh = {Sampling().noise_seed() for _ in range(20)}
    assert len(fresh) == 20 and all(0 <= seed < 2**64 for seed in fresh)


@pytest.mark.parametrize(
    ("settings", "history", "touches"),
    [
        ({}, False, False),
        ({"repetition_penalty": 0}, False, False),
        ({"presence_penalty": 0.5}, True, True),
        ({"frequency_penalty": -0.5}, True, True),
        ({"repetition_penalty": 1.1}, True, True),
        ({"processors": [max]}, True, True),
        ({"logit_bias": {1: 1}}, False, True),
        ({"min_tokens": 1}, False, True),
    ],
)
def test_rows_say_whether_their_logits_are_touched(settings: dict[str, object], history: bool, touches: bool) -> None:
    found = Sampling(**settings)
    assert (found.needs_history, found.touches_logits) == (history, touches)


def test_settings_import_without_mlx() -> None:
    code = "import sys, mlx_spec.sampling; print(sorted(m for m in sys.modules if m.startswith(('mlx.', 'pydantic'))))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_value_that_cannot_be_shown_is_refused_like_any_other():
    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError("scripted")

    with pytest.raises(UsageError, match="something that cannot be shown"):
        Sampling(temperature=Mute())  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [None, 3, "temperature", [("temperature", 1.0)]])
def test_settings_come_as_a_mapping(values: object) -> None:
    with pytest.raises(UsageError, match="^sampling: found .* expected a mapping"):
        Sampling.from_mapping(values)


def test_numbers_and_ids_of_numpy_are_taken() -> None:
    settings = Sampling(top_k=np.int64(3), stop_ids=np.array([4, 4, 5]), seed=np.uint64(2**63))
    assert (settings.top_k, settings.stop_ids, settings.seed) == (3, (4, 5), 2**63)
    assert type(settings.top_k) is int
