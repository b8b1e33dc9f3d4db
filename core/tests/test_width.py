"""Who decides the block size, which counts are refused, and --spec-config."""

from __future__ import annotations

import json

import pytest

from mlx_spec import diskcache
from mlx_spec.errors import UsageError
from mlx_spec.spec_config import ALLOWED, SpecConfig, normalise_kind
from mlx_spec.types import DrafterCard
from mlx_spec.width import (
    MAX_BLOCK_SIZE,
    check_draft_tokens,
    parse_spec_config,
    read_device_table,
    resolve_block_size,
    write_device_table,
)


def card(kind: str = "mtp", model_type: str = "gemma4_assistant", **values: object) -> DrafterCard:
    return DrafterCard(kind, model_type, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "want"), [("mtp", 4), ("dflash", 16), ("full-model", 4), ("prompt-lookup", 8), ("my-own", 4)]
)
def test_defaults_per_kind(kind, want):
    chosen = resolve_block_size(None, card(kind), kind, {})
    assert (chosen.L, chosen.K, chosen.source, chosen.notes) == (want, want - 1, "default", ())


def test_precedence():
    table = {"mtp": 6, "mtp/gemma4_assistant": 7}
    declared = card(block_size=5)
    assert resolve_block_size((3, "--draft-block-size"), declared, "mtp", table).L == 3
    assert resolve_block_size((3, "--draft-block-size"), declared, "mtp", table).source == "--draft-block-size"
    assert resolve_block_size(None, declared, "mtp", table).source == "drafter"
    assert resolve_block_size(None, declared, "mtp", table).L == 5
    assert resolve_block_size(None, card(), "mtp", table).L == 7
    assert resolve_block_size(None, card(model_type="x"), "mtp", table).L == 6
    assert resolve_block_size(None, card(model_type="x"), "mtp", table).source == "device table"


def test_wider_than_declared_is_a_notice():
    chosen = resolve_block_size((9, "--draft-block-size"), card(block_size=4), "mtp", {})
    assert chosen.L == 9
    assert "L=9" in chosen.notes[0] and "L=4" in chosen.notes[0]


def test_wider_than_possible_is_an_error_for_operators_and_a_cut_for_files():
    with pytest.raises(UsageError, match="found 9, expected at most 8") as caught:
        resolve_block_size((9, "--draft-block-size"), card(max_block_size=8), "mtp", {})
    assert caught.value.exit_code == 2
    chosen = resolve_block_size(None, card(block_size=12, max_block_size=8), "mtp", {})
    assert chosen.L == 8 and "cut to L=8" in chosen.notes[0]


@pytest.mark.parametrize("value", [0, 1])
def test_zero_and_one_mean_off(value):
    chosen = resolve_block_size((value, "--draft-block-size"), card(), "mtp", {})
    assert chosen.L == 1 and chosen.K == 0
    assert "off" in chosen.notes[0]


@pytest.mark.parametrize("value", [-1, 1000, 65, 1.9, 4.0, "4", True, False, None, [4], float("nan")])
def test_values_that_are_no_width_name_option_and_range(value):
    with pytest.raises(UsageError) as caught:
        resolve_block_size((value, "--draft-block-size"), card(), "mtp", {})
    text = str(caught.value)
    assert "--draft-block-size (L" in text and f"from 0 to {MAX_BLOCK_SIZE}" in text and repr(value) in text
    with pytest.raises(UsageError, match=r"num_speculative_tokens \(K.*from 0 to 63"):
        check_draft_tokens(value if value != 65 else 64, "num_speculative_tokens")


@pytest.mark.parametrize("value", [2, 16, 64])
def test_widths_in_range_work(value):
    assert value == resolve_block_size((value, "--draft-block-size"), card(), "mtp", {}).L


def test_an_exact_width_narrows():
    chosen = resolve_block_size(None, card(block_size=8), "mtp", {}, exact_width=5)
    assert (chosen.L, chosen.source) == (5, "exactness probe")
    assert "L=8" in chosen.notes[0] and "L=5" in chosen.notes[0]
    assert resolve_block_size(None, card(block_size=4), "mtp", {}, exact_width=5).source == "drafter"
    assert resolve_block_size(None, card(block_size=4), "mtp", {}, exact_width=0).L == 1


def test_the_device_table_is_kept_and_cleaned(tmp_path, monkeypatch):
    monkeypatch.setattr(diskcache, "_said", set())
    assert read_device_table(tmp_path) == {}
    assert write_device_table({"mtp": 5}, tmp_path)
    assert read_device_table(tmp_path) == {"mtp": 5}
    path = next((tmp_path / "widths").iterdir())
    path.write_text(json.dumps({"version": 1, "block_size": {"mtp": 5000, "dflash": True, "x": 3, "y": "4"}}))
    assert read_device_table(tmp_path) == {"x": 3}
    path.write_text("{")
    assert read_device_table(tmp_path) == {}


# -- --spec-config -------------------------------------------------------------------------------------


