"""`spec pair`: what it says of pairs that gain, do not gain, and do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tinymodels import SMALL_LLAMA, write_model

from mlx_spec import plugins
from mlx_spec.cli import cli


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
    assert "100%" in rows["acceptance"] and "by position" in rows["acceptance"] and "x)" in rows["speculative"]
    said = json.loads(spec_pair(folders, "target", "--json").stdout)
    assert said["plan"]["active"] and set(said["gain"]["acceptance_by_position"]) == {1.0}
    assert said["gain"]["tokens_per_round"] > 1 and said["gain"]["token_ids_equal"]


def test_a_drafter_that_is_never_right_says_so(folders):
    """A pair that cannot pay is decoded plainly, and the governor says why."""
    said = json.loads(spec_pair(folders, "other", "--json").stdout)
    assert said["plan"]["active"] and said["gain"]["token_ids_equal"]
    assert max(said["gain"]["acceptance_by_position"], default=0.0) < 0.5 and said["gain"]["tokens_per_round"] < 1.5
    assert said["gain"]["governor"].startswith(("parked", "K="))


def test_findings_only(folders):
    said = json.loads(spec_pair(folders, "target", "--json", "--no-measure").stdout)
    assert said["gain"] is None and said["plan"]["exactness"]["level"] == "bitwise"


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_a_pair_that_does_not_fit_is_refused_with_every_finding(folders, form):
    result = spec_pair(folders, "larger", *form)
    assert result.exit_code == 1 and "found 113 entries, " in result.stderr and " has 97" in result.stderr
    if form:
        assert [f["code"] for f in json.loads(result.stdout)["findings"] if f["severity"] == "error"] == ["P22"]
    else:
        assert result.stdout == "" and result.stderr.count("found 113 entries") == 1
