"""Our speculative loop against mlx-vlm's on the same Gemma 4 pair, in turns, in one process.

    make oracles                                     an environment with mlx-vlm 0.7.10
    .venv-oracles/bin/python bench/loop_vs_mlx_vlm.py [--tokens 96] [--runs 21] [--save]

Both loops run the same weights on mlx's own operations, the same prompts, greedily, at the same L, one request.
`fixed` is our loop without its governor, which is what mlx-vlm's does; `adaptive` is our default, `plain` our
plain decoding. mlx-vlm's prompt is processed as its own generator does it, and its rounds are called with the
arguments it gives them. Only a trained pair tells something about speed: a random one accepts next to nothing.
"""

from __future__ import annotations

import json
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
    checkpoints,
    describe,
    finish,
    ids_only,
    parser,
    prompts,
    same_operations,
    shown,
    take_turns,
    timed,
)

# transformers looks for a package called kernels, and would take the script of that name in this folder for it.
sys.path.remove(str(Path(__file__).resolve().parent))

from mlx.utils import tree_flatten
from mlx_vlm.models.gemma4.config import TextConfig
from mlx_vlm.models.gemma4.language import LanguageModel
from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.speculative.utils import run_speculative_rounds

from mlx_spec.api import generate, stream
from mlx_spec.pair import Pair, load

MADE_FOR = "0.7.10"


class TheirLoop:
    """mlx-vlm's model, drafter and rounds over the weights of a loaded pair."""

    def __init__(self, pair: Pair, files: Checkpoints, width: int):
        config = json.loads((files.target / "config.json").read_text())
        self.model = LanguageModel(TextConfig.from_dict(config.get("text_config", config)))
        stack = getattr(pair.target.model, "language_model", pair.target.model)
        self.model.load_weights(list(tree_flatten(stack.parameters())))
        self.drafter = load_drafter(str(files.drafter), kind="mtp")[0]
        mx.eval(self.model.parameters(), self.drafter.parameters())
        self.width = width

    def reply(self, prompt: list[int], tokens: int) -> Iterator[list[int]]:
        """Token ids as the loop yields them, the first one from the prompt."""
        cache = self.model.make_cache()
        ids = mx.array([prompt])
        out = self.model(ids, cache=cache, return_hidden=True, return_shared_kv=True, logits_to_keep=1)
        first = mx.argmax(out.logits[:, -1], axis=-1)
        rounds = run_speculative_rounds(
            self.model, self.drafter, cache, ids, first, out.logits, out,
            draft_kind="mtp", max_tokens=tokens, sampler=_argmax, draft_block_size=self.width, sampler_is_greedy=True,
        )  # fmt: skip
        for count, (token, _) in enumerate(rounds, 1):
            yield [int(token)]
            if count == tokens:
                break

    def rounds(self) -> list[tuple[int, int]]:
        """(drafted, accepted) of every round of the last reply."""
        return [(int(d), int(a)) for d, a in zip(self.drafter.draft_lens, self.drafter.accept_lens, strict=True)]


def _argmax(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)


def main() -> int:
    """Compare at the pair's own width; exit 1 when tokens differ or our loop is slower."""
    same_operations()
    options = parser(__doc__, "loop_vs_mlx_vlm", tokens=96, runs=21).parse_args()
    if version("mlx-vlm") != MADE_FOR:
        print(
            f"mlx-vlm {version('mlx-vlm')}: found, expected {MADE_FOR}, whose calls this script makes", file=sys.stderr
        )
    files = checkpoints(options)
    if files.drafter is None:
        print("drafter: found none, expected a directory. Pass --drafter", file=sys.stderr)
        return 2
    figures = compare(files, options.tokens, options.runs)
    figures["comparable"] = files.label != "tiny random gemma4"
    finish("loop_vs_mlx_vlm", options, figures)
    return 0 if figures["tokens_equal"] and figures["fixed_over_mlx_vlm"]["median"] > 1 else 1


