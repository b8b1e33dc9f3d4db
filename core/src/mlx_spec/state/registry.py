"""Names under which kinds of state are saved, so that files can be read back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..errors import LoadError, PluginError
from .base import State

S = TypeVar("S", bound=type[State])

_TYPES: dict[str, type[State]] = {}


def register_state(name: str) -> Callable[[S], S]:
    """Class decorator: saved states named `name` are rebuilt by this class. A name taken is a PluginError."""

    def claim(cls: S) -> S:
        other = _TYPES.get(name)
        if other is not None and _path(other) != _path(cls):
            raise PluginError(
                f"state name {name!r}",
                found=f"two claims: {_path(other)} and {_path(cls)}",
                expected="one",
                next_step="Rename the state of one of the two distributions",
                code="G09",
            )
        _TYPES[name] = cls
        return cls

    return claim


def state_name(state: State) -> str:
    """Name under which this state's class is registered."""
    for name, cls in _TYPES.items():
        if cls is type(state):
            return name
    raise PluginError(
        f"state kind {_path(type(state))}",
        found="no registered name",
        expected="a class decorated with mlx_spec.state.register_state",
        next_step="Decorate the class, then save again",
        code="G10",
    )


def state_type(name: str) -> type[State]:
    """Class registered under `name`."""
    if name not in _TYPES:
        raise LoadError(
            "saved state",
            found=f"a layer of kind {name!r}",
            expected="one of " + ", ".join(sorted(_TYPES)),
            next_step="Install the plugin that wrote it",
            code="L32",
        )
    return _TYPES[name]


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
