"""`spec inspect`: what a directory is, who serves it, what it carries, what fits it and what it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..head_stages import NOTHING
from ..memory import size
from ..width import MAX_BLOCK_SIZE
from .output import note, print_json, print_table, progress
from .values import Whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..head_stages import Stage
    from ..inspection import Inspection

SHOWN_LAYERS = 3  # whose quantisation is of their own
STAGES = ("head", "state", "found", "next step")


@click.command("inspect")
@click.argument("model")
@click.option(
    "--drafter",
    "drafters",
    multiple=True,
    metavar="DIR",
    help="Also say whether this drafter fits; may be given several times.",
)
@click.option(
    "--context", type=Whole(min=1), help="Positions for the memory estimate. Default: the context, 8192 at most."
)
@click.option("--kv-bits", type=click.Choice(["4", "8"]), help="Estimate for a quantised K/V state.")
@click.option("--probe", is_flag=True, help="Load the model with its heads and prove them, for the last stage.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    drafters: tuple[str, ...],
    context: int | None,
    kv_bits: str | None,
    probe: bool,
    as_json: bool,
) -> None:
    """Say what MODEL (a directory, a hub id or demo:PLUGIN) is; exit 1 when it cannot be used as it is.

    Exit 1 also when a drafter given with --drafter does not fit it.

    Reads files only. Of a drafter head, in the model or given with --drafter, every stage is told: declared in
    config.json, tensors, shapes, norms, quantisation, the trunk it belongs to, and what the exactness probe found, if
    it ran before.
    """
    from ..inspection import inspect, prove_heads

    with progress("inspecting"):
        report = inspect(model, drafters, context, int(kv_bits) if kv_bits else None)
    if probe:
        with progress("probing"):
            prove_heads(report)
    if as_json:
        print_json(as_object(report))
    else:
        print_table(("", ""), rows(report))
        if report.stages:
            print_table(STAGES, stage_rows(report.stages))
        if report.drafters:
            fits = [(d.kind, d.source, "yes" if d.fits else "no", d.reason) for d in report.drafters]
            print_table(("drafter", "from", "fits", "why"), fits)
        for drafter in report.drafters:
            if drafter.stages:
                print_table(STAGES, stage_rows(drafter.stages), f"head in {drafter.source}")
        for problem in report.problems:
            note(problem.line())
    for text in () if as_json else report.notes:
        note(f"note: {text}")
    refused = [drafter for drafter in report.drafters if drafter.source in drafters and not drafter.fits]
    for drafter in refused:
        note(drafter.reason)
    if refused or not report.ok:
        ctx.exit(1)


def stage_rows(stages: Sequence[Stage]) -> list[tuple[str, str, str, str]]:
    """Stages as rows; a next step is shown where there is one, and once."""
    rows: list[tuple[str, str, str, str]] = []
    said = {NOTHING}
    for stage in stages:
        rows.append((stage.name, stage.state, stage.reason, "" if stage.next_step in said else stage.next_step))
        said.add(stage.next_step)
    return rows


def as_object(report: Inspection) -> dict[str, Any]:
    """The JSON object."""
    from dataclasses import asdict

    memory = asdict(report.memory) | {"total_bytes": report.memory.total_bytes} if report.memory is not None else None
    card = asdict(report.card) | {"extra": dict(report.card.extra)} if report.card is not None else None
    return asdict(report) | {"memory": memory, "card": card, "ok": report.ok}


def rows(report: Inspection) -> list[tuple[str, str]]:
    """Label and value of each line; lines without a value are left out."""
    tokenizer = report.tokenizer
    lines: list[tuple[str, Any]] = [
        ("path", report.path),
        ("kind", f"{report.kind} ({report.reason})"),
        ("model_type", report.model_type),
        ("plugin", f"{report.owner} ({report.distribution})" if report.owner else ""),
        ("drafter", _card(report)),
        ("parameters", _count(report.parameters)),
        ("weights", _weights(report)),
        ("quantisation", _quantisation(report)),
        ("layers", report.layers),
        ("hidden_size", report.hidden_size),
        ("vocab_size", report.vocab_size),
        ("context", report.context or ("not declared" if report.layers else "")),
        ("heads", ", ".join(f"{h.prefix} ({h.tensors} tensors, {size(h.nbytes)})" for h in report.heads)),
        ("tokenizer", ", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in tokenizer.items())),
        ("end ids", ", ".join(map(str, report.end_ids)) or ("none" if tokenizer else "")),
        ("memory", _memory(report)),
        ("kernels", _kernels(report)),
    ]
    return [(label, str(value)) for label, value in lines if value]


def _card(report: Inspection) -> str:
    card = report.card
    if card is None:
        return ""
    width = f", block_size {card.block_size}" if card.block_size else ""
    if card.block_size and card.block_size > MAX_BLOCK_SIZE:
        width += f" (declared; at most {MAX_BLOCK_SIZE} are used)"
    return f"{card.kind}{width}; pass it as --draft-model"


def _weights(report: Inspection) -> str:
    if not report.tensors:
        return ""
    dtypes = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in sorted(report.dtypes.items()))
    return f"{report.tensors} tensors in {report.files} file{'s' * (report.files > 1)}: {dtypes}"


def _quantisation(report: Inspection) -> str:
    settings = report.quantisation or {}
    own = {name: value for name, value in settings.items() if isinstance(value, dict | bool)}
    named = [f"{name} {_packing(value)}" for name, value in list(own.items())[:SHOWN_LAYERS]]
    more = [f"{len(own) - SHOWN_LAYERS} more with settings of their own"] if len(own) > SHOWN_LAYERS else []
    return "; ".join(part for part in [_packing(settings), *named, *more] if part)


def _packing(settings: dict[str, Any] | bool) -> str:
    """Settings of one layer, or of all that have none of their own."""
    if isinstance(settings, bool):
        return "quantised" if settings else "not quantised"
    plain = {key: value for key, value in settings.items() if isinstance(value, str | int | float)}
    return ", ".join(f"{key} {value}" for key, value in plain.items() if not isinstance(value, bool))


def _memory(report: Inspection) -> str:
    need = report.memory
    if need is None:
        return ""
    kv = f" + {size(need.kv_bytes)} K/V at {need.context} positions ({size(need.kv_bytes_per_1k_tokens)} per 1000)"
    state = f" + {size(need.state_bytes)} recurrent state" if need.state_layers else ""
    return f"{size(need.weights_bytes)} weights{kv if need.kv_layers else ''}{state}" + (
        ", K/V and state per request" if need.state_layers else ""
    )


def _kernels(report: Inspection) -> str:
    """Of the target alone: a drafter's layers run on kernels too, and the start line counts both."""
    line = report.kernels.line() if report.kernels is not None else ""
    return f"{line} (the head's layers come on top)" if line and report.heads else line


def _count(number: int) -> str:
    """1234567 -> "1.23 M"."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if number >= limit:
            return f"{number / limit:.2f} {unit}"
    return str(number) if number else ""
