"""Types of option values that are stricter than click's own."""

from __future__ import annotations

import re
from typing import Any

import click
from click.types import FloatParamType, IntParamType

# What int() and float() read beyond this is a slip: 1_0, digits of other scripts.
_WHOLE = re.compile(r"\s*[+-]?[0-9]{1,40}\s*")
_NUMBER = re.compile(
    r"\s*[+-]?(([0-9]{1,40}(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]{1,4})?|inf(inity)?|nan)\s*", re.IGNORECASE
)


class Whole(click.IntRange):
    """A whole number of a range, in plain decimal digits."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if _odd(_WHOLE, value):
            self.fail(f"{value!r} is not a valid integer.", param, ctx)
        return super().convert(value, param, ctx)


class AnyWhole(IntParamType):
    """A whole number in plain decimal digits."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if _odd(_WHOLE, value):
            self.fail(f"{value!r} is not a valid integer.", param, ctx)
        return super().convert(value, param, ctx)


class AnyNumber(FloatParamType):
    """A number in plain decimal digits; who uses it says what it may be."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if _odd(_NUMBER, value):
            self.fail(f"{value!r} is not a valid float.", param, ctx)
        return super().convert(value, param, ctx)


class Folder(click.Path):
    """A path that is not empty: "" would be the folder the command was started in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not value.strip():
            self.fail("an empty path", param, ctx)
        return super().convert(value, param, ctx)


def _odd(form: re.Pattern[str], value: Any) -> bool:
    """Whether `value` is text of another form."""
    return isinstance(value, str) and not form.fullmatch(value)


WHOLE = AnyWhole()
NUMBER = AnyNumber()
