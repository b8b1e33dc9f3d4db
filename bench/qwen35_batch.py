"""Four Qwen 3.5 requests drafted together: rows that keep their own accepts against rows kept in step.

    python bench/qwen35_batch.py [--rows 4] [--chance 0.6] [--block 5] [--tokens 64] [--runs 7] [--save]

A small random float32 target of eight layers and a random DFlash drafter, greedy, full width every round. The drafter
really drafts; then its tokens are replaced, so that each is right with the chance given, whatever stood before it.
`per-row` is the default; `shortest-row` is MLX_SPEC_DFLASH_PER_ROW_ACCEPTS=0: the rows of a lane all keep the fewest
accepted drafts. Replies are equal. Figures are committed tokens of the whole lane per second, in turns, and the ratio
within each turn; `tokens per round` counts those of one row. Goal: 1.3.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from common import Timed, describe, finish, ids_only, parser, scratch, shown, take_turns

import mlx_spec
from mlx_spec.engine import Engine
from mlx_spec.lane import Lane
from mlx_spec.pair import Pair
from mlx_spec.request import Request, Result
from mlx_spec.sampling import Sampling
from mlx_spec.types import Draft
from mlx_spec_qwen35.tiny import write_tiny

GOAL = 1.3
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


def main() -> int:
    """Both ways in turns; exit 1 when the ratio misses the goal or the replies differ."""
    arguments = parser(__doc__, "qwen35_batch", tokens=64, runs=7)
    arguments.add_argument("--rows", type=int, default=4, help="requests in the lane")
    arguments.add_argument("--chance", type=float, default=0.6, help="chance of a drafted token to be right")
    arguments.add_argument("--block", type=int, default=5, help="L, anchor counted")
    options = arguments.parse_args()
    pair, named = loaded(options)
    limit = (pair.token_limit or pair.target.vocab_size) - 8
    prompts = [[6 + (7 * i * (n + 2)) % limit for i in range(12 + 5 * n)] for n in range(options.rows)]
    plain = run(pair, prompts, options.tokens, False, None)[0]
    lane = Scripted(pair, prompts, [result.token_ids for result in plain], options)
    arms = {name: lane.arm(name == "per-row") for name in ("per-row", "shortest-row")}
    turns = take_turns(arms, options.runs)
    rates = {name: [one.rate for one in done] for name, done in turns.items()}
    ratios = [a / b for a, b in zip(rates["per-row"], rates["shortest-row"], strict=True)]
    figures = {
        "pair": named,
        "rows": options.rows,
        "block_size": options.block,
        "chance": options.chance,
        "tokens_per_second": {name: describe(values, 1) for name, values in rates.items()},
        "tokens_per_round": {name: round(statistics.mean(values), 3) for name, values in lane.per_round.items()},
        "ratio": describe(ratios),
        "goal": GOAL,
        "equal_replies": lane.equal,
    }
    print(f"per-row against shortest-row: {shown(describe(ratios))}, goal {GOAL}", file=sys.stderr)
    finish("qwen35_batch", options, figures)
    return 0 if lane.equal and statistics.median(ratios) >= GOAL else 1


def loaded(options: Any) -> tuple[Pair, str]:
    """The pair, unproven: what is measured does not depend on how exact it is, and replies are compared."""
    if options.target is not None:
        return ids_only(mlx_spec.load(str(options.target), str(options.drafter), probe=False)), options.target.name
    folder = scratch()
    folders = write_tiny(folder, 5, drafter="dflash", block_size=options.block, **SIZES)
    return ids_only(mlx_spec.load(*map(str, folders), block_size=options.block, probe=False)), "small random"


class Scripted:
    """A lane whose drafts are right by chance, over and over."""

    def __init__(self, pair: Pair, prompts: Sequence[list[int]], replies: Sequence[list[int]], options: Any):
        self.pair, self.prompts, self.replies, self.options = pair, prompts, replies, options
        self.per_round: dict[str, list[float]] = {"per-row": [], "shortest-row": []}
        self.equal = True

    def arm(self, per_row: bool) -> Any:
        """A function(turn) that runs all requests once."""

        def once(turn: int) -> Timed:
            self.pair.plan.per_row_accepts = per_row
            rng = random.Random(turn)
            results, seconds = run(self.pair, self.prompts, self.options.tokens, True, self._scripted(rng))
            self.equal &= [r.token_ids for r in results] == list(self.replies)
            rounds = sum(r.timings.draft_rounds for r in results)
            tokens = sum(len(r.token_ids) for r in results)
            if turn >= 0:
                self.per_round["per-row" if per_row else "shortest-row"].append(tokens / max(rounds, 1))
            return Timed(results[0].token_ids, 0.0, tokens / seconds, seconds)

        return once

    def _scripted(self, rng: random.Random) -> Any:
        vocab = self.pair.target.vocab_size

        def replaced(lane: Lane, draft: Draft) -> Draft:
            rows = []
            for held in lane.tokens:
                prompt = next(p for p in self.prompts if held[: len(p)] == p)
                reply, at = self.replies[self.prompts.index(prompt)], len(held) - len(prompt)
                ids = (reply[at : at + draft.tokens.shape[1]] + [0] * draft.tokens.shape[1])[: draft.tokens.shape[1]]
                rows.append([t if rng.random() < self.options.chance else (t + 1) % vocab for t in ids])
            # The drafter's own tokens stay part of the graph: they are computed, and then not used.
            return replace(draft, tokens=mx.array(rows, dtype=mx.int32) + 0 * draft.tokens)

        return replaced


def run(
    pair: Pair, prompts: Sequence[list[int]], tokens: int, speculative: bool, replaced: Any
) -> tuple[list[Result], float]:
    """All prompts in one lane; results and seconds."""
    engine = Engine(pair, max_rows=len(prompts))
    if replaced is not None:
        hooks = engine._advancer.hooks

        def propose(lane: Lane, budget: Sequence[int]) -> Draft:
            return replaced(lane, hooks.propose(lane=lane, budget=budget))

        engine._advancer.hooks = replace(hooks, propose=propose)
    started = time.perf_counter()
    handles = [
        engine.submit(Request(p, Sampling(), tokens, ignore_eos=True, adaptive=False, speculative=speculative))
        for p in prompts
    ]
    engine.run()
    return [handle.result() for handle in handles], time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
