"""`spec plugins`: what is installed, what it serves, what failed to load."""

from __future__ import annotations

import sys
from typing import Any

import click

from ..plugins import PluginRecord, get_manager
from . import SpecGroup
from .output import on_terminal, print_json, print_table


@click.command("plugins")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List installed plugins: version, model_types, drafter kinds, kernels, hooks and load errors."""
    rows = [describe(record) for record in settled_records(ctx)]
    if as_json:
        print_json({"plugins": rows})
        return
    if on_terminal(sys.stdout):
        print_table(("plugin", "distribution", "status", "serves"), [_narrow(row) for row in rows])
    else:
        columns = ("plugin", "distribution", "version", "status", "targets", "drafters", "kernels", "hooks")
        print_table(columns, [_wide(row) for row in rows])
    for row in rows:
        for error in row["errors"]:
            print(f"error: {error}")


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
        "kernels": [
            {"op": k.op, "backends": list(k.backends), "claim": k.claim} for k in (claims.kernels if claims else ())
        ],
        "demos": [demo.name for demo in claims.demos] if claims else [],
        "hooks": list(record.hooks),
        "errors": [str(error) for error in record.errors],
    }


def _serves(row: dict[str, Any]) -> dict[str, str]:
    """Heading -> names, for the columns a table shows."""
    return {
        "targets": ", ".join(row["model_types"]),
        "drafters": ", ".join(dict.fromkeys(drafter["kind"] for drafter in row["drafters"])),
        "kernels": ", ".join(f"{kernel['op']} ({'/'.join(kernel['backends'])})" for kernel in row["kernels"]),
        "hooks": ", ".join(hook.removeprefix("spec_") for hook in row["hooks"]),
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
