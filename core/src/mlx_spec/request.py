"""A request, the live row that serves it, and the result its caller gets."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, cast

from .lane import Committed
from .types import Message, RoundRecord

if TYPE_CHECKING:
    from .governor import FixedGovernor, Governor
    from .sampling import Sampling
    from .text import TextStream

_ids = itertools.count(1)


def next_id() -> int:
    """An id no request of this process has had."""
    return next(_ids)


@dataclass(slots=True)
class Request:
    """What to generate.

    Attributes:
        prompt: token ids, at least one, or messages, [{"role": "user", "content": "..."}], which the chat template
            of the target makes ids of.
        sampling: temperature, filters, seed, stops, penalties.
        max_tokens: largest number of reply tokens.
        ignore_eos: go on past the model's end ids (explicit stop ids still end the reply).
        adaptive: False pins every round to the full width.
        speculative: False decodes this request plainly, to its end: a row that was prefilled without its drafter has
            nothing to draft from.
        block_size: narrower L for this request, None for the pair's.
    """

    prompt: Sequence[int] | Sequence[Message]
    sampling: Sampling
    max_tokens: int = 256
    ignore_eos: bool = False
    adaptive: bool = True
    speculative: bool = True
    block_size: int | None = None
    id: int = field(default_factory=next_id)


@dataclass(slots=True)
class Timings:
    """Clocks and counters of one request; names follow what llama.cpp clients read.

    `phases_ms` is filled under MLX_SPEC_DRAFT_PROFILE=1 and `--profile` only, where every phase waits for its result.
    """

    prompt_ms: float = 0.0
    predicted_ms: float = 0.0
    prompt_per_second: float = 0.0
    predicted_per_second: float = 0.0
    draft_n: int = 0
    draft_n_accepted: int = 0
    draft_rounds: int = 0
    draft_kind: str = "none"
    plain_steps: int = 0
    phases_ms: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class SpeculationReport:
    """Which path served a request, and why.

    `acceptance_by_position[i]` is accepted / proposed of draft position i + 1. Without `per_row_accepts` every
    row of a lane counts the fewest drafts accepted in it.
    """

    requested: str = "none"
    active: bool = False
    method: str = "none"
    block_size: int = 1
    block_size_from: str = ""
    exactness: str = "unproven"
    per_row_accepts: bool = True
    law: str = "greedy"
    acceptance_by_position: list[float] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    proposed_by_position: list[int] = field(default_factory=list)
    tokens_per_round: float = 0.0
    governor: str = ""
    reason: str = ""
    fallbacks: list[str] = field(default_factory=list)


@dataclass(slots=True)
class TokenLogprob:
    """Log-probability of one emitted token, and the most likely alternatives (id, logprob)."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class Event:
    """What leaves the engine after a commit.

    `text` is ready to show; it may lag `token_ids` while a stop string or a UTF-8 sequence is open.
    `finish_reason` is "" until the last event: "stop", "length", "error" or "cancelled". `error_code` is that of
    docs/errors.md, "" for an exception without a message for users.
    """

    request_id: int
    token_ids: list[int]
    text: str
    finish_reason: str = ""
    logprobs: list[TokenLogprob] | None = None
    error: str = ""
    error_code: str = ""