def parse(flags: dict[str, object] | None = None, **values: object) -> SpecConfig:
    return parse_spec_config(json.dumps(values), flags)


def test_nothing_given_says_nothing():
    assert parse_spec_config(None) == SpecConfig()
    assert parse() == SpecConfig()


def test_every_key_arrives():
    config = parse(
        method="ngram",
        model="some/where",
        num_speculative_tokens=5,
        acceptance="coupled",
        adaptive=False,
        prompt_lookup_min=2,
        prompt_lookup_max=9,
    )
    assert config == SpecConfig("prompt-lookup", "some/where", 6, "coupled", False, {"min_n": 2, "max_n": 9})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ngram", "prompt-lookup"),
        ("prompt_lookup", "prompt-lookup"),
        ("draft_model", "full-model"),
        ("draft-simple", "full-model"),
        ("full_model", "full-model"),
        ("draft-mtp", "mtp"),
        ("MTP", "mtp"),
        ("none", "none"),
        ("my_own", "my-own"),
    ],
)
def test_method_names_of_other_engines(name, kind):
    assert normalise_kind(name) == kind
    assert parse(method=name).kind == parse(kind=name).kind == kind


def test_both_counts_must_agree_and_the_message_says_which_is_which():
    assert parse(block_size=4, num_speculative_tokens=3).block_size == 4
    assert parse(block_size=0, num_speculative_tokens=0).block_size == 0
    with pytest.raises(UsageError, match=r"block_size \(L.*num_speculative_tokens \(K.*L=4 and K=4"):
        parse(block_size=4, num_speculative_tokens=4)


def test_zero_tokens_turn_drafting_off():
    assert parse(num_speculative_tokens=0).block_size == 1


@pytest.mark.parametrize("value", [-1, 1000, 1.9, "4", True, None])
@pytest.mark.parametrize("key", ["num_speculative_tokens", "block_size"])
def test_bad_counts_name_key_and_range(key, value):
    with pytest.raises(UsageError, match=f"--spec-config {key} .*from 0 to 6"):
        parse(**{key: value})


def test_unknown_keys_are_refused_with_the_allowed_ones():
    with pytest.raises(UsageError, match="num_draft_tokens") as caught:
        parse(num_draft_tokens=4)
    assert all(key in str(caught.value) for key in ALLOWED)
    with pytest.raises(UsageError, match="Did you mean 'acceptance'"):
        parse(aceptance="coupled")


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        ({"draft_kind": "mtp"}, {"method": "mtp"}),
        ({"draft_kind": "mtp"}, {"kind": "mtp"}),
        ({"draft_model": "a"}, {"model": "b"}),
        ({"draft_block_size": 4}, {"num_speculative_tokens": 3}),
        ({"draft_block_size": 0}, {"block_size": 4}),
        ({"acceptance": "coupled"}, {"acceptance": "coupled"}),
    ],
)
def test_a_key_given_twice_is_an_error_naming_both(flags, values):
    with pytest.raises(UsageError) as caught:
        parse(flags, **values)
    assert "--" + next(iter(flags)).replace("_", "-") in str(caught.value)
    assert next(iter(values)) in str(caught.value)
    assert parse(dict.fromkeys(flags), **values)


def test_method_and_kind_must_agree():
    assert parse(method="ngram", kind="prompt-lookup").kind == "prompt-lookup"
    with pytest.raises(UsageError, match="method and kind"):
        parse(method="ngram", kind="mtp")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '"mtp"', "{'method': 'mtp'}", '{"kind": "a", "kind": "b"}', "[" * 5000]
)
def test_text_that_is_no_object(text):
    with pytest.raises(UsageError, match="--spec-config"):
        parse_spec_config(text)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("method", 3, "text"),
        ("acceptance", "typical", "rejection"),
        ("adaptive", "yes", "true or false"),
        ("prompt_lookup_min", 0, "1 to 64"),
        ("prompt_lookup_max", 65, "1 to 64"),
        ("prompt_lookup_max", "3", "1 to 64"),
        ("prompt_lookup_max", 2.5, "1 to 64"),
        ("draft_vocab_size", 0, "at least 1"),
        ("draft_head_bits", 3, "4 or 8"),
        ("mtp_norms", "raw", "'weights' or 'deltas'"),
    ],
)
def test_bad_values_name_key_and_expectation(key, value, expected):
    with pytest.raises(UsageError, match=f"key {key}: .*{expected}"):
        parse(**{key: value})


def test_options_of_a_drafters_head_reach_its_card():
    given = {"mtp_norms": "deltas", "mtp_hidden": "pre", "mtp_concat": "hidden-first", "draft_head_bits": 4}
    given |= {"draft_vocab": "ids.json", "draft_vocab_size": 70000}
    assert parse(**given).options == given


def test_lookup_lengths_must_be_in_order():
    with pytest.raises(UsageError, match="prompt_lookup_min and prompt_lookup_max: found 5 and 3"):
        parse(prompt_lookup_min=5, prompt_lookup_max=3)