def compare(files: Checkpoints, tokens: int, runs: int) -> dict[str, Any]:
    """Ratios of decode speed, acceptance by position of both loops, equality of tokens."""
    pair = load(str(files.target), str(files.drafter))
    texts = prompts(pair, runs + 2)
    ids_only(pair).token_limit = None
    theirs = TheirLoop(pair, files, pair.plan.block_size)
    done = take_turns(arms(pair, theirs, texts, tokens), runs)
    rates = {name: [run.rate for run in found] for name, found in done.items()}
    equal = all(len({tuple(found[i].ids) for found in done.values()}) == 1 for i in range(runs))
    out: dict[str, Any] = {"pair": files.label, "block_size": pair.plan.block_size, "tokens_equal": equal}
    for name in ("fixed", "adaptive"):
        out[f"{name}_over_mlx_vlm"] = _over(rates, name, "mlx_vlm")
        out[f"{name}_over_plain"] = _over(rates, name, "plain")
    out["mlx_vlm_over_plain"] = _over(rates, "mlx_vlm", "plain")
    out["first_token_ours_over_mlx_vlm"] = describe(
        [a.first_s / b.first_s for a, b in zip(done["fixed"], done["mlx_vlm"], strict=True)]
    )
    out["acceptance"] = same_rounds(pair, theirs, texts, tokens)
    out["per_second"] = {name: describe(values, 1) for name, values in rates.items()}
    seen = out["acceptance"]
    print(
        f"{files.label}, L={pair.plan.block_size}: ours (fixed) {shown(out['fixed_over_mlx_vlm'])}x mlx-vlm, "
        f"adaptive {shown(out['adaptive_over_mlx_vlm'])}x; over plain: ours {shown(out['fixed_over_plain'])}x, "
        f"mlx-vlm {shown(out['mlx_vlm_over_plain'])}x; tokens {'equal' if equal else 'DIFFER'}; "
        f"{seen['rounds_differing']} of {seen['rounds_compared']} rounds accept another number, "
        f"by position {seen['acceptance_ours']} and {seen['acceptance_mlx_vlm']}",
        file=sys.stderr,
    )
    return out


def _over(rates: dict[str, list[float]], arm: str, base: str) -> dict[str, Any]:
    return describe([a / b for a, b in zip(rates[arm], rates[base], strict=True)])


def arms(pair: Pair, theirs: TheirLoop, texts: list[list[int]], tokens: int) -> dict[str, Callable[[int], Timed]]:
    """The four ways to decode one prompt."""

    def ours(**how: bool) -> Callable[[int], Timed]:
        return lambda turn: timed(e.token_ids for e in stream(pair, texts[turn], None, tokens, ignore_eos=True, **how))

    return {
        "fixed": ours(adaptive=False),
        "mlx_vlm": lambda turn: timed(theirs.reply(texts[turn], tokens)),
        "adaptive": ours(),
        "plain": ours(speculative=False),
    }


def same_rounds(pair: Pair, theirs: TheirLoop, texts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Both loops from the same first token on, round by round, without the last round of a reply.

    mlx-vlm takes the first token from the prompt and then begins its rounds; so do ours here, by having that
    token at the end of the prompt. Length cuts the last round, and the two count that differently.
    """
    ours: list[tuple[int, int]] = []
    others: list[tuple[int, int]] = []
    differ = 0
    for prompt in texts:
        first = next(block[0] for block in theirs.reply(prompt, tokens))
        for _ in theirs.reply(prompt, tokens):
            pass
        done = generate(pair, [*prompt, first], None, tokens - 1, ignore_eos=True, adaptive=False)
        left = [(len(r.draft_ids), r.accepted) for r in done.rounds if r.draft_ids][:-1]
        right = theirs.rounds()[:-1]
        count = min(len(left), len(right))
        differ += sum(a != b for a, b in zip(left[:count], right[:count], strict=True))
        ours, others = ours + left[:count], others + right[:count]
    return {
        "rounds_compared": len(ours),
        "rounds_differing": differ,
        "acceptance_ours": by_position(ours),
        "acceptance_mlx_vlm": by_position(others),
        "tokens_per_round": round(1 + sum(a for _, a in ours) / len(ours), 3),
    }


if __name__ == "__main__":
    sys.exit(main())
