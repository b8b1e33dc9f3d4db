"""Our plain decoding against mlx-lm's, on the same checkpoints, in turns, in one process.

    python bench/plain_vs_mlx_lm.py [--tokens 48] [--runs 41] [--save]

Both sides load the checkpoint themselves and decode greedily, on mlx's own operations (the script sets
MLX_SPEC_KERNELS=off). `ids` compares our engine without text with `mlx_lm.generate.generate_step`, `text` our
engine with text with `mlx_lm.stream_generate`. Before that the logits of single steps are compared byte by byte.
Replies are short and the turns many, because pairs of
runs close in time are what a busy machine disturbs least. Once a sliding window is full, mlx-lm
keeps its keys in a ring, whose order of summing moves the last bits; so the comparison is made twice, with
mlx-lm's cache as it is and with the ring read in order of time, where every byte must be equal. Goal for
speed: at least 0.97 of mlx-lm's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from common import (
    Checkpoints,
    Timed,
    checkpoints,
    describe,
    finish,
    parser,
    prompts,
    same_operations,
    shown,
    take_turns,
    timed,
    tiny_gemma4,
    tiny_llama,
)
from mlx_lm.generate import generate_step, stream_generate
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from mlx_spec.api import stream
from mlx_spec.pair import Pair, load

GOAL = 0.97
ROWS = 160  # single steps whose logits are compared: the demo pair's window is full before that


def main() -> int:
    """Compare on every checkpoint; exit 1 when bytes differ or the goal is missed."""
    same_operations()
    options = parser(__doc__, "plain_vs_mlx_lm", tokens=48, runs=41).parse_args()
    chosen = [checkpoints(options)]
    if options.target is None:
        chosen += [tiny_gemma4(), tiny_llama()] if chosen[0].label == "demo pair" else [tiny_llama()]
    found = [compare(pair, options.tokens, options.runs) for pair in chosen]
    finish("plain_vs_mlx_lm", options, {"goal": GOAL, "checkpoints": found})
    return 0 if all(entry["passed"] for entry in found) else 1


def compare(files: Checkpoints, tokens: int, runs: int) -> dict[str, Any]:
    """All figures of one checkpoint."""
    pair = load(str(files.target))
    pair.token_limit = None  # mlx-lm may pick ids that the tokenizer does not have
    theirs, _ = load_model(Path(files.target))
    mx.eval(pair.target.model.parameters(), theirs.parameters())
    texts = prompts(pair, runs + 2)
    stock, turned = (compare_bytes(pair, theirs, texts[0], ROWS, in_order) for in_order in (False, True))
    ids_equal, ids = ratios(ids_arms(pair, theirs, texts, tokens), runs)
    out: dict[str, Any] = {"name": files.label, "logits": stock, "logits_ring_in_order": turned, "ids": ids}
    out["tokens_equal"] = ids_equal
    if pair.tokenizer is not None:
        equal, out["text"] = ratios(text_arms(pair, theirs, texts, tokens), runs)
        out["tokens_equal"] = ids_equal and equal
    exact = turned["unequal"] == 0 and stock["other_argmax"] == 0 and out["tokens_equal"]
    out["passed"] = bool(exact) and ids["decode_ratio"]["median"] >= GOAL
    text = f"text {shown(out['text']['decode_ratio'])}x, " if "text" in out else ""
    print(
        f"{files.label}: ids {shown(ids['decode_ratio'])}x of mlx-lm's decode, {text}"
        f"first token {shown(ids['first_token_ratio'])}x its time, "
        f"tokens {'equal' if out['tokens_equal'] else 'DIFFER'}; of {ROWS} logits rows "
        f"{stock['unequal']} unequal, {turned['unequal']} with the ring in order",
        file=sys.stderr,
    )
    return out


class InOrder(RotatingKVCache):
    """mlx-lm's ring, handed out in order of time: the same keys, summed up from the oldest."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """As mlx-lm's; a full ring is turned so that its oldest entry comes first."""
        found = super().update_and_fetch(keys, values)
        if keys.shape[2] > 1 or self.offset <= self.max_size:
            return found
        start = self._idx
        turned = [mx.concatenate([a[..., start:, :], a[..., :start, :]], axis=2) for a in found]
        return turned[0], turned[1]


def compare_bytes(pair: Pair, theirs: Any, prompt: Sequence[int], tokens: int, in_order: bool) -> dict[str, Any]:
    """Logits of prompt + single steps against mlx-lm's: rows unequal, largest difference, other argmax."""
    cache = make_prompt_cache(theirs)
    if in_order:
        cache = [InOrder(c.max_size, c.keep) if isinstance(c, RotatingKVCache) else c for c in cache]
    states = pair.target.make_states()
    body, token = mx.array([prompt[:-1]]), prompt[-1]
    theirs(body, cache=cache)
    pair.target.forward(body.astype(mx.int32), states)
    unequal, other, largest = 0, 0, 0.0
    for _ in range(tokens):
        step = mx.array([[token]])
        left = pair.target.forward(step.astype(mx.int32), states).logits[0, -1]
        right = theirs(step, cache=cache)[0, -1]
        unequal += not bool(mx.all(left.view(mx.uint8) == right.view(mx.uint8)).item())
        other += int(mx.argmax(left).item()) != int(mx.argmax(right).item())
        largest = max(largest, float(mx.max(mx.abs(left.astype(mx.float32) - right.astype(mx.float32))).item()))
        token = int(mx.argmax(right).item())
    return {"rows": tokens, "unequal": unequal, "other_argmax": other, "max_abs_diff": largest}


