"""`spec plugins`: what is installed, what it serves, what failed to load."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from ..kernels import check_kernels
from ..plugins import PluginRecord, get_manager
from . import SpecGroup
from .output import on_terminal, print_json, print_table

if TYPE_CHECKING:
    from ..registry import Kernel


@click.command("plugins")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List installed plugins: version, model_types, drafter kinds, kernels, hooks and errors.

    Exit 1 when one of them, or a part of it, cannot be used.
    """
    rows = [describe(record) for record in settled_records(ctx)]
    if as_json:
        print_json({"plugins": rows})
    else:
        _print(rows)
    if any(row["errors"] for row in rows):
        ctx.exit(1)
    with suppress(ImportError):  # a listing works without mlx
        check_kernels()  # last, since a name may be unknown for what the listing shows


def _print(rows: list[dict[str, Any]]) -> None:
    if on_terminal(sys.stdout):
        print_table(("plugin", "distribution", "status", "serves"), [_narrow(row) for row in rows])
    else:
        columns = ("plugin", "distribution", "version", "status", "targets", "drafters", "hooks", "kernels")
        print_table(columns, [_wide(row) for row in rows])
    for row in rows:
        for reason, ops in _idle(row).items():
            print(f"note: plugin {row['name']}: not used here: {', '.join(ops)}: {reason}")
        for error in row["errors"]:
            print(error)


def settled_records(ctx: click.Context) -> list[PluginRecord]:
    """All records after plugins have added their commands, so that refused ones are reported too."""
    root = ctx.find_root().command
    if isinstance(root, SpecGroup):
        root.load_plugin_commands()
    return get_manager().records


def describe(record: PluginRecord) -> dict[str, Any]:
    """One plugin as JSON: names, versions, claims, hooks and errors."""
    claims = record.claims
    return {
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "value": record.value,
        "loaded": record.loaded,
        "model_types": list(claims.targets) if claims else [],
        "drafters": [{"kind": c.kind, "model_types": list(c.model_types)} for c in claims.drafters] if claims else [],
        "kernels": [_describe_kernel(record.name, kernel) for kernel in (claims.kernels if claims else ())],
        "demos": [demo.name for demo in claims.demos] if claims else [],
        "hooks": list(record.hooks),
        "errors": [error.line() for error in record.errors],
    }


def _describe_kernel(owner: str, kernel: Kernel) -> dict[str, Any]:
    """One kernel as JSON; `runs` and `detail` say whether it can run here, as what, or why not.

    `fits` tells a kernel for this device from one for another.
    """
    from ..kernels import device_kind, judge

    try:
        device = device_kind()
    except ImportError as error:  # a listing works without mlx, the kernels do not
        fits, runs, detail = True, False, str(error)
    else:
        found = judge(owner, kernel, device)
        fits, runs, detail = found.fits, found.ok, found.detail
    return {
        "op": kernel.op,
        "backends": list(kernel.backends),
        "claim": kernel.claim,
        "fits": fits,
        "runs": runs,
        "detail": detail,
    }


def _idle(row: dict[str, Any]) -> dict[str, list[str]]:
    """Reason -> ops of the kernels for this device that cannot run."""
    idle: dict[str, list[str]] = {}
    for kernel in row["kernels"]:
        if kernel["fits"] and not kernel["runs"]:
            idle.setdefault(kernel["detail"] or "the plugin does not say why", []).append(kernel["op"])
    return idle


def _shown_kernel(kernel: dict[str, Any]) -> str:
    """A kernel in a table; the reason for one that is not used stands below the table."""
    return f"{kernel['op']} ({'/'.join(kernel['backends'])}{'' if kernel['runs'] else ', not used here'})"


def _serves(row: dict[str, Any]) -> dict[str, str]:
    """Heading -> names, for the columns a table shows."""
    return {
        "targets": ", ".join(row["model_types"]),
        "drafters": ", ".join(dict.fromkeys(drafter["kind"] for drafter in row["drafters"])),
        "hooks": ", ".join(hook.removeprefix("spec_") for hook in row["hooks"]),
        "kernels": ", ".join(map(_shown_kernel, row["kernels"])),  # last: nothing is padded to the longest
    }


def _status(row: dict[str, Any]) -> str:
    return "ok" if not row["errors"] else "errors" if row["loaded"] else "not loaded"


def _wide(row: dict[str, Any]) -> list[str]:
    """One line per plugin, for a pipe."""
    names = [row["name"], row["distribution"] or "-", row["version"] or "-", _status(row)]
    return [*names, *(text or "-" for text in _serves(row).values())]


def _narrow(row: dict[str, Any]) -> list[str]:
    """Four columns, for a terminal of any width."""
    serves = "\n".join(f"{heading}: {text}" for heading, text in _serves(row).items() if text)
    return [row["name"], f"{row['distribution']}\n{row['version']}".strip() or "-", _status(row), serves or "-"]
