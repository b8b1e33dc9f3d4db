"""The governor where drafting pays and where it does not: one pair in bfloat16 and in float32.

    python bench/governor_f32.py [--tokens 500] [--runs 7] [--save]

On a CPU a float32 verify of four rows costs almost four single steps, so a governor has to notice and stop.
A reply of 500 tokens must keep at least 0.95 of the speed of plain decoding there, first token to last.
`new` replies start knowing nothing of this machine's costs, `known` ones with what earlier replies learned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from common import (
    Checkpoints,
    Timed,
    checkpoints,
    describe,
    finish,
    ids_only,
    parser,
    prompts,
    shown,
    take_turns,
    timed,
)

from mlx_spec.costs import CostModel
from mlx_spec.engine import Engine
from mlx_spec.pair import Pair, load
from mlx_spec.request import Request
from mlx_spec.sampling import Sampling

GOAL = 0.95
DTYPES = ("float32", "bfloat16")


def main() -> int:
    """Measure both dtypes; exit 1 when the float32 goal is missed or tokens differ."""
    arguments = parser(__doc__, "governor_f32", tokens=500, runs=7)
    arguments.add_argument("--workload", default="code", help="bundled workload the prompts come from")
    options = arguments.parse_args()
    files = checkpoints(options)
    found = {dtype: measure(files, dtype, options.tokens, options.runs, options.workload) for dtype in DTYPES}
    finish("governor_f32", options, {"pair": files.label, "workload": options.workload, "goal": GOAL, **found})
    kept = min(found["float32"][arm]["over_plain"]["median"] for arm in ("new", "known"))
    return 0 if kept >= GOAL and all(entry["tokens_equal"] for entry in found.values()) else 1


def measure(files: Checkpoints, dtype: str, tokens: int, runs: int, workload: str) -> dict[str, Any]:
    """Speed of every arm over plain decoding in one dtype, and what the governor said."""
    pair = load(str(files.target), str(files.drafter), dtype=dtype)
    texts = prompts(pair, runs + 2, [workload])
    ids_only(pair)
    said: dict[str, list[str]] = {"new": [], "known": []}
    done = take_turns(arms(pair, texts, tokens, said), runs)
    rates = {name: [run.rate for run in found] for name, found in done.items()}
    out: dict[str, Any] = {
        "plan": pair.plan.line(),
        "tokens_equal": all(len({tuple(found[i].ids) for found in done.values()}) == 1 for i in range(runs)),
        "plain_per_second": describe(rates["plain"], 1),
    }
    for name in ("new", "known", "fixed"):
        out[name] = {"over_plain": describe([a / b for a, b in zip(rates[name], rates["plain"], strict=True)])}
        totals = [b.total_s / a.total_s for a, b in zip(done[name], done["plain"], strict=True)]
        out[name]["total_over_plain"] = describe(totals)
        out[name]["governor"] = said.get(name, [])[-runs:]
        print(f"{dtype} {name}: {shown(out[name]['over_plain'])}x plain decoding", file=sys.stderr)
    for name in said:
        print(f"  {dtype} {name} governor: {said[name][-1]}", file=sys.stderr)
    print(f"  {dtype} tokens {'equal' if out['tokens_equal'] else 'DIFFER'}", file=sys.stderr)
    return out


def arms(
    pair: Pair, texts: list[list[int]], tokens: int, said: dict[str, list[str]]
) -> dict[str, Callable[[int], Timed]]:
    """Plain, always full width, and the governor with and without earlier knowledge."""
    known = CostModel("")  # shared by all `known` replies, kept off the disk

    def reply(turn: int, costs: CostModel, heard: list[str] | None, **how: bool) -> Timed:
        pair.costs = costs
        handle = Engine(pair, max_rows=1).submit(Request(texts[turn], Sampling(), tokens, ignore_eos=True, **how))
        found = timed(event.token_ids for event in handle)
        if heard is not None:
            heard.append(handle.result().speculation.governor)
        return found

    return {
        "plain": lambda turn: reply(turn, CostModel(""), None, speculative=False),
        "new": lambda turn: reply(turn, CostModel(""), said["new"]),
        "known": lambda turn: reply(turn, known, said["known"]),
        "fixed": lambda turn: reply(turn, CostModel(""), None, adaptive=False),
    }


if __name__ == "__main__":
    sys.exit(main())
