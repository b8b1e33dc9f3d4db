"""Compare the plugin with mlx-vlm and transformers on tiny checkpoints, and keep their answers as goldens.

    python plugins/gemma4/oracles/check.py              compare: oracle, stored golden, plugin
    python plugins/gemma4/oracles/check.py --update     rewrite the goldens first

Runs in an environment of its own (requirements-oracles.txt). The plugin's tests read the goldens and need
neither oracle. Exit status 1 when anything differs by more than `TOLERANCE` or a greedy token differs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from gemma4_oracles.cases import CASES, LENGTHS, prompt
from gemma4_oracles.ours import Ours
from gemma4_oracles.summary import TOLERANCE, differences, summary

GOLDENS = Path(__file__).parent / "goldens"
ORACLES = {"mlx_vlm": "gemma4_oracles.with_mlx_vlm", "transformers": "gemma4_oracles.with_transformers"}


def main() -> int:
    """Run every oracle that is asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="rewrite the stored answers")
    parser.add_argument("--only", choices=sorted(ORACLES), help="one oracle")
    options = parser.parse_args()
    bad = 0
    for name in [options.only] if options.only else ORACLES:
        module = importlib.import_module(ORACLES[name])
        with tempfile.TemporaryDirectory() as folder:
            bad += check(name, module, Path(folder), options.update)
    return 1 if bad else 0


def check(name: str, module: Any, folder: Path, update: bool) -> int:
    """One oracle over its cases; returns the number of answers that differ."""
    file = GOLDENS / f"{name}.json"
    stored = {} if update else json.loads(file.read_text())["answers"]
    answers: dict[str, Any] = {}
    bad = 0
    for case in (c for c in CASES if name in c.oracles):
        target, drafter = case.write(folder)
        oracle, ours = module.Oracle(target, drafter), Ours(target, drafter)
        for length in LENGTHS:
            key, ids = f"{case.name}/{length}", prompt(case, length)
            theirs, own = oracle.run(ids), ours.run(ids)
            answers[key] = summary(theirs)
            worst = compare(theirs, own)
            faults = [f"plugin: {d}" for d in differences(summary(own), answers[key])]
            if not update:
                faults += [f"golden: {d}" for d in differences(answers[key], stored[key])]
            bad += bool(faults)
            print(f"{name:13}{key:18}{worst}  {'; '.join(faults) or 'equal'}")
    if update:
        GOLDENS.mkdir(exist_ok=True)
        file.write_text(golden_text(module.VERSIONS, answers))
    return bad


def golden_text(versions: dict[str, str], answers: dict[str, Any]) -> str:
    """JSON with one answer per line, so that a change shows which."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(answer)}" for key, answer in answers.items())
    return f'{{"versions": {json.dumps(versions)},\n "answers": {{\n{lines}\n}}}}\n'


def compare(theirs: dict[str, Any], own: dict[str, Any]) -> str:
    """Largest differences over whole arrays, for the reader."""
    possible = np.isfinite(own["draft_logits"])
    parts = {key: np.abs(theirs[key] - own[key]).max() for key in ("logits", "hidden")}
    parts["draft"] = np.abs(
        theirs["draft_logits"] - np.where(possible, own["draft_logits"], theirs["draft_logits"])
    ).max()
    return "  ".join(f"{key} {value:.1e}" for key, value in parts.items()) + f"  (tolerance {TOLERANCE:g})"


if __name__ == "__main__":
    sys.exit(main())
