"""The row that serves a request: its governor, stops and text stream, and what its report begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .governor import FixedGovernor, Governor
from .request import Request, Row

if TYPE_CHECKING:
    from .pair import Pair


def new_row(pair: Pair, request: Request) -> Row:
    """A row for `request`, with its own governor, stops and text stream."""
    from .text import TextStream

    sampling = request.sampling
    ends = frozenset() if request.ignore_eos else pair.end_ids
    stops = ends | frozenset(sampling.stop_ids)
    text = None if pair.tokenizer is None else TextStream(pair.tokenizer, sampling.stop, stops, sampling.min_tokens)
    if text is not None:
        stops |= text.stop_ids
    room = pair.target.context - len(request.prompt)
    row = Row(request, _governor(pair, request), text, stops, max(0, min(request.max_tokens, room)))
    _describe(pair, row)
    return row


def _governor(pair: Pair, request: Request) -> FixedGovernor | Governor | None:
    from .settings import get_settings

    plan = pair.plan
    if not (plan.active and request.speculative):
        return None
    width = plan.block_size if request.block_size is None else min(plan.block_size, request.block_size)
    if width < 2:
        return None
    if not (request.adaptive and get_settings().governor):
        return FixedGovernor(width - 1)
    if request.sampling.reply_follows_rounds:  # K from this request's accepted counts and typical costs alone
        return Governor(width - 1, reproducible=True)
    return Governor(width - 1, pair.costs)


def _describe(pair: Pair, row: Row) -> None:
    plan, report = pair.plan, row.report
    report.requested = plan.requested
    report.method = plan.requested if row.governor is not None else "none"
    report.active = row.governor is not None
    report.block_size = plan.block_size if row.governor is not None else 1
    report.block_size_from = plan.block_size_from
    report.exactness = plan.level
    report.per_row_accepts = plan.per_row_accepts
    row.timings.draft_kind = report.method
    report.reason = plan.reason if row.governor is not None or not plan.active else "the request turned drafting off"
