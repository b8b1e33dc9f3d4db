"""What one request did, as one log line; and the switches that show more."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request import Result, Row
    from .rounds import Clock

log = logging.getLogger("mlx_spec.request")


_forced = False
_held: list[str] | None = None


def force_profiling() -> None:
    """What MLX_SPEC_DRAFT_PROFILE=1 does, asked for by a flag."""
    global _forced
    _forced = True


@contextmanager
def profiled() -> Iterator[None]:
    """Every phase of rounds of engines made meanwhile waits for its result."""
    global _forced
    before, _forced = _forced, True
    try:
        yield
    finally:
        _forced = before


def profiling() -> bool:
    """MLX_SPEC_DRAFT_PROFILE=1: every phase of a round waits for its result, so its time is its own."""
    from .settings import get_settings

    return _forced or bool(get_settings().draft_profile)


@contextmanager
def held() -> Iterator[list[str]]:
    """The profile lines of requests that end meanwhile, kept: printed into a reply they are noise."""
    global _held
    before, _held = _held, []
    try:
        yield _held
    finally:
        _held = before


def gaps_logged() -> bool:
    """MLX_SPEC_GAP_LOG=1: print the top-2 gap of every verified row beside what was accepted."""
    from .settings import get_settings

    return bool(get_settings().gap_log)


def request_line(row: Row, result: Result, clock: Clock) -> None:
    """Log accepted/proposed per position, tokens per round and, of a profiled request, its time split.

    MLX_SPEC_DRAFT_PROFILE=1 prints the line, whatever the level of the log.
    """
    from .settings import get_settings

    if clock.sync:  # unless each phase waits for its result, the one that reads waits for all
        result.timings.phases_ms = {name: seconds * 1e3 for name, seconds in clock.seconds.items()}
    settings = get_settings()
    if settings.draft_profile:
        if _held is not None:
            _held.append(line(row, result))
        else:
            print(line(row, result), file=sys.stderr)
    elif log.isEnabledFor(logging.INFO):
        log.info("%s", line(row, result))
    if settings.print_token_ids:
        print(f"token_ids request={row.request.id} {result.token_ids}", file=sys.stderr)


def line(row: Row, result: Result) -> str:
    """`request=1 tokens=64 rounds=21 accept=41/63 (65.1%) d1=19/21 d2=... split[...]`."""
    report, timings = result.speculation, result.timings
    pairs = zip(report.accepted_by_position, report.proposed_by_position, strict=True)
    depth = " ".join(f"d{i + 1}={a}/{p}" for i, (a, p) in enumerate(pairs))
    rate = f" ({timings.draft_n_accepted / timings.draft_n:.1%})" if timings.draft_n else ""
    split = ", ".join(f"{name} {ms:.1f}" for name, ms in timings.phases_ms.items())
    phases = f" split_ms[{split}]" if split else ""
    return (
        f"request={row.request.id} finish={result.finish_reason} tokens={len(result.token_ids)} "
        f"law={report.law} kind={timings.draft_kind} rounds={timings.draft_rounds} plain_steps={timings.plain_steps} "
        f"accept={timings.draft_n_accepted}/{timings.draft_n}{rate} {depth} "
        f"tokens_per_round={report.tokens_per_round:.2f}{phases}"
    )
