"""MTP heads from the command line, on tiny checkpoints: generate, pair, probe, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mlx_spec import plugins
from mlx_spec.cli import cli
from mlx_spec.errors import FINDINGS
from mlx_spec.pair import load

MakePair = Callable[..., tuple[Path, Path]]


def spec(*words: object) -> Result:
    plugins.reset()
    return CliRunner().invoke(cli, [str(word) for word in words])


def said(*words: object) -> dict[str, Any]:
    result = spec(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def own(mtp_dirs: MakePair) -> Path:
    return mtp_dirs(drafter="own", raw=True, wrapper=True, agree=True)[0]


def test_a_checkpoint_drafts_for_itself(own: Path) -> None:
    plain = said("generate", "-m", own, "-p", "Hello", "-n", 16, "--draft-kind", "none")
    for words in (("--draft-kind", "mtp"), ("--draft-model", own), ("--draft-model", own, "--draft-kind", "mtp")):
        made = said("generate", "-m", own, "-p", "Hello", "-n", 16, "--fixed", *words)
        assert made["token_ids"] == plain["token_ids"]
        assert made["timings"]["draft_n_accepted"] > 0


def test_an_external_head_drafts(mtp_dirs: MakePair) -> None:
    target, head = mtp_dirs(drafter="mtp", agree=True)
    config = '{"method": "draft-mtp", "draft_head_bits": 4, "draft_vocab_size": 200, "num_speculative_tokens": 5}'
    words = ("generate", "-m", target, "--draft-model", head, "-p", "Hello", "-n", 16, "--fixed")
    made, reduced = said(*words), said(*words, "--spec-config", config)
    assert made["token_ids"] == reduced["token_ids"]
    assert min(run["timings"]["draft_n_accepted"] for run in (made, reduced)) > 0


def test_a_head_without_a_record_is_told_once_and_alike(mtp_dirs: MakePair) -> None:
    target, head = mtp_dirs(drafter="mtp", agree=True)
    words = ("-m", target, "--draft-model", head)
    reply = spec("generate", *words, "-p", "Hello", "-n", 2, "--no-probe")
    pair = spec("pair", *words, "--no-measure", "--no-probe")
    for made in (reply, pair):
        (line,) = (line for line in made.output.splitlines() if "no record of the trunk" in line)
        assert line.startswith("warning P32: trunk of target ") and line.endswith(" with spec split-mtp.")
    assert line in reply.stderr and line in pair.stderr
    looked = spec("inspect", target, "--drafter", head)
    (stage,) = (row for row in looked.output.splitlines() if "no record of the trunk" in row)
    assert "(P32)" in stage and stage.endswith(line.split(". ")[1].rstrip("."))
    (fit,) = (row for row in looked.stdout.splitlines() if row.startswith("mtp") and str(head) in row)
    assert fit.endswith("see its stages")


def test_a_program_that_loads_such_a_pair_finds_it_in_the_log(mtp_dirs: MakePair, caplog: Any) -> None:
    pair = load(*map(str, mtp_dirs(drafter="mtp", agree=True)), probe=False)
    assert [record.message for record in caplog.records if record.name == FINDINGS] == [str(pair.plan.findings[0])]


def test_a_block_size_past_what_runs_is_cut_and_said(mtp_dirs: MakePair, caplog: Any) -> None:
    target, head = mtp_dirs(drafter="mtp", block_size=100)
    pair = load(str(target), str(head), probe=False)
    (said_of_it,) = (text for text in pair.plan.notes if "L=100 from drafter cut to L=64" in text)
    assert pair.plan.block_size == 64 and said_of_it in caplog.messages
    made = spec("generate", "-m", target, "--draft-model", head, "-p", "Hello", "-n", 2, "--no-probe")
    assert made.output.count("L=100 from drafter cut to L=64") == 1
    assert "block_size 100 (declared; at most 64 are used)" in spec("inspect", head).stdout


def test_a_target_alone_is_told_what_would_make_it_a_pair(own: Path, mtp_dirs: MakePair) -> None:
    made = spec("pair", "-m", own)
    assert made.exit_code == 0 and "works" not in made.stdout and "decoded plainly" in made.stdout
    assert "a head that can draft for it: --draft-kind mtp" in made.stdout
    assert "--draft-kind prompt-lookup" in made.stdout and "of model_type qwen3_5_mtp, " in made.stdout
    assert "own head  none" in spec("pair", "-m", mtp_dirs(drafter="mtp", agree=True)[0]).stdout


@pytest.mark.parametrize("command", ["probe", "tune", "bench"])
def test_who_names_no_drafter_is_told_of_the_head_that_is_there(own: Path, mtp_dirs: MakePair, command: str) -> None:
    found = spec(command, "-m", own).stderr
    assert "Pass --draft-kind mtp (a head is in this checkpoint), --draft-model DIR or --draft-kind pro" in found
    assert "Pass --draft-model DIR or" in spec(command, "-m", mtp_dirs(drafter="mtp", agree=True)[0]).stderr


def test_pair_says_what_was_decided_about_the_head(own: Path) -> None:
    made = said("pair", "-m", own, "--draft-kind", "mtp", "--no-measure")
    assert made["plan"]["active"] and made["plan"]["exactness"]["level"] in ("bitwise", "greedy")
    card = made["drafter"]
    assert card["norms"].startswith("deltas: its files are as published")
    assert card["hidden"].startswith("post (measured: ") and card["concat"].startswith("embedding-first (measured: ")
    assert card["matrices"] == "7 packed to 4 bits in groups of 64"
    assert "norms" in spec("pair", "-m", own, "--draft-kind", "mtp", "--no-measure").stdout


def test_probe_proves_it(own: Path) -> None:
    assert said("probe", "-m", own, "--draft-kind", "mtp")["width"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--draft-kind", "mtp"), "found no head tensors, expected a head"),
        (("--draft-model", "{head}", "--spec-config", '{"prompt_lookup_min": 3}'), "drafting option min_n"),
        (
            ("--draft-model", "{head}", "--spec-config", '{"draft_vocab": "absent"}'),
            "draft_vocab absent: found No such file",
        ),
        (("--draft-model", "{head}", "--draft-kind", "dflash"), "mtp"),
    ],
)
def test_what_is_refused(mtp_dirs: MakePair, words: tuple[str, ...], message: str) -> None:
    target, head = mtp_dirs(drafter="mtp", agree=True)
    result = spec(
        "generate", "-m", target, "-p", "x", *(word.format(head=head) if word == "{head}" else word for word in words)
    )
    assert result.exit_code != 0 and message in result.output
    assert "Traceback" not in result.output
