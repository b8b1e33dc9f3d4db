"""Cut what a verify allows to what the request wants, and turn it into text. Host side only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .accept import NOT_FINITE
from .cutting import cut
from .request import Event, TokenLogprob

if TYPE_CHECKING:
    from .accept import Logprob, RowResult
    from .request import Row


@dataclass(slots=True)
class Kept:
    """What one row keeps of one round.

    Attributes:
        tokens: appended to the reply.
        logprobs: of these tokens, as the verdict gave them.
        text: what they add to the reply; None until somebody asks, unless a stop string had to be looked for in it.
    """

    tokens: tuple[int, ...]
    logprobs: list[Logprob] | None = None
    text: str | None = None


def cut_row(row: Row, result: RowResult) -> Kept:
    """Apply stop ids, stop strings and the length limit; sets the row's finish reason.

    A stop id is part of the tokens but not of the text; text is cut before a stop string, tokens after the one
    completing it. Text is made only where a stop string may end the reply: it can be had later, with the event.
    """
    verdict = cut(result.tokens[: result.accepted + 1], row.stop_ids, row.remaining)
    tokens, reason, text = verdict.tokens, verdict.reason, None
    if row.text is not None and row.text.searches:
        count, text = row.text.take(tokens)
        tokens = tokens[:count]
        if row.text.stopped is not None:
            reason = "stop"
    row.remaining -= len(tokens)
    if not reason and row.remaining <= 0:
        reason = "length"
    if not reason and result.error:  # as plain decoding would: what stands before the failing position is there
        reason, row.error = "error", result.error
        row.error_code = "R12" if result.error == NOT_FINITE else "R13"
    if reason:
        row.finish_reason = reason
    return Kept(tokens, result.logprobs, text)


def tell_row(row: Row, kept: Kept) -> Event:
    """The event of what a row kept; its text lags behind while a stop string or a UTF-8 sequence is open."""
    text = kept.text
    if text is None:
        text = "" if row.text is None else row.text.take(kept.tokens)[1]
    if row.finish_reason:
        row.announced = True
        text += _flush(row)
    row.reply_text += text
    row.told += len(kept.tokens)
    logprobs = _logprobs(row, kept)
    return Event(row.request.id, list(kept.tokens), text, row.finish_reason, logprobs, row.error, row.error_code)


def _flush(row: Row) -> str:
    return row.text.finish().text if row.text is not None else ""


def _logprobs(row: Row, kept: Kept) -> list[TokenLogprob] | None:
    if row.logprobs is None or kept.logprobs is None:
        return None
    new = [TokenLogprob(*item) for item in kept.logprobs[: len(kept.tokens)]]
    row.logprobs += new
    return new
