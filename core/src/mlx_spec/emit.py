"""Cut what a verify allows to what the request wants, and turn it into text. Host side only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .cutting import cut
from .request import Event, TokenLogprob

if TYPE_CHECKING:
    from .accept import RowResult
    from .request import Row


@dataclass(slots=True)
class Emission:
    """Tokens one row keeps of one round, and the event its caller gets after the commit."""

    tokens: tuple[int, ...]
    event: Event


def settle_row(row: Row, result: RowResult) -> Emission:
    """Apply stop ids, stop strings and the length limit; sets the row's finish reason.

    Text lags behind tokens while a stop string or a UTF-8 sequence is open. A stop id is part of the
    tokens but not of the text; text is cut before a stop string, tokens after the one completing it.
    """
    verdict = cut(result.tokens[: result.accepted + 1], row.stop_ids, row.remaining)
    tokens, reason = verdict.tokens, verdict.reason
    text = ""
    if row.text is not None:
        count, text = row.text.take(tokens)
        tokens = tokens[:count]
        if row.text.stopped is not None:
            reason = "stop"
    row.remaining -= len(tokens)
    if not reason and row.remaining <= 0:
        reason = "length"
    if not reason and result.error:  # as plain decoding would: what stands before the failing position is there
        reason, row.error = "error", result.error
    if reason:
        row.finish_reason, row.announced = reason, True
        text += _flush(row)
    logprobs = _logprobs(row, result, len(tokens))
    row.reply_text += text
    return Emission(tokens, Event(row.request.id, list(tokens), text, row.finish_reason, logprobs, row.error))


def _flush(row: Row) -> str:
    return row.text.finish().text if row.text is not None else ""


def _logprobs(row: Row, result: RowResult, count: int) -> list[TokenLogprob] | None:
    if row.logprobs is None or result.logprobs is None:
        return None
    new = [TokenLogprob(*item) for item in result.logprobs[:count]]
    row.logprobs += new
    return new
