"""click's refusals of a command line, in the form every other error has."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from ..errors import UsageError, shorten
from .values import Folder

# How click's messages begin that quote the value they are about: "'nope' is not one of ...".
_ABOUT_A_VALUE = re.compile(r"(?P<value>.+?) is not (?:one of |a valid |in the range )", re.DOTALL)


def as_usage_error(error: click.UsageError) -> UsageError:
    """The same refusal as found, expected and next step; exit code 2, a huge value cut short."""
    if isinstance(error, click.MissingParameter):
        return _missing(error)
    if isinstance(error, click.BadParameter):
        return _bad_value(error)
    if isinstance(error, click.NoSuchOption):
        return _no_such_option(error)
    if isinstance(error, click.BadOptionUsage):
        return _option_usage(error)
    return UsageError(
        _command(error),
        found=_sentence(error.format_message()).removeprefix("Got "),
        expected=_usage(error),
        next_step=_see_help(error),
        code="U54",
    )


def unknown_command(name: str, names: Sequence[str]) -> UsageError:
    """The refusal of a command nobody has."""
    from difflib import get_close_matches

    close = get_close_matches(name, names, n=1)
    return UsageError(
        "command",
        found=shorten(repr(name)),
        expected=" | ".join(names),
        next_step=f"Did you mean {close[0]!r}?" if close else "See spec --help",
        code="U53",
    )


def _bad_value(error: click.BadParameter) -> UsageError:
    """An option or argument whose value click could not read."""
    about = _ABOUT_A_VALUE.match(error.message)
    found = about["value"] if about is not None else _sentence(error.message)
    return UsageError(
        _subject(error),
        found=shorten(found),
        expected=_wanted(error.param),
        next_step="Correct the value",
        code="U50",
    )


def _missing(error: click.MissingParameter) -> UsageError:
    return UsageError(
        _command(error),
        found=f"no {_subject(error)}",
        expected=_usage(error),
        next_step=f"Add it; {_see_help(error, start=False)}",
        code="U51",
    )


def _option_usage(error: click.BadOptionUsage) -> UsageError:
    """An option without its value, or a switch with one."""
    lacks = "requires" in error.message
    return UsageError(
        error.option_name,
        found="no value" if lacks else "a value",
        expected="one behind it" if lacks else "none: it is a switch",
        next_step="Give it a value" if lacks else "Drop the value",
        code="U51",
    )


def _no_such_option(error: click.NoSuchOption) -> UsageError:
    close = list(error.possibilities or ())[:3]
    named = " or ".join(close)
    return UsageError(
        _command(error),
        found=f"option {shorten(repr(error.option_name))}",
        expected="an option of this command",
        next_step=f"Did you mean {named}?" if close else _see_help(error),
        code="U52",
    )


# -- wording -------------------------------------------------------------------------------------------


def _subject(error: click.BadParameter) -> str:
    """The option's names, or the argument's."""
    param = error.param
    if isinstance(param, click.Option):
        return " / ".join(param.opts)
    if isinstance(param, click.Argument):
        return str(param.name or "argument").upper()
    return str(error.param_hint or "argument")


def _wanted(param: click.Parameter | None) -> str:
    """What values a parameter takes, in words."""
    kind = param.type if param is not None else None
    if isinstance(kind, click.Choice):
        return " | ".join(str(choice) for choice in kind.choices)
    if isinstance(kind, click.IntRange | click.FloatRange):
        noun = "a whole number" if isinstance(kind, click.IntRange) else "a number"
        if kind.min is not None and kind.max is not None:
            return f"{noun} from {kind.min} to {kind.max}"
        return f"{noun} of at least {kind.min}" if kind.min is not None else f"{noun} of at most {kind.max}"
    if isinstance(kind, Folder):
        return "a folder"
    if isinstance(kind, click.Path):
        return "a file" if not kind.dir_okay else "a folder" if not kind.file_okay else "a path"
    words = {"integer": "a whole number", "float": "a number", "boolean": "on or off"}
    name = getattr(kind, "name", "")
    return words.get(name, "a value it takes")


def _sentence(text: str) -> str:
    """One line of a message without its full stop, cut short."""
    return shorten(" ".join(text.split()).rstrip("."))


def _command(error: click.UsageError) -> str:
    return error.ctx.command_path if error.ctx is not None else "command line"


def _usage(error: click.UsageError) -> str:
    """The usage line of the command, without "Usage: "."""
    if error.ctx is None:
        return "the usage --help shows"
    pieces = error.ctx.command.collect_usage_pieces(error.ctx)
    return " ".join([error.ctx.command_path, *pieces])


def _see_help(error: click.UsageError, start: bool = True) -> str:
    path = error.ctx.command_path if error.ctx is not None else "spec"
    return f"{'See' if start else 'see'} {path} --help"
