"""The one place that reads environment variables.

`get_settings()` validates everything with pydantic (slow to import, so done on first use); `early()` reads
the three values start-up needs with nothing but the standard library. Precedence: an explicit flag or
argument, then MLX_SPEC_*, then the LLAMA_ARG_* twin, then the default. An empty variable counts as unset.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UsageError

if TYPE_CHECKING:
    from .settings_model import Settings

PREFIX = "MLX_SPEC_"
TWINS = {
    "draft_kind": "LLAMA_ARG_DRAFT_KIND",
    "draft_block_size": "LLAMA_ARG_DRAFT_BLOCK_SIZE",
}
LOG_LEVELS, TRACED = ("debug", "info", "warning", "error"), ("hooks",)


@dataclass(frozen=True, slots=True)
class Early:
    """What is needed before pydantic is: which plugins, what to trace, how much to say."""

    plugins: tuple[str, ...] | None
    trace: tuple[str, ...]
    log_level: str

    @property
    def debug(self) -> bool:
        """Whether tracebacks are shown."""
        return self.log_level == "debug"


def variables(field: str) -> tuple[str, ...]:
    """Environment variables of one setting, the one that wins first."""
    twin = TWINS.get(field)
    return (PREFIX + field.upper(), twin) if twin else (PREFIX + field.upper(),)


def split_names(text: str) -> tuple[str, ...]:
    """ "a, b" -> ("a", "b"); empty parts are dropped."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def plugin_names(text: str) -> tuple[str, ...]:
    """Names in MLX_SPEC_PLUGINS; a text without any, like ",", stands for itself: no plugin is called so."""
    return split_names(text) or (text,)


def plugins_asked() -> str:
    """What may keep a plugin out: "MLX_SPEC_PLUGINS lets in only ...", "" when it is not set."""
    names = early().plugins
    return f"{PREFIX}PLUGINS lets in only {', '.join(names)}" if names is not None else ""


def plugins_note() -> str:
    """The same in parentheses, after a space, to add where a plugin is missed."""
    asked = plugins_asked()
    return f" ({asked})" if asked else ""


def early() -> Early:
    """Read now, unvalidated beyond splitting; `get_settings` is where bad values are refused."""
    plugins = os.environ.get(PREFIX + "PLUGINS", "")
    return Early(
        plugins=plugin_names(plugins) if plugins else None,
        trace=split_names(os.environ.get(PREFIX + "TRACE", "")),
        log_level=(os.environ.get(PREFIX + "LOG_LEVEL") or "warning").lower(),
    )


@cache
def get_settings() -> Settings:
    """The settings in force, read once per process. Raises UsageError naming the variable at fault."""
    from pydantic import ValidationError

    from .settings_model import Settings

    try:
        return Settings()
    except ValidationError as error:
        raise _usage_error(error.errors()[0]) from error


def check_variables() -> Settings | None:
    """The settings, None where none need reading; UsageError for a variable of ours with a bad value.

    A home that is missing is left to who needs one.
    """
    given = [name for name in os.environ if name.startswith(PREFIX) or name in TWINS.values()]
    first = early()
    plain = first.log_level in LOG_LEVELS and set(first.trace) <= set(TRACED)
    if plain and all(_is_early(name) for name in given):  # every command asks: no pydantic for those
        return None
    try:
        return get_settings()
    except UsageError as error:
        if error.code != "U04":
            raise
        return None


def _is_early(variable: str) -> bool:
    return variable.removeprefix(PREFIX).lower() in Early.__slots__


def reset_settings() -> None:
    """Forget what was read (tests)."""
    get_settings.cache_clear()


def source(field: str) -> str:
    """Where a setting's value comes from: the variable that won, or "default"."""
    return next((name for name in variables(field) if os.environ.get(name)), "default")


def choose(field: str, explicit: Any = None) -> tuple[Any, str]:
    """(value, source) of one setting; `explicit` (a flag or argument) wins unless it is None.

    source is the flag in command-line spelling, the variable, or "default".
    """
    if explicit is not None:
        return explicit, "--" + field.replace("_", "-")
    return getattr(get_settings(), field), source(field)


def unknown_variables() -> list[tuple[str, str | None]]:
    """MLX_SPEC_* variables that mean nothing here, each with the closest known name or None."""
    given = [name.removeprefix(PREFIX) for name in sorted(os.environ) if name.startswith(PREFIX)]
    if all(map(_is_early, given)):  # every command asks: no pydantic for those
        return []
    from .settings_model import Settings

    known = [field.upper() for field in Settings.model_fields]
    close = {name: next(iter(get_close_matches(name, known, n=1)), None) for name in given if name not in known}
    return [(PREFIX + name, match and PREFIX + match) for name, match in close.items()]


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/mlx-spec, else ~/.cache/mlx-spec."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base and Path(base).is_absolute():  # the XDG rule: relative values are ignored
        return Path(base) / "mlx-spec"
    try:
        return Path.home() / ".cache" / "mlx-spec"
    except RuntimeError as error:
        raise UsageError(
            "cache folder",
            found="no home directory",
            expected="a place for probe memos and learned costs",
            next_step=f"Set {PREFIX}CACHE_DIR",
            code="U04",
        ) from error


def _usage_error(problem: Any) -> UsageError:
    """One pydantic problem in the words of the variable it came from."""
    name = _variable(problem["loc"])
    return UsageError(
        f"environment variable {name}",
        found=repr(problem["input"]),
        expected=_expectation(problem),
        next_step=f"Correct or unset {name}",
        code="U03",
    )


def _expectation(problem: Any) -> str:
    """What pydantic wanted, in plain words."""
    context = problem.get("ctx", {})
    words = {
        "int_parsing": "a whole number",
        "bool_parsing": "on or off",
        "greater_than_equal": f"at least {context.get('ge')}",
        "less_than_equal": f"at most {context.get('le')}",
        "literal_error": str(context.get("expected")),
        "value_error": str(context.get("error")),
        "string_unicode": "text that is UTF-8",
    }
    return words.get(problem["type"], str(problem["msg"]).removeprefix("Input should be "))


def _variable(loc: Sequence[Any]) -> str:
    """The variable in force behind a pydantic location, which is a field's name or its first alias."""
    name = str(loc[0])
    field = name.removeprefix(PREFIX).lower()
    where = source(field)
    return where if where != "default" else name
