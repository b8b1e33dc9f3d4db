"""Runs pytest in a process of its own, with the conformance kit, and reads back what each test said."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass
class Outcome:
    """What an inner run said: output, exit code, and per (class, test name) the outcome and message."""

    output: str
    code: int
    tests: dict[tuple[str, str], tuple[str, str]]

    def failures(self, cls: str) -> dict[str, str]:
        """Failed tests of a class, parameters cut off -> the first message."""
        found: dict[str, str] = {}
        for (name, test), (outcome, text) in self.tests.items():
            if name == cls and outcome == "failed":
                found.setdefault(test.split("[")[0], text)
        return found

    def outcomes(self, cls: str) -> set[str]:
        """Outcomes that occur in a class."""
        return {outcome for (name, _), (outcome, _) in self.tests.items() if name == cls}


def run_pytest(
    folder: Path, nodes: Sequence[str | Path], *options: str, path: Sequence[Path] = (), kit: bool = True
) -> Outcome:
    """Run `nodes`; `folder` holds the report, `path` goes on sys.path."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "--import-mode=importlib"]
    command += [
        "-c",
        os.devnull,
        f"--rootdir={HERE}",
        f"--junitxml={report}",
        *(["-p", "mlx_spec.testing.plugin"] if kit else []),
    ]
    search = os.pathsep.join([*map(str, path), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": search, "MLX_SPEC_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(
        [*command, *options, *map(str, nodes)], env=environment, cwd=HERE, capture_output=True, text=True, check=False
    )
    tests = {}
    if report.exists():
        for case in ET.parse(report).iter("testcase"):
            cls = case.get("classname", "").rpartition(".")[2]
            tests[cls, case.get("name", "")] = _outcome(case)
    return Outcome(done.stdout + done.stderr, done.returncode, tests)


def _outcome(case: ET.Element) -> tuple[str, str]:
    for tag, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            return outcome, f"{found.get('message', '')}\n{found.text or ''}"
    return "passed", ""
