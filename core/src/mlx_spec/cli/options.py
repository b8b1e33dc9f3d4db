"""Command-line options that several commands share, and how they become a loaded pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from ..demos import DEMO, demo_pair
from ..errors import Finding, PairError
from .output import Steps, note
from .values import WHOLE, Whole

if TYPE_CHECKING:
    from ..pair import Pair
    from ..registry import Demo

KINDS_HELP = (
    "mtp, dflash, full-model, prompt-lookup, none, or a kind a plugin brings. Default: what the drafter directory is. "
    "Without --draft-model, mtp takes the head that the target's checkpoint carries."
)


@dataclass(slots=True)
class PairOptions:
    """What the pair options said, resolved against the environment and the bundled demo."""

    target: str
    draft_model: str | None
    draft_model_from: str
    kind: str | None
    kind_from: str
    block_size: int | None
    block_size_from: str
    options: dict[str, Any]
    acceptance: str | None
    adaptive: bool | None
    demo: Demo | None


def pair_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """-m, --draft-model, --draft-kind, --draft-block-size, --spec-config, --kv-bits, --dtype, --exactness."""
    decorators = [
        click.option("-m", "--model", "target",
                     help="Target: directory, hub id, or demo:PLUGIN. Default: the first bundled demo pair."),
        click.option("--draft-model", help="Drafter: directory, hub id, or demo:PLUGIN."),
        click.option("--draft-kind", help=KINDS_HELP),
        click.option("--draft-block-size", type=WHOLE,
                     help="L: rows verified per round, anchor counted (K drafts = L - 1)."),
        click.option("--spec-config",
                     help='JSON, e.g. \'{"method":"mtp","num_speculative_tokens":3}\' (K, without the anchor).'),
        click.option("--exactness", type=click.Choice(["bitwise", "greedy", "distribution", "lossy"]), default="greedy",
                     show_default=True,
                     help="Weakest level to draft at, else the reply is decoded plainly. bitwise: a block gives the "
                          "bytes of single steps; greedy: the same tokens; distribution: the same law of sampling."),
        click.option("--no-probe", is_flag=True, help="Skip the exactness probe; the pair then drafts unproven."),
        click.option("--kv-bits", type=click.Choice(["4", "8"]), help="Quantise K/V of full-attention layers."),
        click.option("--kv-group-size", type=click.Choice(["32", "64", "128"]), default="64", show_default=True,
                     help="Values per scale of quantised K/V; divides the head size."),
        click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]),
                     help="Cast weights that are not quantised."),
        click.option("--prefill-step", type=Whole(1), help="Prompt tokens per prefill chunk."),
    ]  # fmt: skip
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


def read_pair_options(values: dict[str, Any]) -> PairOptions:
    """Merge flags, --spec-config and environment; a key given twice is an error. Says a bundled pair."""
    from ..loading import check_kind
    from ..settings import choose
    from ..spec_config import OPTION, normalise_kind
    from ..width import check_block_size, parse_spec_config

    config = parse_spec_config(values.get("spec_config"), flags=_given(values))

    def chosen(field: str, configured: Any) -> tuple[Any, str]:
        """Flag, --spec-config, environment, default: the first that says something, and its name."""
        if values.get(field) is None and configured is not None:
            return configured, OPTION
        return choose(field, values.get(field))

    kind, kind_from = chosen("draft_kind", config.kind)
    kind = normalise_kind(kind) if kind is not None else None
    block, block_from = chosen("draft_block_size", config.block_size)
    model, model_from = chosen("draft_model", config.model)
    if block is not None:
        check_block_size(block, block_from)
    check_kind(model, kind, name_from=model_from, kind_from=kind_from)
    target, demo = values.get("target"), None
    if target is None or target.startswith(DEMO):
        bundled = demo_pair(None if target is None else target.removeprefix(DEMO))
        note(f"{'bundled' if target else 'no -m given: using the bundled'} demo pair ({bundled.target})")
        target, demo = str(bundled.target), bundled
        if model is None and kind in (None, "mtp"):
            model = str(bundled.drafter)
    return PairOptions(
        target=target,
        draft_model=model,
        draft_model_from=model_from,
        kind=kind,
        kind_from=kind_from,
        block_size=block,
        block_size_from=block_from,
        options=dict(config.options),
        acceptance=config.acceptance,
        adaptive=config.adaptive,
        demo=demo,
    )


def _given(values: dict[str, Any]) -> dict[str, Any]:
    names = ("draft_model", "draft_kind", "draft_block_size", "acceptance")
    return {name: values[name] for name in names if values.get(name) is not None}


def load_pair(
    values: dict[str, Any],
    chosen: PairOptions | None = None,
    steps: Steps | None = None,
    check: Callable[[Pair], object] | None = None,
) -> Pair:
    """The pair these options ask for; what was found about it is told, a reason to refuse it raised.

    check: as in `pair.load`.
    """
    from ..pair import load
    from ..settings import get_settings

    chosen = chosen or read_pair_options(values)
    bits = values.get("kv_bits")
    try:
        pair = load(
            chosen.target,
            chosen.draft_model,
            chosen.kind,
            chosen.block_size,
            block_size_from=chosen.block_size_from,
            drafter_from=chosen.draft_model_from,
            kind_from=chosen.kind_from,
            exactness=values.get("exactness", "greedy"),
            probe=get_settings().probe and not values.get("no_probe"),
            kv_bits=int(bits) if bits else None,
            kv_group_size=int(values.get("kv_group_size") or 64),
            prefill_step=values.get("prefill_step"),
            dtype=values.get("dtype"),
            options=chosen.options,
            check=check,
            tick=steps.describe if steps is not None else None,
        )
    except PairError as refused:
        _tell([finding for finding in refused.findings if finding.severity != "error"])
        raise
    _tell(pair.plan.findings)
    return pair


def _tell(findings: Sequence[Finding]) -> None:
    for finding in findings:
        note(finding.line())
