"""What a round costs beside its two models: dispatch, acceptance, rollback, commit. Goal: < 2%.

    python bench/overhead.py [--tokens 256] [--runs 7] [--profile] [--save]

Every part is timed by a wrapper around its function while full-width rounds run as they do in use, nothing
synchronised; a part's cost is the 20% quantile over all rounds, as is the whole round's, since a busy machine
only ever adds time. On top comes what acceptance costs on the device and what pluggy adds to a hook call.
Picking the target's own tokens from its logits, which plain decoding does as well, is given apart (`sample`).
`--profile` prints the Python functions in which a round spends most, those of mlx and mlx-lm left out.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from common import checkpoints, describe, ids_only, parser, prompts, shown
from common import finish as finish_bench
from startup import hook_call_us

import mlx_spec.accept
import mlx_spec.advance
import mlx_spec.judge
import mlx_spec.rounds
from mlx_spec.accept import RowPlan, accept
from mlx_spec.advance import Advancer
from mlx_spec.api import generate
from mlx_spec.pair import Pair, load
from mlx_spec.sampling import Sampling
from mlx_spec.shaping import greedy_ids
from mlx_spec.types import Draft

GOAL = 0.02
HOOK_CALLS = 4  # propose, verify, rollback of the target, rollback of the drafter
# part -> (owner, attribute); "draft" and "verify" build the models' graphs, "wait" is the device. A round ends with the
# drafts and the verify of the next one.
PARTS: dict[str, tuple[Any, str]] = {
    "draft": (mlx_spec.advance, "propose"),
    "verify": (mlx_spec.advance, "launch"),
    "accept: build": (mlx_spec.judge, "accept"),
    "wait": (mlx_spec.accept.GreedyBlock, "read"),
    "accept: unpack": (mlx_spec.accept, "unpack"),
    "check draft": (mlx_spec.rounds, "checked_draft"),
    "rollback": (mlx_spec.advance, "settle"),
    "rollback drafter": (Advancer, "_rollback_drafter"),
    "commit": (mlx_spec.advance, "commit"),
    "emit": (Advancer, "_tell"),
    "observe": (Advancer, "_observe"),
    "budget": (Advancer, "_budget"),
    "round": (Advancer, "_round"),
}
CORE_PARTS = ("accept: build", "accept: unpack", "rollback", "rollback drafter", "commit")


class Meter:
    """Microseconds of every call of every part, while it is on."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = defaultdict(list)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed under `name`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.samples[name].append((time.perf_counter() - started) * 1e6)

        return timed

    @contextmanager
    def on(self) -> Iterator[None]:
        """Every part wrapped inside the block."""
        kept = {name: getattr(owner, attribute) for name, (owner, attribute) in PARTS.items()}
        for name, (owner, attribute) in PARTS.items():
            setattr(owner, attribute, self.wrap(name, kept[name]))
        try:
            yield
        finally:
            for name, (owner, attribute) in PARTS.items():
                setattr(owner, attribute, kept[name])

    def per_round_us(self) -> dict[str, float]:
        """Microseconds per round by part; each part is called once a round."""
        return {name: quick(self.samples[name]) for name in PARTS}


