"""`spec pair`: what it says of pairs that gain, do not gain, and do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tinymodels import SMALL_LLAMA, write_model

from mlx_spec import plugins
from mlx_spec.cli import cli
from mlx_spec.cli.pair import verdict
from mlx_spec.errors import Finding, PairError, listed


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A target, another model with its vocabulary, and one with a larger vocabulary."""
    root = tmp_path_factory.mktemp("pair")
    made = {"target": {}, "other": {}, "larger": {"vocab_size": 113}}
    return {n: write_model(root / n, SMALL_LLAMA | c, seed=4 + i) for i, (n, c) in enumerate(made.items())}


def spec_pair(folders: dict[str, Path], drafter: str, *args: str):
    plugins.reset()
    line = ["pair", "-m", str(folders["target"]), "--draft-model", str(folders[drafter]), "--draft-kind", "full-model"]
    return CliRunner().invoke(cli, [*line, *args])


def test_a_drafter_that_is_always_right(folders):
    """Acceptance by position is printed, and in the object."""
    result = spec_pair(folders, "target")
    assert result.exit_code == 0, result.output
    rows = {line.split("  ")[0].strip(): line for line in result.stdout.splitlines()}
    assert "yes" in rows["works"] and "bitwise" in rows["exactness"] and "yes" in rows["tokens equal"]
    assert "100%" in rows["acceptance"] and "by position" in rows["acceptance"] and "tokens/s" in rows["speculative"]
    said = json.loads(spec_pair(folders, "target", "--json").stdout)
    assert said["plan"]["active"] and set(said["gain"]["acceptance_by_position"]) == {1.0}
    assert 1 <= len(said["gain"]["ratios"]) <= 3
    assert said["gain"]["verdict"] == verdict(said["gain"]["ratios"], said["gain"]["governor"])
    assert "x (" in rows["gain"] and "on this prompt" in rows["gain"]
    assert "a median of paired runs, which does not divide from the speeds" in result.stdout
    assert said["gain"]["tokens_per_round"] > 1 and said["gain"]["token_ids_equal"]


def test_a_drafter_that_is_never_right_says_so(folders):
    """A pair that cannot pay is decoded plainly, and the governor says why."""
    said = json.loads(spec_pair(folders, "other", "--json").stdout)
    assert said["plan"]["active"] and said["gain"]["token_ids_equal"]
    assert max(said["gain"]["acceptance_by_position"], default=0.0) < 0.5 and said["gain"]["tokens_per_round"] < 1.5
    assert said["gain"]["governor"].startswith(("parked", "K="))


@pytest.mark.parametrize(
    ("ratios", "governor", "words"),
    [
        ([1.2, 1.3, 1.1], "K=3: 1.2x", "1.20x (1.10-1.30): it pays on this prompt"),
        ([0.9, 0.8, 0.95], "K=3: 1.2x", "0.90x (0.80-0.95): it does not pay on this prompt"),
        ([0.9, 1.1, 1.2], "", "1.10x (0.90-1.20): undecided on this prompt, the runs disagree"),
        ([0.97, 0.98, 0.99], "parked: ...", "it does not pay on this prompt, so replies go on plainly (parked)"),
        ([1.4], "", "1.40x in one run of each, which says little"),
    ],
)
def test_what_the_runs_say_of_the_gain(ratios, governor, words):
    assert words in verdict(ratios, governor)


def test_a_prompt_for_a_target_without_a_tokenizer_is_refused_unread(folders, monkeypatch):
    """It was measured on ids of its own before, and said nothing."""
    from mlx_spec import pair as loaded

    monkeypatch.setattr(loaded, "load_target", lambda _: pytest.fail("read"))
    result = spec_pair(folders, "target", "-p", "red")
    assert result.exit_code == 2 and result.stderr.startswith("error U14: prompt: found text, and a target without")


def test_findings_only(folders):
    said = json.loads(spec_pair(folders, "target", "--json", "--no-measure").stdout)
    assert said["gain"] is None and said["plan"]["exactness"]["level"] == "bitwise"


def test_a_next_step_that_findings_share_is_told_once():
    def finding(code: str, step: str) -> Finding:
        return Finding(code, "error", f"thing {code}", "one", "another", step)

    both = [finding("A1", "Take others"), finding("A2", "Drop it"), finding("A3", "Take others")]
    assert str(PairError(both)).splitlines() == [
        "thing A1: found one, expected another.",
        "thing A2: found one, expected another. Drop it.",
        "thing A3: found one, expected another. Take others.",
    ]
    assert listed(both, coded=True)[0] == "error A1: thing A1: found one, expected another."
    assert PairError(both).next_step == "Take others"


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_a_pair_that_does_not_fit_is_refused_with_every_finding(folders, form):
    result = spec_pair(folders, "larger", *form)
    assert result.exit_code == 1 and "found 113 entries, " in result.stderr and " has 97" in result.stderr
    if form:
        assert [f["code"] for f in json.loads(result.stdout)["findings"] if f["severity"] == "error"] == ["P22"]
    else:
        assert result.stdout == "" and result.stderr.count("found 113 entries") == 1
