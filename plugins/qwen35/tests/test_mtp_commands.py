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
        (("--draft-kind", "mtp"), "no head tensors (config.json declares 1 layers)"),
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
