"""Per-layer caches that can return to a mark: K/V, sliding windows, quantised K/V, gated delta.

Importing this package does not import mlx; reading one of the names below that needs it does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base import Mark, State

if TYPE_CHECKING:
    from .delta import DeltaState
    from .group import StateGroup, from_mlx_lm
    from .kv import KVState, Room
    from .quantised import QuantisedKVState, QuantisedWindowState
    from .registry import register_state, state_name, state_type
    from .steps import start_step
    from .view import KVView, narrow, visible_mask
    from .window import WindowState

__all__ = [
    "DeltaState",
    "KVState",
    "KVView",
    "Mark",
    "QuantisedKVState",
    "QuantisedWindowState",
    "Room",
    "State",
    "StateGroup",
    "WindowState",
    "from_mlx_lm",
    "narrow",
    "register_state",
    "start_step",
    "state_name",
    "state_type",
    "visible_mask",
]

_HOME = {
    "DeltaState": "delta",
    "KVState": "kv",
    "KVView": "view",
    "QuantisedKVState": "quantised",
    "QuantisedWindowState": "quantised",
    "Room": "kv",
    "StateGroup": "group",
    "WindowState": "window",
    "from_mlx_lm": "group",
    "narrow": "view",
    "register_state": "registry",
    "start_step": "steps",
    "state_name": "registry",
    "state_type": "registry",
    "visible_mask": "view",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
