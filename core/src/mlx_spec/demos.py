"""The small trained pairs that plugins ship, by the names they go by: demo:PLUGIN."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .errors import MODEL_NAME, UsageError

if TYPE_CHECKING:
    from .registry import Demo

DEMO = "demo:"
"""What a name begins with that means the bundled pair of a plugin; no hub id has a colon."""


def demo_pair(plugin: str | None = None, flag: str = "-m") -> Demo:
    """The bundled pair of `plugin`, else the first by plugin name; UsageError when there is none."""
    from .plugins import get_manager
    from .settings import plugins_note

    manager = get_manager()
    manager.check_asked()
    demos = manager.registry.demos()
    if not demos:
        raise UsageError(
            flag,
            found=f"{'no target' if plugin is None else DEMO + plugin}, and no plugin that ships a demo pair"
            f"{manager.missing()}",
            expected="a directory or hub id",
            next_step="Name one, or install a plugin that ships a demo pair (in a clone: "
            "pip install ./core ./plugins/gemma4)"
            if not plugins_note()
            else "Name one, or unset MLX_SPEC_PLUGINS",
            code="U30",
        )
    if plugin is None:
        return demos[0]
    for demo in demos:
        if demo.owner == plugin:
            return demo
    names = ", ".join(DEMO + demo.owner for demo in demos)
    raise UsageError(flag, found=DEMO + plugin, expected=f"one of {names}", next_step="Name one of them", code="U41")


def demo_folder(name: str, drafter: bool = False) -> Path:
    """Folder behind demo:PLUGIN: its target's, or its drafter's."""
    demo = demo_pair(name.removeprefix(DEMO), MODEL_NAME)
    return demo.drafter if drafter else demo.target
