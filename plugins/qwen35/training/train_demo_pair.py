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
from demo_training import parallel
from demo_training.layers import use_bfloat16
from qwen_pair import evaluate, export, reference, train_head, train_target
from qwen_pair.settings import HeadSchedule, TargetSchedule, Work

STEPS = ("target", "sample", "head", "export", "evaluate", "reference")
ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "plugins" / "qwen35" / "src" / "mlx_spec_qwen35" / "demo" / "model"
GEMMA = ROOT / "plugins" / "gemma4" / "src" / "mlx_spec_gemma4" / "demo" / "target"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=(*STEPS, "all"))
    parser.add_argument("--work", type=Path, required=True, help="directory of intermediate results")
    parser.add_argument("--out", type=Path, default=DEMO, help="where export writes the checkpoint's directory")
    parser.add_argument("--gemma", type=Path, default=GEMMA, help="the gemma4 demo target: tokenizer and first table")
    parser.add_argument("--minutes", type=float, help="wall-clock time of the step, instead of the schedule's")
    parser.add_argument("--rows", type=int, help="rows that `sample` draws, instead of the schedule's")
    parser.add_argument("--warm", action="store_true", help="target, head: go on from the checkpoint in --work")
    parser.add_argument("--threads", type=int, default=2, help="threads of the steps that are one process")
    parser.add_argument("--processes", type=int, default=2, help="processes that train together, one thread each")
    return parser.parse_args()


def run(step: str, work: Work, args: argparse.Namespace) -> None:
    """One step."""
    target, head = TargetSchedule(), HeadSchedule()
    if args.minutes:
        target, head = replace(target, minutes=args.minutes), replace(head, minutes=args.minutes)
    if args.rows:
        head = replace(head, rows=args.rows)
    use_bfloat16()
    if step == "target":
        parallel.launch(train_target.train, args.processes, work, target, args.warm, args.gemma)
    elif step == "sample":
        train_head.sample(work, head, args.processes, args.gemma)
    elif step == "head":
        parallel.launch(train_head.train, args.processes, work, head, args.warm, args.gemma)
    elif step == "export":
        export.export(work, args.out, args.gemma)
    elif step == "evaluate":
        evaluate.evaluate(work, args.gemma)
    else:
        reference.write(work, args.gemma)


def main() -> None:
    """Run one step, or all of them in order."""
    args = arguments()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    for step in STEPS if args.step == "all" else (args.step,):
        run(step, Work(args.work), args)


if __name__ == "__main__":
    main()
