"""`spec probe`: how exact a block verify is on this machine, freshly measured."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from .options import load_pair, pair_options, read_pair_options
from .output import note, print_json, print_table, progress

if TYPE_CHECKING:
    from ..types import ExactnessReport

TIE = (
    "note: a gap of 0 is a tie: two tokens share the highest logit of a row, which rounding to bfloat16 makes common. "
    "Of equal bytes the same one is picked on both sides; where bytes differ, a tie may go either way."
)


@click.command("probe")
@pair_options
@click.option("--memo", is_flag=True, help="Accept a remembered verdict instead of measuring again.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(memo: bool, as_json: bool, **values: Any) -> None:
    """Run real rounds with rollback against single steps and print the verdict per width."""
    from ..loading import how_to_draft
    from ..probe import prove

    chosen = read_pair_options(values)
    pair = load_pair({**values, "no_probe": True}, chosen)
    if pair.drafter is None or not pair.plan.active:
        raise UsageError(
            "probe",
            found=f"no drafter in use ({pair.plan.reason})",
            expected="a pair",
            next_step=how_to_draft(pair.target_ref)
            if pair.drafter is None
            else "Change the setting that turned it off",
            code="U40",
        )
    for text in pair.plan.notes:
        note(f"note: {text}")
    with progress("probing") as steps:
        report = prove(pair, fresh=not memo, tick=steps.describe)
    if as_json:
        print_json({**asdict(report), "block_size_from": pair.plan.block_size_from})
        return
    rows = [
        ("level", report.level),
        ("width", f"L={report.width} of L={report.asked_width} asked ({pair.plan.block_size_from})"),
        ("rows compared", f"{sum(w['rows'] for w in report.widths)}, {report.rows} of them at {shown(report)}"),
        ("rows picking another token", report.mismatches),
        ("largest logit difference", f"{report.max_abs_diff:.3g}"),
        ("smallest top-2 gap", f"{report.min_top2_gap:.3g}{'' if report.min_top2_gap else ' (a tie)'}"),
        ("first differing layer", report.first_layer or "none"),
        ("source", report.source),
        *sorted(report.environment.items()),
    ]
    print_table(("", ""), rows)
    print_table(
        ("L", "level", "rows", "unequal bytes", "other token", "max diff", "min gap"),
        [
            (
                w["width"],
                w["level"],
                w["rows"],
                w["unequal"],
                w["mismatches"],
                f"{w['max_abs_diff']:.3g}",
                f"{w['min_gap']:.3g}",
            )
            for w in report.widths
        ],
    )
    if not all(w["min_gap"] for w in report.widths):
        note(TIE)
    if report.reason:
        note(f"note: {report.reason}")


def shown(report: ExactnessReport) -> str:
    """The width that the report's own figures are of."""
    return f"L={report.width if report.width > 1 else report.asked_width}"