def quick(samples: Sequence[float]) -> float:
    """The 20% quantile."""
    return sorted(samples)[len(samples) // 5]


def main() -> int:
    """Measure; exit 1 when the goal is missed."""
    arguments = parser(__doc__, "overhead", tokens=256, runs=7)
    arguments.add_argument("--profile", action="store_true", help="print the costliest Python functions of a round")
    options = arguments.parse_args()
    files = checkpoints(options)
    pair = load(str(files.target), str(files.drafter), probe=False)
    texts = prompts(pair, options.runs)
    ids_only(pair)
    figures = {"pair": files.label, "block_size": pair.plan.block_size, "goal": GOAL}
    figures |= measure(pair, texts, options)
    print(
        f"{files.label}, L={pair.plan.block_size}: {figures['round_us']['median']:.0f} us a round, "
        f"dispatch + accept + rollback + commit {shown(figures['share'])} of it",
        file=sys.stderr,
    )
    for name, value in figures["parts_us"].items():
        print(f"  {name:18} {value:9.1f} us", file=sys.stderr)
    if options.profile:
        profile(pair, texts[0], options.tokens)
    finish_bench("overhead", options, figures)
    return 0 if figures["share"]["median"] < GOAL else 1


def measure(pair: Pair, texts: list[list[int]], options: argparse.Namespace) -> dict[str, Any]:
    """Shares and microseconds, medians over the prompts."""
    generate(pair, texts[0], None, options.tokens, ignore_eos=True, adaptive=False)
    dispatch = HOOK_CALLS * hook_call_us(6)
    device, sample = accept_device_us(pair)
    rounds: list[dict[str, float]] = []
    for prompt in texts:
        meter = Meter()
        with meter.on():
            generate(pair, prompt, None, options.tokens, ignore_eos=True, adaptive=False)
        rounds.append(meter.per_round_us())
    parts = {name: round(statistics.median(r[name] for r in rounds), 1) for name in PARTS}
    shares = [(sum(r[name] for name in CORE_PARTS) + dispatch + device) / r["round"] for r in rounds]
    return {
        "share": describe(shares, 4),
        "round_us": describe([r["round"] for r in rounds], 1),
        "dispatch_us": round(dispatch, 2),
        "accept_device_us": round(device, 1),
        "sample_device_us": round(sample, 1),
        "parts_us": parts,
        "tokens_per_second": round(speed(pair, texts[0], options.tokens), 1),
    }


def speed(pair: Pair, prompt: list[int], tokens: int) -> float:
    """Tokens per second of the same rounds without wrappers."""
    return generate(pair, prompt, None, tokens, ignore_eos=True, adaptive=False).timings.predicted_per_second


def accept_device_us(pair: Pair, turns: int = 300) -> tuple[float, float]:
    """Microseconds on the device of (one greedy acceptance, picking the target's own tokens in it).

    Measured on logits that are ready, less what building the graph and evaluating nothing take. Picking is
    what plain decoding pays for too, so it is no part of the first figure.
    """
    width, vocab = pair.plan.block_size, pair.target.vocab_size
    logits = mx.random.normal((1, width, vocab)).astype(pair.target.dtype)
    tokens = mx.zeros((1, width - 1), dtype=mx.int32)
    one = mx.array([1], dtype=mx.int32)
    mx.eval(logits, tokens, one)

    def build() -> mx.array:
        return accept([RowPlan(Sampling())], logits, Draft(tokens, [width - 1]), pair.token_limit).packed

    def pick() -> mx.array:
        return greedy_ids(logits, pair.token_limit)

    nothing = _time(lambda: mx.eval(one + 1), turns)
    whole = _time(lambda: mx.eval(build()), turns) - _time(build, turns) - nothing
    picked = _time(lambda: mx.eval(pick()), turns) - _time(pick, turns) - nothing
    return max(0.0, whole - picked), max(0.0, picked)


def _time(function: Callable[[], object], turns: int) -> float:
    """Microseconds of one call."""
    meter = Meter()
    timed = meter.wrap("", function)
    for _ in range(turns):
        timed()
    return quick(meter.samples[""])


def profile(pair: Pair, prompt: list[int], tokens: int) -> None:
    """Python functions by own time per round; what mlx and mlx-lm do themselves is left out."""
    profiler = cProfile.Profile()
    profiler.enable()
    done = generate(pair, prompt, None, tokens, ignore_eos=True, adaptive=False)
    profiler.disable()
    rounds = done.timings.draft_rounds
    rows = []
    found: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    for (file, line, name), (_, calls, own, total, _) in found.items():
        if "mlx_spec" in file or "pluggy" in file:
            place = "/".join(file.split("/")[-2:])
            rows.append((own / rounds * 1e6, total / rounds * 1e6, calls / rounds, f"{place}:{line} {name}"))
    print(f"{'own us':>9} {'with callees':>13} {'calls':>7}   per round, under the profiler", file=sys.stderr)
    for own, total, calls, place in sorted(rows, reverse=True)[:25]:
        print(f"{own:9.1f} {total:13.1f} {calls:7.2f}   {place}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
