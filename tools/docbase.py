"""What the makers of documentation blocks share: the workspace, Markdown, signatures."""

from __future__ import annotations

import inspect
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "core" / "src" / "mlx_spec"
PYPROJECTS = sorted(ROOT.glob("plugins/*/pyproject.toml"))
WIDTH = 100  # columns of help texts and signatures


# -- the workspace -------------------------------------------------------------------------------------


def plugin_names() -> list[str]:
    """Entry-point names of the plugins in this repository."""
    tables = [tomllib.loads(path.read_text())["project"]["entry-points"]["mlx_spec"] for path in PYPROJECTS]
    return sorted(name for table in tables for name in table)


def use_workspace_plugins() -> None:
    """Let in the plugins of this repository alone, so that pages do not depend on what else is installed."""
    from mlx_spec import plugins

    os.environ["MLX_SPEC_PLUGINS"] = ",".join(plugin_names())
    plugins.reset()


def packages() -> dict[str, Path]:
    """Import name -> source folder of core and of every plugin in this repository."""
    folders = [CORE, *sorted(path for path in ROOT.glob("plugins/*/src/*") if (path / "plugin.py").exists())]
    return {folder.name: folder for folder in folders}


def records() -> list[Any]:
    """Core's and this repository's plugins, each loaded; the pages speak of all of them."""
    from mlx_spec.plugins import get_manager

    found = get_manager().records
    for record in found:
        if record.errors:
            raise SystemExit(f"docs: {record.errors[0]}")
    return found


# -- Markdown ------------------------------------------------------------------------------------------


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [_row(heads), _row(["---"] * len(heads))]
    return "\n".join([*lines, *(_row(row) for row in rows)])


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def code(names: Iterable[object]) -> str:
    """Names in code style, comma-separated."""
    return ", ".join(f"`{name}`" for name in names)


def prose(doc: str) -> str:
    """A docstring as Markdown: argument lists become bullet lists, indented text stays as it is."""
    out: list[str] = []
    section = False
    for line in doc.splitlines():
        if re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields):", line):
            out += ["", f"**{line[:-1]}**", ""]
            section = True
        elif section and re.match(r" {4}\S", line):
            name, colon, rest = line.strip().partition(": ")
            out.append(f"- {code(name.split(', '))}: {rest}" if colon else f"- {line.strip()}")
        elif section and line.startswith("     "):
            out.append("  " + line.strip())
        else:
            section = section and not line
            out.append(line)
    return "\n".join(out).strip()


# -- signatures ----------------------------------------------------------------------------------------


def signature(function: Callable[..., Any], name: str) -> str:
    """`def name(...) -> ...` with annotations as written, one argument a line when it is long."""
    shape = inspect.signature(function)
    parts: list[str] = []
    keyword_only = False
    for parameter in shape.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parts.append("*")
        parts.append(_parameter(parameter))
    returns = "" if shape.return_annotation is shape.empty else f" -> {_annotation(shape.return_annotation)}"
    line = f"def {name}({', '.join(parts)}){returns}"
    if len(line) <= WIDTH:
        return line
    return f"def {name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def _parameter(parameter: inspect.Parameter) -> str:
    star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    typed = "" if parameter.annotation is parameter.empty else f": {_annotation(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return f"{star}{parameter.name}{typed}"
    default = f'"{parameter.default}"' if isinstance(parameter.default, str) else repr(parameter.default)
    return f"{parameter.name}{typed} = {default}" if typed else f"{parameter.name}={default}"


def _annotation(value: object) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", str(value))
