"""Train, export and measure the demonstration pair: one sub-command per step, `all` for everything."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

# Waiting threads must sleep: on a busy machine spinning ones cost several times the work itself.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

import torch
from demo_pair import evaluate, export, reference, train_drafter, train_target
from demo_pair.settings import DrafterSchedule, TargetSchedule, Work
from demo_training import corpus, parallel
from demo_training.layers import use_bfloat16

STEPS = ("tokenizer", "target", "sample", "drafter", "export", "evaluate", "reference")
DEMO = Path(__file__).resolve().parent.parent / "src" / "mlx_spec_gemma4" / "demo"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=(*STEPS, "all"))
    parser.add_argument("--work", type=Path, required=True, help="directory of intermediate results")
    parser.add_argument("--out", type=Path, default=DEMO, help="where export writes target/ and drafter/")
    parser.add_argument("--minutes", type=float, help="wall-clock time of the step, instead of the schedule's")
    parser.add_argument("--rows", type=int, help="rows that `sample` draws, instead of the schedule's")
    parser.add_argument("--warm", action="store_true", help="target, drafter: go on from the checkpoint in --work")
    parser.add_argument("--threads", type=int, default=2, help="threads of the steps that are one process")
    parser.add_argument("--processes", type=int, default=2, help="processes that train together, one thread each")
    return parser.parse_args()


def run(step: str, work: Work, args: argparse.Namespace) -> None:
    """One step."""
    target, drafter = TargetSchedule(), DrafterSchedule()
    if args.minutes:
        target, drafter = replace(target, minutes=args.minutes), replace(drafter, minutes=args.minutes)
    if args.rows:
        drafter = replace(drafter, rows=args.rows)
    use_bfloat16()
    if step == "tokenizer":
        corpus.train_tokenizer(work.tokenizer)
    elif step == "target":
        parallel.launch(train_target.train, args.processes, work, target, args.warm)
    elif step == "sample":
        train_drafter.sample(work, drafter, args.processes)
    elif step == "drafter":
        parallel.launch(train_drafter.train, args.processes, work, drafter, args.warm)
    elif step == "export":
        export.export(work, args.out)
    elif step == "evaluate":
        evaluate.evaluate(work)
    else:
        reference.write(work)


def main() -> None:
    """Run one step, or all of them in order."""
    args = arguments()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    for step in STEPS if args.step == "all" else (args.step,):
        run(step, Work(args.work), args)


if __name__ == "__main__":
    main()