def ids_arms(pair: Pair, theirs: Any, texts: list[list[int]], tokens: int) -> dict[str, Callable[[int], Timed]]:
    """Token ids only: our events without a tokenizer, mlx-lm's generate_step."""

    def ours(turn: int) -> Timed:
        held, pair.tokenizer = pair.tokenizer, None
        try:
            return timed(e.token_ids for e in stream(pair, texts[turn], None, tokens, ignore_eos=True))
        finally:
            pair.tokenizer = held

    def reference(turn: int) -> Timed:
        return timed([int(t)] for t, _ in generate_step(mx.array(texts[turn]), theirs, max_tokens=tokens))

    return {"ours": ours, "mlx_lm": reference}


def text_arms(pair: Pair, theirs: Any, texts: list[list[int]], tokens: int) -> dict[str, Callable[[int], Timed]]:
    """With text: our events, mlx-lm's stream_generate, neither stopped by an end id."""
    wrapped = pair.tokenizer.wrapped if pair.tokenizer is not None else None

    def ours(turn: int) -> Timed:
        return timed(e.token_ids for e in stream(pair, texts[turn], None, tokens, ignore_eos=True))

    def reference(turn: int) -> Timed:
        ends = wrapped._eos_token_ids
        wrapped._eos_token_ids = set()
        try:
            return timed(_blocks(stream_generate(theirs, wrapped, texts[turn], max_tokens=tokens)))
        finally:
            wrapped._eos_token_ids = ends

    return {"ours": ours, "mlx_lm": reference}


def _blocks(replies: Any) -> Iterator[list[int]]:
    """One id per step; the last response repeats nothing."""
    yield from ([reply.token] for reply in replies)


def ratios(arms: dict[str, Callable[[int], Timed]], runs: int) -> tuple[bool, dict[str, Any]]:
    """(same ids on both sides, ratios of decode speed and of time to the first token)."""
    done = take_turns(arms, runs)
    pairs = list(zip(done["ours"], done["mlx_lm"], strict=True))
    return all(a.ids == b.ids for a, b in pairs), {
        "decode_ratio": describe([a.rate / b.rate for a, b in pairs]),
        "first_token_ratio": describe([a.first_s / b.first_s for a, b in pairs]),
        "ours_per_second": describe([a.rate for a, _ in pairs], 1),
        "mlx_lm_per_second": describe([b.rate for _, b in pairs], 1),
    }


if __name__ == "__main__":
    sys.exit(main())
