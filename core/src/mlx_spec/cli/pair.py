"""`spec pair`: would these two work together, how exactly, and what would it gain?"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import click

from ..errors import PairError
from .options import load_pair, pair_options, read_pair_options
from .output import print_json, print_table, progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..pair import Pair
    from ..request import Result

SAMPLE_TOKENS = 96
PAIRED = "a median of paired runs, which does not divide from the speeds"
TURNS, LONG = 3, 10.0  # runs of each kind, and seconds after which no further turn begins


@click.command("pair")
@pair_options
@click.option("-p", "--prompt", help="Text to measure the gain on; default: a short built-in one.")
@click.option("--no-measure", is_flag=True, help="Findings and probe only.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(prompt: str | None, no_measure: bool, as_json: bool, **values: Any) -> None:
    """Check a target and a drafter: findings, probe verdict, and the gain measured on a short reply."""
    chosen = read_pair_options(values)
    if prompt is not None:
        need_tokenizer(chosen.target)
    try:
        with progress("loading and probing") as steps:
            pair = load_pair(values, chosen, steps)
    except PairError as refused:
        if as_json:
            print_json({"findings": [f.as_dict() for f in refused.findings]})
        raise
    gain = None
    if pair.plan.active and not no_measure:
        with progress("measuring") as steps:
            gain = measure_gain(pair, prompt, steps.describe)
    if as_json:
        card = dict(pair.drafter.card.extra) if pair.drafter is not None else {}
        print_json({"plan": asdict(pair.plan), "drafter": card, "gain": gain})
        return
    print_table(("", ""), _rows(pair, gain) if pair.drafter is not None else _alone(pair))


def need_tokenizer(target: str) -> None:
    """UsageError for a prompt that a model has no tokenizer for, from its files."""
    from ..intake import no_tokenizer
    from ..loading import open_ref
    from ..tokenizer import lacking

    if lacking(open_ref(target).path):
        raise no_tokenizer()


def measure_gain(pair: Pair, prompt: str | None, tick: Callable[[str], None]) -> dict[str, Any]:
    """Tokens per second, plain and speculative in turns, on one short greedy reply; both warmed up first."""
    from ..api import encode, generate
    from ..probe import TEXTS

    ids = encode(pair, prompt or TEXTS[0]) if pair.tokenizer is not None else [1, 2, 3]
    for speculative in (False, True):
        generate(pair, ids, None, 8, ignore_eos=True, speculative=speculative)
    speeds: tuple[list[float], list[float]] = ([], [])
    ratios: list[float] = []
    replies: list[Result] = []
    begun = time.monotonic()
    while len(ratios) < TURNS and time.monotonic() - begun < LONG:
        tick(f"measuring: turn {len(ratios) + 1} of {TURNS}")
        plain = generate(pair, ids, None, SAMPLE_TOKENS, ignore_eos=True, speculative=False)
        fast = generate(pair, ids, None, SAMPLE_TOKENS, ignore_eos=True)
        for done, rate in zip(speeds, (plain, fast), strict=True):
            done.append(rate.timings.predicted_per_second)
        replies.append(fast)
        ratios.append(speeds[1][-1] / speeds[0][-1] if speeds[0][-1] else 1.0)
    return {
        "plain_per_second": statistics.median(speeds[0]),
        "speculative_per_second": statistics.median(speeds[1]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "verdict": verdict(ratios, fast.speculation.governor),
        "tokens_per_round": statistics.fmean(reply.speculation.tokens_per_round for reply in replies),
        "acceptance_by_position": _acceptance(replies),
        "token_ids_equal": all(reply.token_ids == plain.token_ids for reply in replies),
        "governor": fast.speculation.governor,
    }


def _acceptance(replies: Sequence[Result]) -> list[float]:
    """Accepted / proposed by position, over all replies; as many positions as were proposed at."""
    reports = [reply.speculation for reply in replies]
    proposed = map(sum, zip_longest(*(report.proposed_by_position for report in reports), fillvalue=0))
    accepted = map(sum, zip_longest(*(report.accepted_by_position for report in reports), fillvalue=0))
    return [a / p if p else 0.0 for a, p in zip(accepted, proposed, strict=True)]


def verdict(ratios: Sequence[float], governor: str) -> str:
    """What these ratios, speculative to plain, say of a gain; `governor`: its line about the last reply."""
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    if len(ratios) == 1:
        return f"{middle:.2f}x in one run of each, which says little; spec bench measures more"
    if low > 1:
        words = "it pays on this prompt"
    elif high >= 1:
        words = "undecided on this prompt, the runs disagree; spec bench measures more"
    else:
        words = "it does not pay on this prompt"
        words += ", so replies go on plainly (parked)" if governor.startswith("parked") else ""
    return f"{middle:.2f}x ({low:.2f}-{high:.2f}): {words}"


def _alone(pair: Pair) -> list[tuple[str, object]]:
    """What there is to say of a target without a drafter, and what would make it a pair."""
    from ..loading import idle_head
    from ..plugins import get_manager

    record = get_manager().record(pair.owner)
    claims = record.claims.drafters if record is not None and record.claims is not None else []
    return [
        ("target", f"{pair.target_ref.name}: model_type {pair.target.model_type}, plugin {pair.owner}"),
        ("drafter", "none was asked for: replies are decoded plainly, which needs no proof"),
        ("own head", idle_head(pair.target_ref) or "none that an installed plugin reads"),
        ("to add", "--draft-kind prompt-lookup, which needs no files"),
        *[
            ("or", f"--draft-model DIR of model_type {', '.join(claim.model_types)} ({claim.kind})")
            for claim in claims
            if claim.model_types
        ],
        ("or", "--draft-model DIR of a smaller model with the same tokenizer (full-model)"),
        ("kernels", pair.plan.kernels.line()),
    ]


def _rows(pair: Pair, gain: dict[str, Any] | None) -> list[tuple[str, object]]:
    plan = pair.plan
    rows: list[tuple[str, object]] = [
        ("works", "yes" if plan.active else "no"),
        ("reason", plan.reason),
        ("kind", plan.requested),
        ("block size", f"L={plan.block_size} ({plan.block_size_from})"),
        ("exactness", plan.level),
    ]
    rows += [("note", text) for text in plan.notes]
    if pair.drafter is not None:
        rows += [(f"drafter {key}", _shown(value)) for key, value in pair.drafter.card.extra.items()]
    if gain is not None:
        accept = ", ".join(f"{a:.0%}" for a in gain["acceptance_by_position"])
        per = f"{gain['tokens_per_round']:.2f}"
        rows += [
            ("plain", f"{gain['plain_per_second']:.1f} tokens/s"),
            ("speculative", f"{gain['speculative_per_second']:.1f} tokens/s"),
            ("gain", gain["verdict"]),
            *([("", PAIRED)] if len(gain["ratios"]) > 1 else []),
            ("acceptance", f"{accept + ' by position' if accept else 'no drafts'}, {per} tokens per forward"),
            ("tokens equal", "yes" if gain["token_ids_equal"] else "NO"),
            ("governor", gain["governor"]),
        ]
    return rows


def _shown(value: object) -> object:
    """A fact about a drafter; true and false as a person says them."""
    return ("no", "yes")[value] if isinstance(value, bool) else value
