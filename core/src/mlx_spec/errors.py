"""Errors a user can meet, and findings about a pair.

SpecError                 base; every message is "<what>: found X, expected Y. <next step>."
├── UsageError            bad flag, field or prompt                      CLI exit 2
└── RefusedError          something loaded or asked for cannot be done   CLI exit 1
    ├── LoadError         a directory, file or tensor is not usable
    │   └── NoEmbeddedMtpHead   the checkpoint carries no head of its own
    ├── PairError         target and drafter do not fit; carries the findings
    ├── PluginError       entry points or registrations clash
    ├── ExactnessError    the demanded exactness level was not reached
    └── RequestError      one request cannot go on (NaN logits, context full); others go on
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, Self

Severity = Literal["error", "warning", "note"]
FINDINGS = "mlx_spec.findings"
"""Logger of what is found about a pair while it loads; the commands print findings themselves."""


MODEL_NAME = "model name"
"""What an error is about that does not know which option or setting a name came from."""

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
LONGEST = 600  # characters of one part of a message: a value somebody gave may be a whole file


def shorten(text: str, limit: int = 80) -> str:
    """`text`, its middle replaced when it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}... ({len(text)} characters) ...{text[-(limit // 8) :]}"


def visible(text: str) -> str:
    """`text`, in quotes when there is nothing to see of it."""
    return text if text.strip() else repr(text)


def message(what: str, found: object, expected: object, next_step: str) -> str:
    """The one sentence shape of every error: what, found, expected, next step; huge values are cut."""
    step = next_step if not next_step or next_step.endswith((".", "!", "?")) else next_step + "."
    text = (
        f"{shorten(what, LONGEST)}: found {shorten(visible(str(found)), LONGEST)}, expected {expected}. {step}".rstrip()
    )
    return CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)  # names in files may hold what moves a cursor


class SpecError(Exception):
    """Base of all errors shown to a user; never shown with a traceback.

    Attributes:
        code: stable identifier, e.g. "L03" (see docs/errors.md).
        what, found, expected, next_step: the four parts of the message.
    """

    exit_code = 1
    code = "E00"

    def __init__(self, what: str, *, found: object, expected: object, next_step: str, code: str | None = None):
        self.what, self.found, self.expected, self.next_step = what, found, expected, next_step
        if code is not None:
            self.code = code
        super().__init__(message(what, found, expected, next_step))

    def line(self) -> str:
        """How every command tells it: the code, which docs/errors.md explains, and the message."""
        return f"error {self.code}: {self}"

    def given_by(self, source: str) -> Self:
        """The same error, naming the flag or variable that brought the value at fault."""
        self.what = source if self.what == MODEL_NAME else f"{source}: {self.what}"
        self.args = (message(self.what, self.found, self.expected, self.next_step),)
        return self


class UsageError(SpecError):
    """A flag, request field or prompt that cannot be used."""

    exit_code = 2
    code = "U00"


class RefusedError(SpecError):
    """Valid usage, but what was asked for cannot be done."""


class LoadError(RefusedError):
    """A directory, file, tensor or tokenizer is missing, corrupt or of another kind."""

    code = "L00"


class NoEmbeddedMtpHead(LoadError):
    """The checkpoint was asked to draft for itself but carries no head tensors."""

    code = "L20"


class PluginError(RefusedError):
    """A plugin cannot be used: name clash, double claim, newer API, import failure."""

    code = "G00"


class ExactnessError(RefusedError):
    """The exactness level asked for is not reached on this machine."""

    code = "X00"


class RequestError(RefusedError):
    """One request cannot continue; the engine and its other requests can."""

    code = "R00"


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason a pair is refused (error), slow or unusual (warning), or worth saying (note)."""

    code: str
    severity: Severity
    subject: str
    found: str
    expected: str
    next_step: str

    def __str__(self) -> str:
        return message(self.subject, self.found, self.expected, self.next_step)

    def line(self) -> str:
        """How every command tells it: severity, code and the message."""
        return f"{self.severity} {self.code}: {self}"

    def as_dict(self) -> dict[str, str]:
        """Plain dict, for JSON output."""
        return asdict(self)


def listed(findings: Sequence[Finding], coded: bool = False) -> list[str]:
    """A message per finding; a next step that several share is told once, by the last of them.

    coded: begin each with severity and code, as `Finding.line` does.
    """
    lines = []
    for i, finding in enumerate(findings):
        shared = any(later.next_step == finding.next_step for later in findings[i + 1 :])
        one = replace(finding, next_step="") if shared else finding
        lines.append(one.line() if coded else str(one))
    return lines


class PairError(RefusedError):
    """Target and drafter do not fit; `findings` holds every reason, errors first."""

    code = "P00"

    def __init__(self, findings: list[Finding]):
        self.findings = sorted(findings, key=lambda f: f.severity != "error")
        first = self.findings[0]
        super().__init__(
            first.subject, found=first.found, expected=first.expected, next_step=first.next_step, code=first.code
        )
        self._refusing = [first, *(f for f in self.findings[1:] if f.severity == "error")]
        self.args = ("\n".join(listed(self._refusing)),)

    def line(self) -> str:
        """A line per finding that refuses the pair, each with its code."""
        return "\n".join(listed(self._refusing, coded=True))
