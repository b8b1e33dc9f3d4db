"""Entry points of the group `mlx_spec` as records. The only user of importlib_metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import PluginError
from .registry import CORE

GROUP = "mlx_spec"
NOT_INSTALLED = "G02"


@dataclass(frozen=True, slots=True)
class EntryRecord:
    """One entry point found in an installed distribution.

    Attributes:
        name: entry-point name; also the plugin's name, unique over all distributions.
        distribution, version: what pip installed.
        value: import path, e.g. "mlx_spec_gemma4.plugin".
        error: why it cannot even be tried (name clash, asked for but not installed), else None.
        load: imports and returns the plugin object; may raise anything.
    """

    name: str
    distribution: str
    version: str
    value: str
    error: PluginError | None = None
    load: Callable[[], Any] | None = field(default=None, repr=False, compare=False)


def discover(only: Sequence[str] | None = None) -> list[EntryRecord]:
    """Records of all installed plugins, sorted by name; `only` keeps these names.

    The core's own name may be among them: what it brings is always there, and no record.

    Two distributions with one entry-point name both become records with a PluginError. A name in `only`
    that nothing provides becomes an error record too.
    """
    by_name: dict[str, list[EntryRecord]] = {}
    for record in _scan():
        by_name.setdefault(record.name, []).append(record)
    records = [r for name in sorted(by_name) if only is None or name in only for r in _settle(by_name[name])]
    asked = [name for name in dict.fromkeys(only or ()) if name != CORE]
    records.extend(_missing(name, sorted(by_name)) for name in asked if name not in by_name)
    return records


def distribution_version(name: str) -> str | None:
    """Version of an installed distribution, None when it is not installed; imports nothing of it."""
    import importlib_metadata

    try:
        return importlib_metadata.version(name)
    except importlib_metadata.PackageNotFoundError:  # an answer, not a fault
        return None


def _scan() -> list[EntryRecord]:
    """Every entry point of the group, one record per (name, distribution, value)."""
    import importlib_metadata

    seen: dict[tuple[str, str], EntryRecord] = {}
    for dist in importlib_metadata.distributions():
        for entry in dist.entry_points:
            if entry.group != GROUP:
                continue
            name, version = _identity(dist)
            record = EntryRecord(entry.name, name, version, entry.value, load=entry.load)
            # The first one on sys.path is the one an import finds: a leftover copy of the same
            # distribution further down is not a clash.
            seen.setdefault((entry.name, name), record)
    return list(seen.values())


def _identity(dist: Any) -> tuple[str, str]:
    """Name and version, from the first lines of METADATA: parsing all of it as mail costs 30 ms."""
    lines = (dist.read_text("METADATA") or dist.read_text("PKG-INFO") or "").partition("\n\n")[0].splitlines()
    fields = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return fields.get("Name") or "(unnamed distribution)", fields.get("Version") or "?"


def _settle(records: list[EntryRecord]) -> list[EntryRecord]:
    """The records unchanged, or all with a clash error when several distributions share the name."""
    if len(records) == 1:
        return records
    owners = sorted({r.distribution for r in records})
    error = PluginError(
        f"entry point {records[0].name!r} of group {GROUP!r}",
        found=f"it in {len(owners)} distributions: {', '.join(owners)}",
        expected="one distribution per name",
        next_step=f"Uninstall one of them, e.g. pip uninstall {owners[-1]}",
        code="G01",
    )
    return [EntryRecord(r.name, r.distribution, r.version, r.value, error) for r in records]


def _missing(name: str, installed: list[str]) -> EntryRecord:
    """Error record for a name in MLX_SPEC_PLUGINS that no distribution provides."""
    error = PluginError(
        f"plugin {name!r} of MLX_SPEC_PLUGINS",
        found=f"no entry point of that name (installed: {', '.join(installed) or 'none'})",
        expected="an installed plugin's name, or several with commas between",
        next_step="Correct or unset MLX_SPEC_PLUGINS, or install the distribution that provides it",
        code="G02",
    )
    return EntryRecord(name, "", "", "", error)
