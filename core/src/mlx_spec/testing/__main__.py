"""`python -m mlx_spec.testing tiny FAMILY --out DIR`: tiny checkpoints from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import SpecError, UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (0 done, 1 refused, 2 bad usage)."""
    parser = argparse.ArgumentParser(prog="python -m mlx_spec.testing", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    about = "Write a seeded random target and drafter in the real on-disk layout."
    tiny = commands.add_parser("tiny", help=about, description=about, add_help=False)
    tiny.add_argument("-h", "--help", action="store_true", help="show this; after a family, its options too")
    tiny.add_argument("family", nargs="?", help="an installed family; without it the families are listed")
    tiny.add_argument("--out", type=Path, metavar="DIR", help="folder that gets target/ and drafter/")
    tiny.add_argument("--seed", type=int, default=0, metavar="N", help="decides every byte; default 0")
    tiny.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the family, or a key of the target's config; may be given several times",
    )
    asked = parser.parse_args(arguments)
    try:
        if asked.help:
            print(tiny.format_help() + (_options(asked.family) if asked.family else ""))
            return 0
        _tiny(asked.family, asked.out, asked.seed, asked.set)
    except SpecError as error:
        print(error.line(), file=sys.stderr)
        return error.exit_code
    return 0


def _tiny(family: str | None, out: Path | None, seed: int, settings: Sequence[str]) -> None:
    from .writers import families, write_tiny

    if family is None:
        print("\n".join(families()))
        return
    if out is None:
        raise UsageError(
            "--out", found="no folder", expected="--out DIR", next_step="Name the folder to write to", code="U92"
        )
    pair = write_tiny(family, out, seed, dict(_setting(text) for text in settings))
    print(f"target   {pair.target}")
    none = f"none was asked for; `tiny {family} --help` shows what --set takes"
    print(f"drafter  {pair.drafter or none}")


def _options(family: str) -> str:
    """What --set takes for a family: the arguments of its writer, and what it says of them."""
    from inspect import cleandoc, signature

    from .writers import writer_of

    writer = writer_of(family)
    given = [
        f"  {name}={json.dumps(parameter.default)}"
        for name, parameter in signature(writer).parameters.items()
        if name not in ("out", "seed") and parameter.default is not parameter.empty
    ]
    listed = "\n".join([", with their defaults:", *given, ""]) if given else ":"
    return f"\n--set for {family}{listed}\n{cleandoc(writer.__doc__ or '')}"


def _setting(text: str) -> tuple[str, Any]:
    """ "key=value" with a value in JSON, or taken as text when it is not JSON."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise UsageError(
            "--set", found=repr(text), expected="KEY=VALUE", next_step="Write it like --set variant=E", code="U92"
        )
    try:
        return key, json.loads(value)
    except ValueError:  # no JSON: plain text, as documented
        return key, value


if __name__ == "__main__":
    sys.exit(main())
