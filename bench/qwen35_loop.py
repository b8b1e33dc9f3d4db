"""Our speculative loop against mlx-vlm's on one Qwen checkpoint, in turns, in one process. Goal: > 1x.

    make oracles                                     an environment with mlx-vlm 0.7.10
    .venv-oracles/bin/python bench/qwen35_loop.py [--tokens 96] [--runs 15] [--save]

Both loops run the same weights on mlx's own operations, the same prompts, greedily, at the same L, one request;
the head of the checkpoint drafts, unpacked on both sides. `fixed` is our loop without its governor, which is what
mlx-vlm's does, `adaptive` is our default, `packed` our default with the head in 4 bits as it is loaded unless told
otherwise, `plain` our plain decoding. mlx-vlm's rounds get the hidden states of the whole prompt, which its own
generator leaves out: its head then sees as much as ours. Goal: `fixed` faster, with equal tokens. Ours must be equal
in every arm. mlx-vlm rounds its convolution differently in single steps and in blocks, and scans prompts in chunks,
so in bfloat16 its reply may leave ours at a near tie (`mlx_vlm_differs` counts); tokens are compared in float32.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from common import (
    Checkpoints,
    Timed,
    by_position,
    describe,
    finish,
    ids_only,
    parser,
    prompts,
    qwen35_checkpoints,
    same_operations,
    shown,
    take_turns,
    timed,
)

# transformers looks for a package called kernels, and would take the script of that name in this folder for it.
sys.path.remove(str(Path(__file__).resolve().parent))

from mlx.utils import tree_flatten
from mlx_vlm.models.qwen3_5_text import LanguageModel, ModelConfig
from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.speculative.mtp import _mtp_rounds

from mlx_spec.api import generate, stream
from mlx_spec.pair import Pair, load
from mlx_spec.settings import reset_settings

MADE_FOR = "0.7.10"


class TheirLoop:
    """mlx-vlm's model, drafter and rounds over the weights of a loaded pair."""

    def __init__(self, pair: Pair, files: Checkpoints, width: int, dtype: mx.Dtype | None = None):
        config = json.loads((files.target / "config.json").read_text())
        text = ModelConfig.from_dict(config.get("text_config", config))
        self.model = LanguageModel(text)
        self.model.load_weights(list(tree_flatten(pair.target.model.language_model.parameters())))
        self.drafter = load_drafter(str(files.drafter), kind="mtp")[0]
        if dtype is not None:
            self.drafter.set_dtype(dtype)
        mx.eval(self.model.parameters(), self.drafter.parameters())
        self.width = width

    def reply(self, prompt: list[int], tokens: int) -> Iterator[list[int]]:
        """Token ids as the loop yields them, the first one from the prompt."""
        cache, ids = self.model.make_cache(), mx.array([prompt])
        out = self.model(ids, cache=cache, return_hidden=True, return_shared_kv=True)
        first = int(mx.argmax(out.logits[0, -1]).item())
        yield [first]
        rounds = _mtp_rounds(
            self.model, self.drafter, cache, out.hidden_states[-1], {}, prompt_tokens=ids, first_bonus=first,
            max_tokens=tokens, sampler=_argmax, draft_block_size=self.width, greedy_sampling=True,
        )  # fmt: skip
        for token, _ in rounds:
            yield [int(token)]

    def rounds(self) -> list[tuple[int, int]]:
        """(drafted, accepted) of every round of the last reply."""
        return [(int(d), int(a)) for d, a in zip(self.drafter.draft_lens, self.drafter.accept_lens, strict=True)]


def _argmax(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)


def main() -> int:
    """Compare at one width; exit 1 when tokens differ or our loop is slower."""
    same_operations()
    arguments = parser(__doc__, "qwen35_loop", tokens=96, runs=15)
    arguments.add_argument("--width", type=int, default=3, help="L of both loops")
    options = arguments.parse_args()
    if version("mlx-vlm") != MADE_FOR:
        print(
            f"mlx-vlm {version('mlx-vlm')}: found, expected {MADE_FOR}, whose calls this script makes", file=sys.stderr
        )
    figures = compare(qwen35_checkpoints(options), options.width, options.tokens, options.runs)
    finish("qwen35_loop", options, figures)
    return 0 if figures["tokens_equal"] and figures["fixed_over_mlx_vlm"]["median"] > 1 else 1


def opened(files: Checkpoints, width: int, packed: bool, dtype: str | None = None) -> Pair:
    """The pair with its head packed at load or not, replies as ids."""
    os.environ["MLX_SPEC_QUANTIZE_DRAFTER"] = "1" if packed else "0"
    reset_settings()
    return load(str(files.target), str(files.drafter), "mtp", width, dtype=dtype)


