"""New plugins from templates: `spec new drafter NAME` and `spec new family NAME`.

Templates lie in `templates/` as the files they become, with `.tmpl` at the end of each name. `common/` goes
into every plugin; a file of the kind's own folder wins over a common one. In text `@word@` is replaced, in
paths `pkg` is the import name.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

from .. import __version__
from ..errors import UsageError

Kind = Literal["drafter", "family"]
KINDS: tuple[Kind, ...] = ("drafter", "family")
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
LONGEST_NAME = 40
SUFFIX = ".tmpl"
_MARK = re.compile(r"@(\w+)@")


def write_plugin(kind: Kind, name: str, parent: Path) -> Path:
    """Write the folder mlx-spec-NAME below `parent` and return it: all of it, or nothing.

    Raises UsageError for a name that cannot be used, a folder that is there already, or one the system
    will not let us write.
    """
    check_name(kind, name)
    folder = parent / f"mlx-spec-{name}"
    if folder.exists() or folder.is_symlink():
        raise UsageError(
            f"folder {folder}",
            found="something of that name",
            expected="nothing there yet",
            next_step="Choose another name, or another folder with --out",
            code="U61",
        )
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".mlx-spec-new-", dir=parent) as scratch:
            for path, text in plugin_files(kind, name).items():
                file = Path(scratch) / "plugin" / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            (Path(scratch) / "plugin").rename(folder)
    except OSError as error:
        raise UsageError(
            f"folder {folder}",
            found=error.strerror or str(error),
            expected="a place that can be written to",
            next_step="Choose another folder with --out",
            code="U62",
        ) from error
    return folder


def plugin_files(kind: Kind, name: str) -> dict[str, str]:
    """Relative path -> text of every file of a new plugin, in a fixed order."""
    values = _values(name)
    found: dict[str, str] = {}
    for part in ("common", kind):
        for path, text in _templates(files(__package__) / "templates" / part):
            found[path.replace("/pkg/", f"/{values['package']}/")] = _fill(text, values, path)
    return dict(sorted(found.items()))


def check_name(kind: Kind, name: str) -> None:
    """UsageError unless `name` can name a distribution, a module and an entry point that nobody has yet."""
    problem = _shape(name)
    if problem:
        expected = "lower-case words of letters and digits joined by single dashes, e.g. suffix-array"
        raise _bad_name(name, problem, expected, "Give a name like that; it becomes mlx-spec-NAME")
    from ..plugins import get_manager

    manager = get_manager()
    record = next((r for r in manager.records if r.name in (name, name.replace("-", "_"))), None)
    if record is not None:
        found = f"the name of a plugin that is installed ({record.distribution or record.value})"
        raise _bad_name(name, found, "a new name", "Choose another name")
    taken = manager.registry.kinds() if kind == "drafter" else manager.registry.model_types()
    if name in (*taken, "none") or name.replace("-", "_") in taken:
        what = "drafter kind" if kind == "drafter" else "target model_type"
        raise _bad_name(name, f"a {what} that an installed plugin serves", "a new name", "Choose another name")


def _shape(name: str) -> str:
    """What is wrong with the spelling of a name; "" when nothing is."""
    if name.startswith(("mlx-spec-", "mlx_spec_")):
        return f"{name!r}, with the prefix every plugin gets"
    if len(name) > LONGEST_NAME:
        return f"{len(name)} characters"
    return "" if NAME.fullmatch(name) else repr(name)


def _bad_name(name: str, found: str, expected: str, next_step: str) -> UsageError:
    return UsageError(f"plugin name {name!r}", found=found, expected=expected, next_step=next_step, code="U60")


def _values(name: str) -> dict[str, str]:
    """What the marks in templates stand for."""
    major, minor = (int(part) for part in __version__.split(".")[:2])
    return {
        "name": name,
        "distribution": f"mlx-spec-{name}",
        "package": f"mlx_spec_{name.replace('-', '_')}",
        "model_type": name.replace("-", "_"),
        "Class": "".join(word.capitalize() for word in name.split("-")),
        "letters": "X" + next(c for c in name.upper() if c.isalpha()),
        "core": f">={major}.{minor},<{major}.{minor + 1}",
    }


def _templates(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(relative path without suffix, text) of every template below a folder."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _templates(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(SUFFIX):
            yield prefix + entry.name.removesuffix(SUFFIX), entry.read_text(encoding="utf-8")


def _fill(text: str, values: Mapping[str, str], path: str) -> str:
    """`text` with its marks replaced. Raises KeyError, naming the template, for one that means nothing."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise KeyError(f"template {path} has the mark @{match[1]}@")
        return values[match[1]]

    return _MARK.sub(value, text)
