"""`spec new`: the start of a plugin that installs and passes the conformance kit at once."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import click

from ..scaffold import KINDS, Kind, write_plugin
from .values import Folder


@click.command("new")
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("name")
@click.option("--out", type=Folder(file_okay=False, path_type=Path), default=".", help="Folder it is written in.")
def command(kind: str, name: str, out: Path) -> None:
    """Write ./mlx-spec-NAME/: a drafter for every target, or a family with a drafter of its own."""
    folder = write_plugin(cast(Kind, kind), name, out)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        click.echo(path)
    click.echo(f"\nNext:\n  pip install -e '{folder}[testing]'\n  cd {folder} && python -m pytest")
