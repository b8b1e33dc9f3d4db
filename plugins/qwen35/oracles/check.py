"""Compare the plugin with mlx-vlm and transformers on tiny checkpoints, and keep their answers as goldens.

    python plugins/qwen35/oracles/check.py              compare: oracle, stored golden, plugin
    python plugins/qwen35/oracles/check.py --update     rewrite the goldens first

Runs in an environment of its own (requirements-oracles.txt). The plugin's tests read the goldens and need
neither oracle. Exit status 1 when anything differs by more than its tolerance or a greedy token differs.
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
from qwen35_oracles import dflash_ours
from qwen35_oracles.cases import CASES, LENGTHS, prompt
from qwen35_oracles.ours import Ours
from qwen35_oracles.summary import differences, summary

GOLDENS = Path(__file__).parent / "goldens"
ORACLES = {"mlx_vlm": "qwen35_oracles.with_mlx_vlm", "transformers": "qwen35_oracles.with_transformers"}


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
    if options.only in (None, "mlx_vlm"):
        with tempfile.TemporaryDirectory() as folder:
            bad += check_dflash(Path(folder), options.update)
    return 1 if bad else 0


def check(name: str, module: Any, folder: Path, update: bool) -> int:
    """One oracle over its cases; returns the number of answers that differ."""
    file = GOLDENS / f"{name}.json"
    stored = {} if update else json.loads(file.read_text())["answers"]
    answers: dict[str, Any] = {}
    bad = 0
    for case in (c for c in CASES if name in c.oracles):
        path = case.write(folder)
        oracle, ours = module.Oracle(path), Ours(path)
        for length in LENGTHS:
            key, ids = f"{case.name}/{length}", prompt(case, length)
            theirs, own = oracle.run(ids), ours.run(ids)
            answers[key] = summary(theirs)
            worst = "  ".join(f"{part} {np.abs(theirs[part] - own[part]).max():.1e}" for part in theirs)
            faults = [f"plugin: {d}" for d in differences(summary(own), answers[key])]
            if not update:
                faults += [f"golden: {d}" for d in differences(answers[key], stored[key])]
            bad += bool(faults)
            print(f"{name:13}{key:20}{worst}  {'; '.join(faults) or 'equal'}")
    if update:
        write(file, module.VERSIONS, answers)
    return bad


def check_dflash(folder: Path, update: bool) -> int:
    """mlx-vlm's DFlash drafters over the cases it reads as we do; returns the number of answers that differ."""
    module = importlib.import_module("qwen35_oracles.dflash_with_mlx_vlm")
    file = GOLDENS / "dflash_mlx_vlm.json"
    stored = {} if update else json.loads(file.read_text())["answers"]
    answers: dict[str, Any] = {}
    bad = 0
    for case in (c for c in dflash_ours.CASES if "mlx_vlm" in c.oracles):
        dirs = case.write(folder)
        oracle, ours = module.Oracle(*dirs), dflash_ours.Ours(*dirs)
        for length in dflash_ours.LENGTHS:
            key, ids = f"{case.name}/{length}", dflash_ours.prompt(case, length)
            theirs, own = (one.run(ids, case.width) for one in (oracle, ours))
            answers[key] = dflash_ours.summary(theirs)
            faults = [f"plugin: {d}" for d in dflash_ours.differences(dflash_ours.summary(own), answers[key])]
            if not update:
                faults += [f"golden: {d}" for d in dflash_ours.differences(answers[key], stored[key])]
            bad += bool(faults)
            worst = max(float(np.abs(a["logits"] - b["logits"]).max()) for a, b in zip(theirs, own, strict=True))
            print(f"{'mlx_vlm':13}{'dflash ' + key:28}logits {worst:.1e}  {'; '.join(faults) or 'equal'}")
    if update:
        write(file, module.VERSIONS, answers)
    return bad


def write(file: Path, versions: dict[str, str], answers: dict[str, Any]) -> None:
    """JSON with one answer per line, so that a change shows which."""
    file.parent.mkdir(exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(answer)}" for key, answer in answers.items())
    file.write_text(f'{{"versions": {json.dumps(versions)},\n "answers": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    sys.exit(main())
