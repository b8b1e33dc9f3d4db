"""How often drafts of a Qwen head are kept, by depth, on held-out text. Goal: second >= 0.8 of first.

    python bench/qwen35_acceptance.py [--tokens 96] [--prompts 12] [--save]

The bundled pair continues held-out modules of Python's library, greedily and sampled at temperature 0.7, with
blocks of 1 to 5 drafts. `given` is the share of drafts kept among those whose predecessors were kept. Goal: the
second of these at least 0.8 of the first in every block, greedy and sampled, so that the head's own history holds;
and greedy replies are plain decoding's. At depth 3 the drafter's options are measured too: a head that is not
packed at load, output heads of 4 bits that only drafts see, and reduced vocabularies.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import Checkpoints, by_position, finish, parser, qwen35_checkpoints

from mlx_spec.api import generate
from mlx_spec.pair import Pair, load
from mlx_spec.sampling import Sampling
from mlx_spec.settings import reset_settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

from demo_training.corpus import held_out_prompts, load_tokenizer

GOAL = 0.8
DEPTHS = (1, 2, 3, 4, 5)
MODES: Mapping[str, Sampling | None] = {"greedy": None, "sampled": Sampling(temperature=0.7, seed=11)}
DEPTH_OF_OPTIONS = 3
OPTIONS: Mapping[str, tuple[dict[str, object], dict[str, str]]] = {
    "as loaded": ({}, {}),
    "head not packed": ({}, {"MLX_SPEC_QUANTIZE_DRAFTER": "0"}),
    "draft output 4 bits": ({"draft_head_bits": 4}, {}),
    "1024 of 2048 ids": ({"draft_vocab_size": 1024}, {}),
    "512 of 2048 ids": ({"draft_vocab_size": 512}, {}),
    "512 ids, 4 bits": ({"draft_head_bits": 4, "draft_vocab_size": 512}, {}),
}


def main() -> int:
    """Measure; exit 1 when a block's second acceptance misses the goal or greedy tokens differ."""
    arguments = parser(__doc__, "qwen35_acceptance", tokens=96, runs=1)
    arguments.add_argument("--prompts", type=int, default=12, help="held-out prompts of 64 tokens")
    options = arguments.parse_args()
    files = qwen35_checkpoints(options)
    prompts = held_out_prompts(load_tokenizer(files.target), options.prompts, 64)
    pair = opened(files)
    plain = [generate(pair, prompt, None, options.tokens, True, speculative=False).token_ids for prompt in prompts]
    figures: dict[str, Any] = {"pair": files.label, "prompts": options.prompts, "prompt_tokens": 64}
    equal = True
    for mode, sampling in MODES.items():
        figures[mode] = {}
        for depth in DEPTHS:
            found, replies = measured(pair, prompts, options.tokens, depth, sampling)
            figures[mode][f"depth {depth}"] = found
            equal = equal and (sampling is not None or replies == plain)
    figures["greedy_tokens_equal_plain"] = equal
    figures[f"options at depth {DEPTH_OF_OPTIONS}"] = with_options(files, prompts, options.tokens)
    ratios = [f["second_over_first"] for mode in MODES for f in figures[mode].values() if "second_over_first" in f]
    figures["worst_second_over_first"] = min(ratios)
    show(figures)
    finish("qwen35_acceptance", options, figures)
    return 0 if equal and min(ratios) >= GOAL else 1


def opened(files: Checkpoints, options: dict[str, object] | None = None) -> Pair:
    """The pair, wide enough for the deepest block; its replies are only ids."""
    return load(str(files.target), str(files.drafter), "mtp", DEPTHS[-1] + 1, options=options)


def measured(
    pair: Pair, prompts: Sequence[list[int]], tokens: int, depth: int, sampling: Sampling | None
) -> tuple[dict[str, Any], list[list[int]]]:
    """Acceptance of blocks of `depth` drafts, and the replies; without the last round of each, cut short."""
    rounds: list[tuple[int, int]] = []
    per_round: list[float] = []
    replies = []
    for prompt in prompts:
        done = generate(pair, prompt, sampling, tokens, True, adaptive=False, block_size=depth + 1)
        seen = [(len(r.draft_ids), r.accepted) for r in done.rounds if r.draft_ids][:-1]
        rounds += seen
        per_round.append(1 + statistics.mean(a for _, a in seen))
        replies.append(done.token_ids)
    at = by_position(rounds)
    given = [at[0], *(round(b / a, 4) if a else 0.0 for a, b in pairwise(at))]
    out: dict[str, Any] = {"rounds": len(rounds), "at_position": at, "given": given}
    out["tokens_per_round_median"] = round(statistics.median(per_round), 3)
    if depth > 1:
        out["second_over_first"] = round(given[1] / given[0], 4) if given[0] else 0.0
    return out, replies


def with_options(files: Checkpoints, prompts: Sequence[list[int]], tokens: int) -> dict[str, Any]:
    """Greedy acceptance under each of the drafter's options."""
    out = {}
    for name, (options, environment) in OPTIONS.items():
        with environ(environment):
            pair = opened(files, options)
        out[name] = measured(pair, prompts, tokens, DEPTH_OF_OPTIONS, None)[0]
    return out


@contextmanager
def environ(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables as mlx-spec reads them inside the block."""
    os.environ.update(values)
    reset_settings()
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        reset_settings()


def show(figures: dict[str, Any]) -> None:
    """A line per block."""
    for group in (*MODES, f"options at depth {DEPTH_OF_OPTIONS}"):
        for name, found in figures[group].items():
            given = " ".join(f"{value:.3f}" for value in found["given"])
            print(f"{group}, {name}: kept {given}; {found['tokens_per_round_median']} tokens a round", file=sys.stderr)
    worst, equal = figures["worst_second_over_first"], figures["greedy_tokens_equal_plain"]
    print(f"second / first at worst {worst:.3f}, goal {GOAL}; greedy tokens equal: {equal}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
