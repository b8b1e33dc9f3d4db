"""`--spec-config JSON`: the drafting options as one object, in the spelling other engines use.

Strict: an unknown key is refused naming the allowed ones, and a key that a flag also gives is an error,
because there is no telling which of the two was meant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationError

from .errors import UsageError
from .width import check_block_size, check_draft_tokens

OPTION = "--spec-config"
ALIASES: Mapping[str, str] = {
    "draft-mtp": "mtp",
    "nextn": "mtp",
    "draft-dflash": "dflash",
    "draft-model": "full-model",
    "draft-simple": "full-model",
    "ngram": "prompt-lookup",
}


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """What the object said; None where it said nothing.

    Attributes:
        block_size: L, anchor counted, whichever of the two counts was given.
        options: what goes to the drafter's card, e.g. {"min_n": 3}.
    """

    kind: str | None = None
    model: str | None = None
    block_size: int | None = None
    acceptance: str | None = None
    adaptive: bool | None = None
    options: dict[str, Any] = field(default_factory=dict)


class _Fields(BaseModel):
    """The keys as written. Counts are checked by hand, so that messages say which one they count."""

    model_config = ConfigDict(extra="forbid")

    method: StrictStr | None = None
    kind: StrictStr | None = None
    model: StrictStr | None = None
    num_speculative_tokens: Any = None
    block_size: Any = None
    acceptance: Literal["rejection", "coupled"] | None = None
    adaptive: StrictBool | None = None
    prompt_lookup_min: int | None = Field(None, ge=1, le=64, strict=True)
    prompt_lookup_max: int | None = Field(None, ge=1, le=64, strict=True)
    mtp_norms: Literal["weights", "deltas"] | None = None
    mtp_hidden: Literal["post", "pre"] | None = None
    mtp_concat: Literal["embedding-first", "hidden-first"] | None = None
    draft_head_bits: Literal[4, 8] | None = None
    draft_vocab: StrictStr | None = None
    draft_vocab_size: int | None = Field(None, ge=1, strict=True)


ALLOWED = tuple(_Fields.model_fields)
_FLAGS: Mapping[str, tuple[str, ...]] = {
    "draft_kind": ("method", "kind"),
    "draft_model": ("model",),
    "draft_block_size": ("block_size", "num_speculative_tokens"),
    "acceptance": ("acceptance",),
}


def normalise_kind(name: str) -> str:
    """A drafter kind in our spelling: lower case, dashes, known aliases replaced; others pass unchanged."""
    plain = name.strip().lower().replace("_", "-")
    return ALIASES.get(plain, plain)


def parse(text: str | None, flags: Mapping[str, object]) -> SpecConfig:
    """Read the JSON object. Raises UsageError naming key, value and what is allowed.

    flags: options given beside it, by name with underscores (draft_kind, draft_model, draft_block_size,
        acceptance).
    """
    if text is None:
        return SpecConfig()
    given = _object(text)
    _refuse_unknown(given)
    _refuse_twice(given, flags)
    try:
        fields = _Fields.model_validate(given)
    except ValidationError as error:
        raise _bad_value(error.errors()[0]) from error
    return SpecConfig(
        kind=_kind(fields),
        model=fields.model,
        block_size=_block_size(given),
        acceptance=fields.acceptance,
        adaptive=fields.adaptive,
        options=_options(fields),
    )


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            OPTION,
            found=f"{text[:60]!r} ({error})",
            expected='a JSON object, e.g. {"method": "mtp", "num_speculative_tokens": 3}',
            next_step="Check quotes and commas; single quotes around the whole keep the shell from touching it",
            code="U72",
        ) from error
    if not isinstance(value, dict):
        raise UsageError(
            OPTION,
            found=f"a JSON {type(value).__name__}",
            expected="a JSON object",
            next_step=f"Use the keys {', '.join(ALLOWED)}",
            code="U72",
        )
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"key {twice!r} appears twice")
    return dict(pairs)


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    for key in given:
        if key not in ALLOWED:
            close = get_close_matches(key, ALLOWED, n=1)
            raise UsageError(
                f"{OPTION} key",
                found=repr(key),
                expected=", ".join(ALLOWED),
                next_step=f"Did you mean {close[0]!r}?" if close else "Remove it",
                code="U73",
            )


def _refuse_twice(given: Mapping[str, Any], flags: Mapping[str, object]) -> None:
    for flag, keys in _FLAGS.items():
        key = next((k for k in keys if k in given), None)
        if key is not None and flags.get(flag) is not None:
            name = "--" + flag.replace("_", "-")
            raise UsageError(
                f"{name} and {OPTION}",
                found=f"{flags[flag]!r} and {key}={given[key]!r}",
                expected="one of the two",
                next_step=f"Drop {name}, or the key {key!r}",
                code="U74",
            )


def _kind(fields: _Fields) -> str | None:
    if fields.method is None or fields.kind is None:
        name = fields.method if fields.kind is None else fields.kind
        return None if name is None else normalise_kind(name)
    method, kind = normalise_kind(fields.method), normalise_kind(fields.kind)
    if method != kind:
        raise UsageError(
            f"{OPTION} keys method and kind",
            found=f"{fields.method!r} and {fields.kind!r}",
            expected="one drafter kind",
            next_step="Drop one of the two",
            code="U74",
        )
    return kind


def _block_size(given: Mapping[str, Any]) -> int | None:
    """L from either count; both may be given when they agree."""
    width = drafts = None
    if "block_size" in given:
        width = check_block_size(given["block_size"], f"{OPTION} block_size")
    if "num_speculative_tokens" in given:
        drafts = check_draft_tokens(given["num_speculative_tokens"], f"{OPTION} num_speculative_tokens")
    if width is None or drafts is None:
        return width if drafts is None else drafts + 1
    if max(width, 1) != drafts + 1:
        raise UsageError(
            f"{OPTION} block_size (L, anchor counted) and num_speculative_tokens (K, anchor not counted)",
            found=f"L={width} and K={drafts}",
            expected=f"L = K + 1, so L={drafts + 1} or K={max(width - 1, 0)}",
            next_step="Drop one of the two",
            code="U75",
        )
    return width


def _options(fields: _Fields) -> dict[str, Any]:
    low, high = fields.prompt_lookup_min, fields.prompt_lookup_max
    if low is not None and high is not None and low > high:
        raise UsageError(
            f"{OPTION} prompt_lookup_min and prompt_lookup_max",
            found=f"{low} and {high}",
            expected="a minimum that is no larger than the maximum",
            next_step="Swap or correct them",
            code="U76",
        )
    head = ("mtp_norms", "mtp_hidden", "mtp_concat", "draft_head_bits", "draft_vocab", "draft_vocab_size")
    named = {"min_n": low, "max_n": high, **{name: getattr(fields, name) for name in head}}
    return {name: value for name, value in named.items() if value is not None}


def _bad_value(problem: Any) -> UsageError:
    key, context = str(problem["loc"][0]), problem.get("ctx", {})
    count = "a whole number " + ("of at least 1" if key == "draft_vocab_size" else "from 1 to 64")
    words = {
        "string_type": "text in quotes",
        "bool_type": "true or false",
        "int_type": count,
        "greater_than_equal": count,
        "less_than_equal": count,
        "literal_error": str(context.get("expected")),
    }
    return UsageError(
        f"{OPTION} key {key}",
        found=json.dumps(problem["input"], default=str)[:60],
        expected=words.get(problem["type"], problem["msg"]),
        next_step="Correct the value, or drop the key",
        code="U77",
    )
