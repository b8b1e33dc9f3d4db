"""Tiny checkpoints of every installed family: the writers that plugins register, found by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import PluginError, SpecError, UsageError


class TinyPair(NamedTuple):
    """Directories of one tiny pair; drafter None when the family brings targets only."""

    target: Path
    drafter: Path | None


def families() -> tuple[str, ...]:
    """Names of the families a tiny checkpoint can be written of, sorted."""
    from ..plugins import get_manager

    return get_manager().registry.tiny_families()


def writer_of(family: str) -> Callable[..., Any]:
    """The function that writes tiny checkpoints of `family`; UsageError names the families there are."""
    from ..plugins import get_manager

    place = get_manager().registry.tiny_writer(family)
    if place is None:
        raise UsageError(
            "family",
            found=repr(family),
            expected=f"one of {', '.join(families())}",
            next_step="Install the family's plugin, or see what failed to load with spec plugins",
            code="U91",
        )
    module, _, name = place.partition(":")
    try:
        writer: Callable[..., Any] = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"tiny writer of family {family!r}",
            found=f"{place!r}, which does not import ({type(error).__name__}: {error})",
            expected='"module:function" of an installed plugin',
            next_step="Correct register.tiny in the plugin's spec_register",
            code="G11",
        ) from error
    return writer


def write_tiny(family: str, out: str | Path, seed: int = 0, options: Mapping[str, Any] | None = None) -> TinyPair:
    """Write a seeded random target and drafter of `family` into out/target and out/drafter.

    Raises UsageError for a family nobody registered or an option its writer does not know.
    """
    writer = writer_of(family)
    try:
        made = writer(Path(out), seed=seed, **dict(options or {}))
    except SpecError:
        raise
    except TypeError as error:
        raise UsageError(
            f"--set for family {family!r}",
            found=f"{dict(options or {})} ({error})",
            expected=f"options that {writer.__module__}.{writer.__name__} takes",
            next_step="Correct the key or the type of its value",
            code="U90",
        ) from error
    target, drafter = made
    return TinyPair(Path(target), None if drafter is None else Path(drafter))
