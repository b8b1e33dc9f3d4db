"""The lines under a reply: why it ended, what was proven, which times are worth showing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tinymodels import LLAMA, write_model

from mlx_spec import diagnostics, plugins, settings
from mlx_spec.cli import cli
from mlx_spec.request import next_id

LOOKUP = ("--draft-kind", "prompt-lookup")
REPEATED = ",".join(["9,8,7,6,5"] * 5)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A tiny target with a context of 40 positions."""
    config = LLAMA | {"num_hidden_layers": 2, "max_position_embeddings": 40}
    return write_model(tmp_path_factory.mktemp("summary") / "tiny", config, seed=4)


@pytest.fixture
def run(target, monkeypatch) -> Callable[..., Result]:
    """`spec generate` with the target on a prompt of 25 ids; keywords are environment variables."""

    def run(*args: object, **env: str) -> Result:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        settings.reset_settings()
        plugins.reset()
        flags = ["generate", "-m", str(target), "--prompt-ids", REPEATED, "--ignore-eos", *map(str, args)]
        result = CliRunner().invoke(cli, flags)
        assert result.exit_code == 0, result.output
        return result

    monkeypatch.setattr(diagnostics, "_forced", False)
    yield run
    monkeypatch.undo()
    settings.reset_settings()
    plugins.reset()


def row(result: Result, name: str) -> str:
    """The line of the summary with that heading."""
    (line,) = re.findall(rf"^{name} +(.*)$", result.stderr, re.MULTILINE)
    return line


def test_a_full_context_is_told_from_the_length_asked_for(run):
    assert row(run("-n", 500), "prompt").endswith("finish: length (the context of 40 positions is full)")
    assert row(run("-n", 15), "prompt").endswith("finish: length")


def test_a_reply_without_drafts_or_tokens_is_no_matter_of_proof(run):
    plain = "nothing was drafted: this is plain decoding; all 5 token ids equal plain decoding"
    assert row(run("-n", 5, "--compare"), "exactness") == plain
    empty = run("-n", 0, *LOOKUP)
    assert row(empty, "exactness") == "no tokens, nothing to compare"
    assert row(empty, "governor") == "not started"
    drafted = row(run("-n", 12, "--fixed", "--compare", *LOOKUP), "exactness")
    assert drafted == "bitwise; all 12 token ids equal plain decoding"


def test_times_of_phases_are_shown_only_where_each_phase_waits(run):
    assert "phases " not in run("-n", 6, "--fixed", *LOOKUP).stderr
    assert json.loads(run("-n", 6, "--fixed", "--json", *LOOKUP).stdout)["timings"]["phases_ms"] == {}
    assert "verify" in row(run("-n", 6, "--fixed", "--profile", *LOOKUP), "phases")


def test_the_reply_is_numbered_before_those_that_warm_up(run):
    before = next_id()
    result = run("-n", 6, "--fixed", "--compare", *LOOKUP, MLX_SPEC_DRAFT_PROFILE="1")
    assert f"request={before + 1} " in result.stderr


def test_the_profile_of_the_reply_stands_behind_it_and_alone(run):
    """The warm-up and the plain run to compare with are requests too, and nobody asked about them."""
    result = run("-n", 6, "--fixed", "--compare", *LOOKUP, MLX_SPEC_DRAFT_PROFILE="1")
    assert "WARNING" not in result.stderr
    (line,) = re.findall(r"^request=.*$", result.stderr, re.MULTILINE)
    assert "tokens=6" in line and "kind=prompt-lookup" in line and "split_ms[" in line
    assert row(result, "phases")


def test_a_profile_outside_of_a_command_is_printed(target, monkeypatch, capsys):
    import mlx_spec

    monkeypatch.setenv("MLX_SPEC_DRAFT_PROFILE", "1")
    settings.reset_settings()
    try:
        mlx_spec.generate(mlx_spec.load(str(target)), [1, 2, 3], max_tokens=3, ignore_eos=True)
    finally:
        monkeypatch.undo()
        settings.reset_settings()
    assert capsys.readouterr().err.startswith("request=")
