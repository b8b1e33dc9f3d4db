"""Prompts that stand for images, audio or video: refused from files, before weights are loaded."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from mlx_spec.cli import cli
from mlx_spec_gemma4.tiny import SPECIALS, write_tiny


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("media"), "VLM")[0])


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
@pytest.mark.parametrize("spelled", [True, False])
def test_placeholders_are_refused_before_the_weights_are_loaded(
    target: str, kind: str, spelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_spec.pair.load_target", lambda ref: pytest.fail("loaded"))
    token = SPECIALS.index(f"<{kind}>")
    prompt = ["-p", f"what is <{kind}>"] if spelled else ["--prompt-ids", f"70,{token}"]
    made = CliRunner().invoke(cli, ["generate", "-m", target, *prompt])
    assert made.exit_code == 2 and made.stdout == ""
    assert made.stderr.count(f"the placeholder for {kind} input") == 1 and f"id {token}" in made.stderr


def test_text_alone_is_served(target: str) -> None:
    made = CliRunner().invoke(cli, ["generate", "-m", target, "-p", "what", "-n", "2"])
    assert made.exit_code == 0, made.stderr