def compare(files: Checkpoints, width: int, tokens: int, runs: int) -> dict[str, Any]:
    """Ratios of decode speed, acceptance by position of both loops, equality of tokens."""
    pair, packed = opened(files, width, packed=False), opened(files, width, packed=True)
    texts = prompts(pair, runs + 2)
    for one in (pair, packed):
        ids_only(one).token_limit = None
    theirs = TheirLoop(pair, files, width)
    done = take_turns(arms(pair, packed, theirs, texts, tokens), runs)
    rates = {name: [run.rate for run in found] for name, found in done.items()}
    ours = [{tuple(found[i].ids) for name, found in done.items() if name != "mlx_vlm"} for i in range(runs)]
    differs = sum(tuple(done["mlx_vlm"][i].ids) not in ours[i] for i in range(runs))
    equal = all(len(ids) == 1 for ids in ours) and same_in_float32(files, width, texts, tokens)
    out: dict[str, Any] = {"pair": files.label, "block_size": width, "tokens_equal": equal, "mlx_vlm_differs": differs}
    for arm, base in OVER:
        ratios = [a / b for a, b in zip(rates[arm], rates[base], strict=True)]
        out[f"{arm}_over_{base}"] = describe(ratios)
    firsts = zip(done["fixed"], done["mlx_vlm"], strict=True)
    out["first_token_ours_over_mlx_vlm"] = describe([a.first_s / b.first_s for a, b in firsts])
    out["acceptance"] = kept(pair, theirs, texts, tokens)
    out["per_second"] = {name: describe(values, 1) for name, values in rates.items()}
    show(out)
    return out


def same_in_float32(files: Checkpoints, width: int, texts: list[list[int]], tokens: int) -> bool:
    """Whether both loops give the same tokens for the first texts when everything is float32."""
    pair = ids_only(opened(files, width, packed=False, dtype="float32"))
    pair.token_limit = None
    theirs = TheirLoop(pair, files, width, mx.float32)
    for prompt in texts[:4]:
        mine = generate(pair, prompt, None, tokens, ignore_eos=True, adaptive=False).token_ids
        if mine != [token for block in theirs.reply(prompt, tokens) for token in block]:
            return False
    return True


OVER = (
    ("fixed", "mlx_vlm"),
    ("adaptive", "mlx_vlm"),
    ("packed", "mlx_vlm"),
    ("fixed", "plain"),
    ("adaptive", "plain"),
    ("packed", "plain"),
    ("mlx_vlm", "plain"),
)


def arms(
    pair: Pair, packed: Pair, theirs: TheirLoop, texts: list[list[int]], tokens: int
) -> dict[str, Callable[[int], Timed]]:
    """The ways to decode one prompt."""

    def ours(pair: Pair, **how: bool) -> Callable[[int], Timed]:
        return lambda turn: timed(e.token_ids for e in stream(pair, texts[turn], None, tokens, ignore_eos=True, **how))

    return {
        "fixed": ours(pair, adaptive=False),
        "mlx_vlm": lambda turn: timed(theirs.reply(texts[turn], tokens)),
        "adaptive": ours(pair),
        "packed": ours(packed),
        "plain": ours(pair, speculative=False),
    }


def kept(pair: Pair, theirs: TheirLoop, texts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Acceptance by position and tokens per round of both loops, without the last round of each reply.

    Nor with our first one: it drafts the first token of the reply, which mlx-vlm takes from the prompt's forward.
    """
    ours: list[tuple[int, int]] = []
    others: list[tuple[int, int]] = []
    for prompt in texts:
        done = generate(pair, prompt, None, tokens, ignore_eos=True, adaptive=False)
        ours += [(len(r.draft_ids), r.accepted) for r in done.rounds if r.draft_ids][1:-1]
        for _ in theirs.reply(prompt, tokens):
            pass
        others += theirs.rounds()[:-1]
    found = {}
    for name, rounds in (("ours", ours), ("mlx_vlm", others)):
        found[name] = by_position(rounds)
        found[f"tokens_per_round_{name}"] = round(1 + statistics.mean(a for _, a in rounds), 3)
    return found


def show(out: dict[str, Any]) -> None:
    """One line of it all."""
    seen = out["acceptance"]
    print(
        f"{out['pair']}, L={out['block_size']}: ours (fixed) {shown(out['fixed_over_mlx_vlm'])}x mlx-vlm, "
        f"adaptive {shown(out['adaptive_over_mlx_vlm'])}x, packed {shown(out['packed_over_mlx_vlm'])}x; over plain: "
        f"ours {shown(out['fixed_over_plain'])}x, mlx-vlm {shown(out['mlx_vlm_over_plain'])}x; "
        f"tokens {'equal' if out['tokens_equal'] else 'DIFFER'}; kept by position {seen['ours']} and {seen['mlx_vlm']}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
