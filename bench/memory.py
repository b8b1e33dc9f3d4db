"""Memory over a long reply: it may grow with the context, never with the number of rounds.

    python bench/memory.py [--tokens 10000] [--save]

A reply of 10,000 tokens is decoded twice, in full-width rounds and plainly. Every thousandth token the
script reads mlx's active and peak memory (the peak since the last reading), what the attention states hold,
and the resident size of the process. `rest` is active memory less weights and attention states: it must be
flat. `peak_rest` grows with the context, since attention copies keys for a moment, in plain steps as in
rounds. A pair with a shorter context is copied with a longer one in its config.json, which suits the
purpose: memory does not care what the text says.
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from common import Checkpoints, checkpoints, finish, ids_only, parser, prompts, scratch

from mlx_spec.engine import Engine
from mlx_spec.pair import Pair, load
from mlx_spec.request import Request
from mlx_spec.sampling import Sampling

EVERY = 1000
ROOM = 2400  # positions beyond the reply
FLAT_REST = 256 << 10  # bytes the rest may move over a whole reply
FLAT_PEAK = 1 << 20  # bytes a round may need for a moment beyond a quarter more than a plain step
FLAT_RESIDENT = 16 << 20  # bytes the process may grow more than in plain decoding


def main() -> int:
    """Measure both ways; exit 1 when something grows that should not."""
    options = parser(__doc__, "memory", tokens=10_000, runs=1).parse_args()
    files = lengthened(checkpoints(options), options.tokens + ROOM)
    pair = load(str(files.target), str(files.drafter), probe=False)
    prompt = prompts(pair, 1)[0]
    ids_only(pair)
    mx.eval(pair.target.model.parameters(), pair.drafter.model.parameters() if pair.drafter else [])
    weights = mx.get_active_memory()
    figures: dict[str, Any] = {"pair": files.label, "block_size": pair.plan.block_size, "weights": weights}
    for name, speculative in (("rounds", True), ("plain", False)):
        figures[name] = follow(pair, prompt, options.tokens, speculative, weights)
        print_readings(name, figures[name])
    figures["flat"] = flat(figures["rounds"]["readings"], figures["plain"]["readings"])
    finish("memory", options, figures)
    return 0 if figures["flat"] else 1


def lengthened(files: Checkpoints, context: int) -> Checkpoints:
    """The same pair, copied with a longer context when its own is too short."""
    folder = scratch()
    changed = False
    for source in (files.target, files.drafter):
        if source is None:
            continue
        config = json.loads((source / "config.json").read_text())
        text = config.get("text_config", config)
        changed |= text["max_position_embeddings"] < context
        text["max_position_embeddings"] = max(context, text["max_position_embeddings"])
        copy = folder / source.name
        shutil.copytree(source, copy)
        (copy / "config.json").write_text(json.dumps(config))
    if not changed:
        return files
    drafter = None if files.drafter is None else folder / files.drafter.name
    return Checkpoints(f"{files.label}, context {context}", folder / files.target.name, drafter)


def follow(pair: Pair, prompt: list[int], tokens: int, speculative: bool, weights: int) -> dict[str, Any]:
    """Readings at every thousandth token of one reply."""
    engine = Engine(pair, max_rows=1)
    request = Request(prompt, Sampling(), tokens + 64, ignore_eos=True, adaptive=False, speculative=speculative)
    handle = engine.submit(request)
    readings: list[dict[str, int]] = []
    count = 0
    mx.clear_cache()
    mx.reset_peak_memory()
    for event in handle:
        count += len(event.token_ids)
        lane = engine._advancer.lane
        if lane is not None and count >= EVERY * (len(readings) + 1) and count <= tokens + 16:
            states = sum(state.nbytes for state in lane.states)
            readings.append(reading(count, states, weights))
            mx.reset_peak_memory()
    done = handle.result()
    return {"draft_rounds": done.timings.draft_rounds, "plain_steps": done.timings.plain_steps, "readings": readings}


def reading(tokens: int, states: int, weights: int) -> dict[str, int]:
    """Bytes now; `peak` since the last reading."""
    active = mx.get_active_memory()
    return {
        "tokens": tokens,
        "active": active,
        "peak": mx.get_peak_memory(),
        "states": states,
        "rest": active - states - weights,
        "peak_rest": mx.get_peak_memory() - states - weights,
        "resident": resident(),
    }


def resident() -> int:
    """Bytes of this process in memory: now on Linux, the largest so far elsewhere."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def flat(rounds: list[dict[str, int]], plain: list[dict[str, int]]) -> bool:
    """True when nothing but the context makes memory grow.

    Between readings nothing stays but attention states; what a round needs for a moment, and how the process
    grows, is what plain steps of the same context need as well.
    """
    rests = [r["rest"] for r in (*rounds, *plain)]
    peaks = all(a["peak_rest"] <= 1.25 * b["peak_rest"] + FLAT_PEAK for a, b in zip(rounds, plain, strict=True))
    grown = [found[-1]["resident"] - found[0]["resident"] for found in (rounds, plain)]
    return max(rests) - min(rests) <= FLAT_REST and peaks and grown[0] <= grown[1] + FLAT_RESIDENT


def print_readings(name: str, found: dict[str, Any]) -> None:
    """One line per reading, in MiB."""
    print(f"{name}: {found['draft_rounds']} rounds with drafts, {found['plain_steps']} plain steps", file=sys.stderr)
    columns = ("active", "peak", "states", "rest", "peak_rest", "resident")
    print(f"  {'tokens':>7}" + "".join(f"{column:>11}" for column in columns) + "   MiB", file=sys.stderr)
    for line in found["readings"]:
        cells = "".join(f"{line[column] / 2**20:11.2f}" for column in columns)
        print(f"  {line['tokens']:7}{cells}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