@dataclass(slots=True)
class Result:
    """A finished reply."""

    token_ids: list[int]
    text: str
    finish_reason: str
    prompt_tokens: int
    timings: Timings
    speculation: SpeculationReport
    rounds: list[RoundRecord]
    logprobs: list[TokenLogprob] | None = None
    error: str = ""
    error_code: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The object `spec generate --json` prints (rounds left out)."""
        out: dict[str, Any] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_tokens": self.prompt_tokens,
            "finish_reason": self.finish_reason,
            "timings": asdict(self.timings),
            "speculation": asdict(self.speculation),
        }
        if self.logprobs is not None:
            out["logprobs"] = [asdict(item) for item in self.logprobs]
        if self.error:
            out["error"], out["error_code"] = self.error, self.error_code
        return out


class Row:
    """One request while it is being served: its tokens, clocks, governor and text stream."""

    def __init__(
        self,
        request: Request,
        governor: Governor | FixedGovernor | None,
        text: TextStream | None,
        stop_ids: frozenset[int],
        remaining: int,
    ):
        self.request = request
        self.sampling = request.sampling
        self.governor = governor
        self.text = text
        self.stop_ids = stop_ids
        self.remaining = remaining
        self.seed = request.sampling.noise_seed()
        prompt = cast("Sequence[int]", request.prompt)  # a checked request's
        self.prompt_length = len(prompt)
        self.tokens = Committed(int(t) for t in prompt)
        self.reply_text = ""
        self.logprobs: list[TokenLogprob] | None = [] if request.sampling.logprobs is not None else None
        self.rounds: list[RoundRecord] = []
        self.timings = Timings()
        self.report = SpeculationReport(law=request.sampling.law)
        self.finish_reason = ""
        self.error = self.error_code = ""
        self.submitted = time.perf_counter()
        self.started: float | None = None  # first round began
        self.drafting = governor is not None
        self.told = 0  # reply tokens that events were made of
        self.announced = False  # its caller was told the finish reason

    @property
    def reply(self) -> list[int]:
        """Reply token ids so far; those of a round that was interrupted before its event are none."""
        return self.tokens[self.prompt_length : self.prompt_length + self.told]

    @property
    def finished(self) -> bool:
        """True once a finish reason is set."""
        return bool(self.finish_reason)

    def last_event(self) -> Event:
        """The event that tells the caller how a row ended which emitted nothing at its end."""
        self.announced = True
        return Event(self.request.id, [], "", self.finish_reason, None, self.error, self.error_code)

    def note_fallback(self, reason: str) -> None:
        """Record once why something did not run as asked."""
        if reason not in self.report.fallbacks:
            self.report.fallbacks.append(reason)

    def stop_drafting(self, reason: str) -> None:
        """Decode plainly from here on, and say why."""
        self.drafting = False
        self.report.active = False
        self.report.reason = f"plain decoding: {reason}"
        self.note_fallback(self.report.reason)

    def count_round(self, record: RoundRecord) -> None:
        """Account one verify with drafts."""
        self.rounds.append(record)
        drafted = len(record.draft_ids)
        timings, report = self.timings, self.report
        if not drafted:  # its company drafted
            timings.plain_steps += 1
            return
        timings.draft_rounds += 1
        timings.draft_n += drafted
        timings.draft_n_accepted += record.accepted
        missing = drafted - len(report.proposed_by_position)
        if missing > 0:
            report.proposed_by_position += [0] * missing
            report.accepted_by_position += [0] * missing
        for i in range(drafted):
            report.proposed_by_position[i] += 1
            report.accepted_by_position[i] += i < record.accepted

    def result(self) -> Result:
        """Close the books."""
        timings, report = self.timings, self.report
        n = len(self.reply)
        if timings.prompt_ms:
            timings.prompt_per_second = self.prompt_length / timings.prompt_ms * 1e3
        if timings.predicted_ms:
            timings.predicted_per_second = n / timings.predicted_ms * 1e3
        report.acceptance_by_position = [
            a / p if p else 0.0 for a, p in zip(report.accepted_by_position, report.proposed_by_position, strict=True)
        ]
        forwards = timings.draft_rounds + timings.plain_steps
        report.tokens_per_round = n / forwards if forwards else 0.0
        if self.governor is not None:
            chosen = self.governor.state if self.drafting else "K=0: drafting has stopped"
            report.governor = chosen if forwards else "not started"
        return Result(
            token_ids=self.reply,
            text=self.reply_text,
            finish_reason=self.finish_reason,
            prompt_tokens=self.prompt_length,
            timings=timings,
            speculation=report,
            rounds=self.rounds,
            logprobs=self.logprobs,
            error=self.error,
            error_code=self.error_code,
        )
