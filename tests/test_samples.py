"""The sample output in README.md is of the kind that runs: lines, keys and kernels, whatever the numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlx_spec.cli import cli
from mlx_spec.inspection import inspect
from mlx_spec.plugins import get_manager
from mlx_spec.settings import reset_settings

VARIES = ("rounds ", "acceptance ", "speculation ", "governor ", "exactness ")  # what these say depends on the machine


def sample(root: Path) -> list[str]:
    """Lines of the first sample, continued ones joined."""
    text = (root / "README.md").read_text().partition("```text\n")[2].partition("```")[0]
    return text.replace("\n  reason=", " reason=").replace("\n  kernels=", " kernels=").splitlines()


def kinds(lines: list[str]) -> list[str]:
    """What each line of talk is: its words with every number the same, or its label where they vary."""
    begun = ("no -m given", "no prompt given", "note:", "decoding the same", "tokens ", "prompt ", *VARIES)
    found = []
    for line in lines:
        if not line.startswith(begun):
            continue
        known = next((label for label in VARIES if line.startswith(label)), None)
        line = re.sub(r"\(\S*(?=mlx_spec_gemma4)", "(", line)
        found.append(known or re.sub(r"\d[\d.]*( ms| s)?", "#", line))
    return found


def start(lines: list[str]) -> tuple[list[str], set[str]]:
    """Keys of the start line, and what runs on kernels."""
    (line,) = (line for line in lines if line.startswith("speculation="))
    return re.findall(r"(\w+)=", line), set(re.findall(r"([a-z-]+) \d+", line.partition("kernels=")[2]))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `make demo` runs, as lines."""
    monkeypatch.setenv("MLX_SPEC_KERNELS", "on")
    reset_settings()
    made = CliRunner().invoke(cli, ["generate", "-n", "200"])
    assert made.exit_code == 0, made.output
    return made.stderr.splitlines()


def test_the_sample_of_the_demo_has_the_lines_that_run(root: Path, ran: list[str]) -> None:
    assert kinds(sample(root)) == kinds(ran)
    assert len(kinds(ran)) > 9


def test_its_start_line_has_the_keys_and_kernels_that_run(root: Path, ran: list[str]) -> None:
    (keys, ops), (real_keys, real_ops) = start(sample(root)), start(ran)
    assert keys == real_keys
    brought = {kernel.op for owner, kernel in get_manager().registry.kernels() if owner == "cpu"}
    assert ops == (real_ops or ops & brought)  # real ones only where the kernels are built
    assert len(ops) > 3


def test_nothing_is_wrong_with_the_demo_pairs() -> None:
    demos = get_manager().registry.demos()
    assert {demo.owner for demo in demos} == {"gemma4", "qwen35"}
    for demo in demos:
        report = inspect(f"demo:{demo.owner}", [f"demo:{demo.owner}"])
        assert report.problems == [] and report.tokenizer["tokens"] == report.vocab_size
        assert report.drafters[-1].fits, report.drafters[-1].reason
