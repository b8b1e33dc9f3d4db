"""Sampling settings of one request: checked once at the door, read-only afterwards. No mlx import.

Every refusal is a UsageError that names the field, what was found and what is accepted. The maths that
reads these settings lives in `shaping` (filters), `processors` (history) and `laws` (acceptance).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any

from .errors import UsageError
from .types import Acceptance
from .values import as_integer, as_items, shown

GREEDY_UP_TO = 1e-3  # at and below this temperature every draw is the argmax
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 100.0
MAX_BIAS = 10_000.0  # stays finite in float16
MAX_CONTEXT = 1_000_000
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_LOGPROBS = 20
MAX_STOP_IDS = 1 << 20
MAX_ID = 2**31 - 1
SEED_RANGE = (-(2**63), 2**64 - 1)

Processor = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request picks its tokens. The default is greedy.

    Attributes:
        temperature: 0 to 100. At 0, and up to 0.001, the argmax is taken.
        top_p: above 0, up to 1 (off). Applied first, before temperature, as mlx-lm does.
        top_k: at least 1; 0 or -1 is off. Applied last.
        min_p: 0 (off) to 1, relative to the most likely token.
        seed: any 64-bit integer (a negative one is its two's complement), None for a fresh one.
        acceptance: "rejection", "coupled" or None (coupled with a seed, rejection without).
        repetition_penalty: sign-aware divisor, 0 or None is off; over the last repetition_context_size tokens.
        presence_penalty, frequency_penalty: subtracted once per distinct id / once per occurrence.
        logit_bias: token id -> value added to its raw logit.
        min_tokens: no end or stop id is possible before this many reply tokens exist.
        stop: strings that end the reply; empty ones are ignored.
        stop_ids: token ids that end the reply.
        logprobs: None, or the number of alternatives reported per token (0 to 20).
        processors: callables (tokens (n,) int32, logits (1, V)) -> logits (1, V), as mlx-lm's. They are called
            for drafted positions that may be rejected, so they must not keep state between calls.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    acceptance: Acceptance | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    presence_penalty: float | None = None
    presence_context_size: int = 20
    frequency_penalty: float | None = None
    frequency_context_size: int = 20
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Sampling:
        """Settings from a plain mapping (JSON, flags); unknown names are refused."""
        known = [f.name for f in fields(cls)]
        if not isinstance(values, Mapping):
            raise _refuse("sampling", shown(values), "a mapping of settings", f"Give any of {', '.join(known)}")
        for name in values:
            if name not in known:
                raise _refuse(str(name), "an unknown sampling setting", f"one of {', '.join(known)}", "Remove it")
        return cls(**values)

    def replace(self, **changes: Any) -> Sampling:
        """A copy with some settings changed, checked again."""
        return replace(self, **changes)

    @property
    def law(self) -> Acceptance:
        """The acceptance law this request runs under."""
        if self.temperature <= GREEDY_UP_TO:
            return "greedy"
        if self.acceptance is not None:
            return self.acceptance
        return "coupled" if self.seed is not None else "rejection"

    @property
    def reply_follows_rounds(self) -> bool:
        """True when a seed promises a reply that also depends on where rounds begin and how far they draft."""
        return self.seed is not None and self.law == "rejection"

    @property
    def shape_key(self) -> tuple[float, float, float, int]:
        """(temperature, top_p, min_p, top_k): rows with equal keys are shaped together."""
        return (self.temperature, self.top_p, self.min_p, self.top_k)

    @property
    def needs_history(self) -> bool:
        """True when logits depend on the tokens before them: such a row cannot be scored ahead of its text."""
        return bool(self.processors) or any((self.repetition_penalty, self.presence_penalty, self.frequency_penalty))

    @property
    def touches_logits(self) -> bool:
        """True when raw logits are changed before they are shaped."""
        return self.needs_history or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def plain_greedy(self) -> bool:
        """True when a reply is the argmax of raw logits and nothing else is asked for."""
        return self.law == "greedy" and self.logprobs is None and not self.touches_logits

    def noise_seed(self) -> int:
        """The seed, or a fresh 64-bit one."""
        return self.seed if self.seed is not None else secrets.randbits(64)

    def check_ids(self, vocab_size: int) -> None:
        """Raise UsageError when a bias or stop id does not exist in a vocabulary of this size."""
        for name in ("logit_bias", "stop_ids"):
            for token in getattr(self, name):
                if token >= vocab_size:
                    raise _refuse(name, f"token id {token}", f"ids from 0 to {vocab_size - 1}", "Use this model's ids")


# -- checks: (field name, value) -> the value kept ------------------------------------------------------


def _refuse(name: str, found: object, expected: str, next_step: str) -> UsageError:
    return UsageError(name, found=found, expected=expected, next_step=next_step, code="U20")


def _real(name: str, value: object, low: float, high: float) -> float:
    expected = f"a number from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _refuse(name, shown(value), expected, "Give a number")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond floats; refused by the range below
        number = math.inf
    except Exception:  # somebody else's __float__
        raise _refuse(name, shown(value), expected, "Give a number") from None
    if not low <= number <= high:  # also refuses NaN
        raise _refuse(name, shown(value), expected, "Choose a value in that range")
    return number


def _whole(name: str, value: object, low: int, high: int) -> int:
    expected = f"an integer from {low} to {high}"
    number = as_integer(value)
    if number is None:
        raise _refuse(name, shown(value), expected, "Give a whole number")
    if not low <= number <= high:
        raise _refuse(name, shown(value), expected, "Choose a value in that range")
    return number


def _number(low: float, high: float) -> Callable[[str, object], float]:
    return lambda name, value: _real(name, value, low, high)


def _integer(low: int, high: int) -> Callable[[str, object], int]:
    return lambda name, value: _whole(name, value, low, high)


def _optional(check: Callable[[str, object], Any]) -> Callable[[str, object], Any]:
    return lambda name, value: None if value is None else check(name, value)


def _top_p(name: str, value: object) -> float:
    number = _real(name, value, 0.0, 1.0)
    if number == 0.0:
        raise _refuse(name, "0", "a number above 0, up to 1", "Use temperature 0 for the most likely token")
    return number


def _top_k(name: str, value: object) -> int:
    return max(0, _whole(name, value, -1, MAX_ID))


def _acceptance(name: str, value: object) -> str | None:
    if value is None or (isinstance(value, str) and value in ("rejection", "coupled")):
        return value  # type: ignore[return-value]
    raise _refuse(name, shown(value), "rejection or coupled", "Leave it out, or choose one of the two")


def _stop(name: str, value: object) -> tuple[str, ...]:
    entries = (value,) if isinstance(value, str) else value
    if entries is None:
        return ()
    if not isinstance(entries, (list, tuple)):
        raise _refuse(name, shown(value), "a string or a list of strings", "Give stop strings")
    if len(entries) > MAX_STOPS:
        raise _refuse(name, f"{len(entries)} strings", f"at most {MAX_STOPS}", "Give fewer stop strings")
    for entry in entries:
        if not isinstance(entry, str):
            raise _refuse(name, shown(entry), "a string", "Give stop strings; ids go into stop_ids")
        if len(entry) > MAX_STOP_LENGTH:
            raise _refuse(name, f"{len(entry)} characters", f"at most {MAX_STOP_LENGTH} per string", "Shorten it")
    return tuple(dict.fromkeys(entry for entry in entries if entry))


def _ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    items = value if isinstance(value, (set, frozenset)) else as_items(value)
    if items is None:
        raise _refuse(name, shown(value), "a list of token ids", "Give a list of integers")
    if len(items) > MAX_STOP_IDS:
        raise _refuse(name, f"{len(items)} ids or more", f"at most {MAX_STOP_IDS}", "Give fewer ids")
    return tuple(dict.fromkeys(_whole(name, token, 0, MAX_ID) for token in items))


def _bias(name: str, value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _refuse(name, shown(value), "a mapping of token id to bias", "Give {id: bias}")
    out = {}
    for key, bias in value.items():
        # JSON objects have string keys only
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        out[_whole(f"{name} id", token, 0, MAX_ID)] = _real(f"{name} of id {token}", bias, -MAX_BIAS, MAX_BIAS)
    return out


def _processors(name: str, value: object) -> tuple[Processor, ...]:
    entries = (value,) if callable(value) else value
    if entries is None:
        return ()
    if not isinstance(entries, (list, tuple)) or not all(callable(entry) for entry in entries):
        raise _refuse(name, shown(value), "callables (tokens, logits) -> logits", "Give functions")
    return tuple(entries)


_CONTEXT = _integer(1, MAX_CONTEXT)
_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "temperature": _number(0.0, MAX_TEMPERATURE),
    "top_p": _top_p,
    "top_k": _top_k,
    "min_p": _number(0.0, 1.0),
    "seed": _optional(_integer(*SEED_RANGE)),
    "acceptance": _acceptance,
    "repetition_penalty": _optional(_number(0.0, MAX_PENALTY)),
    "repetition_context_size": _CONTEXT,
    "presence_penalty": _optional(_number(-MAX_PENALTY, MAX_PENALTY)),
    "presence_context_size": _CONTEXT,
    "frequency_penalty": _optional(_number(-MAX_PENALTY, MAX_PENALTY)),
    "frequency_context_size": _CONTEXT,
    "logit_bias": _bias,
    "min_tokens": _integer(0, MAX_ID),
    "stop": _stop,
    "stop_ids": _ids,
    "logprobs": _optional(_integer(0, MAX_LOGPROBS)),
    "processors": _processors,
}
