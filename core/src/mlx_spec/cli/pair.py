"""`spec pair`: would these two work together, how exactly, and what would it gain?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..errors import PairError
from .options import load_pair, pair_options, read_pair_options
from .output import print_json, print_table, progress

if TYPE_CHECKING:
    from ..pair import Pair

SAMPLE_TOKENS = 96


@click.command("pair")
@pair_options
@click.option("-p", "--prompt", help="Text to measure the gain on; default: a short built-in one.")
@click.option("--no-measure", is_flag=True, help="Findings and probe only.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(prompt: str | None, no_measure: bool, as_json: bool, **values: Any) -> None:
    """Check a target and a drafter: findings, probe verdict, and the gain measured on a short reply."""
    chosen = read_pair_options(values)
    try:
        with progress("loading and probing") as steps:
            pair = load_pair(values, chosen, steps)
    except PairError as refused:
        if as_json:
            print_json({"findings": [f.as_dict() for f in refused.findings]})
        raise
    gain = None
    if pair.plan.active and not no_measure:
        with progress("measuring"):
            gain = measure_gain(pair, prompt)
    if as_json:
        card = dict(pair.drafter.card.extra) if pair.drafter is not None else {}
        print_json({"plan": asdict(pair.plan), "drafter": card, "gain": gain})
        return
    print_table(("", ""), _rows(pair, gain) if pair.drafter is not None else _alone(pair))


def measure_gain(pair: Pair, prompt: str | None) -> dict[str, Any]:
    """Tokens per second, plain and speculative, on one short greedy reply; both warmed up first."""
    from ..api import encode, generate
    from ..probe import TEXTS

    ids = encode(pair, prompt or TEXTS[0]) if pair.tokenizer is not None else [1, 2, 3]
    runs = {}
    for name, speculative in (("plain", False), ("speculative", True)):
        generate(pair, ids, None, 8, ignore_eos=True, speculative=speculative)
        runs[name] = generate(pair, ids, None, SAMPLE_TOKENS, ignore_eos=True, speculative=speculative)
    plain, fast = runs["plain"], runs["speculative"]
    base = plain.timings.predicted_per_second
    return {
        "plain_per_second": base,
        "speculative_per_second": fast.timings.predicted_per_second,
        "ratio": fast.timings.predicted_per_second / base if base else None,
        "tokens_per_round": fast.speculation.tokens_per_round,
        "acceptance_by_position": fast.speculation.acceptance_by_position,
        "token_ids_equal": plain.token_ids == fast.token_ids,
        "governor": fast.speculation.governor,
    }


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
        rows += [(key.replace("_", " "), value) for key, value in pair.drafter.card.extra.items()]
    if gain is not None:
        accept = ", ".join(f"{a:.0%}" for a in gain["acceptance_by_position"])
        rows += [
            ("plain", f"{gain['plain_per_second']:.1f} tokens/s"),
            ("speculative", f"{gain['speculative_per_second']:.1f} tokens/s ({gain['ratio']:.2f}x)"),
            ("acceptance", f"{accept} by position, {gain['tokens_per_round']:.2f} tokens per forward"),
            ("tokens equal", "yes" if gain["token_ids_equal"] else "NO"),
            ("governor", gain["governor"]),
        ]
    return rows
