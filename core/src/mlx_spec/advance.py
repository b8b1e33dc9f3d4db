"""Advance one lane by one round: choose K per row, run it plainly or speculatively, commit, emit."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from . import diagnostics
from .emit import Kept, cut_row, tell_row
from .errors import RequestError
from .governor import choose_together
from .judge import Judge
from .membership import join_lanes, leave_lane, single_lane
from .plain import PlainRun
from .request import Event, Result, Row
from .rounds import Clock, DraftFault, Flight, bind_hooks, commit, land, launch, propose, settle
from .types import RoundRecord

if TYPE_CHECKING:
    from .accept import RowResult
    from .lane import Lane
    from .pair import Pair
    from .prefill import Prefill
    from .types import Draft

log = logging.getLogger("mlx_spec.engine")
FAULT_LIMIT = 8  # faults in a row after which a drafter is left alone for the rest of a request


class Advancer:
    """The rows of one lane and everything that moves them forward."""

    def __init__(self, pair: Pair):
        self.pair = pair
        self.rows: list[Row] = []
        self.lane: Lane | None = None
        self.hooks = bind_hooks(pair)
        self.judge = Judge(pair.target.vocab_size, pair.token_limit, diagnostics.gaps_logged(), pair.greedy)
        self.clock = Clock(sync=diagnostics.profiling())
        self._plain: PlainRun | None = None
        self._arrivals: list[Prefill] = []
        self._faults = 0
        self._empty = 0  # proposes in a row that drafted nothing
        self._reported: set[str] = set()
        self._fresh_company = True  # timings of the first round after a change say nothing about K
        self._span_started = 0.0  # of the plain step or round that is under way
        self._left = 0.0  # when the last step ended
        self._away = 0.0  # seconds from there to this one: time of the caller, not of what is under way
        self._cleared = 0
        self._late: Exception | None = None  # of what was begun early: raised by the step it was for

    # -- rows -------------------------------------------------------------------------------------------

    def join(self, work: Prefill) -> None:
        """Take a prefilled row in, between rounds."""
        if work.row.remaining <= 0:
            work.row.finish_reason = "length"
        self._arrivals.append(work)
        self.rows.append(work.row)
        if self._plain is not None:
            self._plain.stop()

    def drop_all(self) -> list[Row]:
        """Forget the lane (after an error of the target); returns the rows that were in it or about to join.

        What was begun early fails alone: rows that came meanwhile stay.
        """
        count = len(self._lane_rows()) if self._late is not None else len(self.rows)
        rows, self.rows, self.lane, self._plain = self.rows[:count], self.rows[count:], None, None
        if self._late is None:
            self._arrivals = []
        self._late = None
        return rows

    # -- one step ---------------------------------------------------------------------------------------

    def step(self, joining: bool = False) -> list[tuple[Row, Event]]:
        """One plain step or one round for every row; returns what each row may now show.

        joining: a request is about to join.
        """
        if self._late is not None:
            if not all(row.finished for row in self._lane_rows()):
                raise self._late
            self._late = None  # nobody waits for it any more
            return self._leave_finished()
        self._away = time.perf_counter() - self._left
        if not self._under_way:
            self._change_company()
        gone = self._leave_finished()
        if gone or self.lane is None:
            return gone
        rows = self._lane_rows()
        self._start_clocks(rows)
        if not self._under_way:
            self._away = 0.0
            self._begin(rows)
        return self._plain_step(rows) if self.lane.flight is None else self._round(rows, self.lane.flight, joining)

    def _cost(self, seconds: float) -> float | None:
        """What a step or round of so many seconds tells about costs; nothing, if most were the caller's."""
        return seconds if self._away < seconds / 2 else None

    @property
    def _under_way(self) -> bool:
        """True when the next step was begun by the last one."""
        return self._plain is not None or (self.lane is not None and self.lane.flight is not None)

    def _begin(self, rows: Sequence[Row]) -> None:
        """Choose K, start the drafts and build their verify; or start plain steps, where there are no drafts."""
        lane, clock = self.lane, self.clock
        if lane is None:
            raise RuntimeError("a step without a lane")
        self._span_started = time.perf_counter()
        budget = self._budget(rows)
        if not any(budget):
            self._start_plain(rows)
            return
        clock.start()
        try:
            draft = propose(lane, self.hooks, budget, self.judge.drawer(rows, lane))
        except DraftFault as fault:
            self._faulty(rows, str(fault))
            return
        mx.async_eval(draft.tokens)  # drafted while the host builds the verify
        clock.lap("propose", draft.tokens)
        self._faults = 0
        if not any(draft.counts or ()):
            self._nothing_drafted(rows)
            return
        self._empty = 0
        launch(lane, self.hooks, rows, draft, self.judge, clock)

    def _begin_early(self, rows: Sequence[Row], joining: bool) -> None:
        """Begin the next step, verify and all, before anybody is told of this one.

        Meanwhile the device works on. Only for a row alone that goes on, with nobody at the door. Then what was begun
        is what the next step does, in every case but one: the row is cancelled, and all of it goes with the lane. So
        a drafter never drafts twice from one place, and sees its rollback before it is asked again. A request that
        arrives meanwhile joins one step later.
        """
        if len(rows) > 1 or rows[0].finished or joining or self._arrivals:
            return
        try:
            self._begin(rows)
            if self.lane is not None and self.lane.flight is not None and self.lane.flight.pending is not None:
                self.lane.flight.pending.start()
        except Exception as exc:  # what was committed before is told first
            self._late = exc

    @staticmethod
    def _start_clocks(rows: Sequence[Row]) -> None:
        """A reply's clock starts before its first round, whose tokens it counts."""
        now = time.perf_counter()
        for row in rows:
            if row.started is None:
                row.started = now

    def _lane_rows(self) -> list[Row]:
        return self.rows[: self.lane.size] if self.lane is not None else []

    def _change_company(self) -> None:
        if self._arrivals:
            present = [self.lane] if self.lane is not None else []
            self.lane = join_lanes(self.pair, [*present, *(single_lane(self.pair, work) for work in self._arrivals)])
            self._arrivals, self._fresh_company = [], True
        if self.pair.costs is not None and self.lane is not None:
            for row in self._lane_rows():
                if row.governor is not None:
                    row.governor.set_costs(self.pair.costs.for_batch(self.lane.size))

    def _leave_finished(self) -> list[tuple[Row, Event]]:
        """Rows that are finished before a round (cancelled, nothing to generate) leave with a last event.

        A round that was begun for a row alone goes with it.
        """
        if self._plain is not None or self.lane is None:
            return []
        done = [i for i, row in enumerate(self._lane_rows()) if row.finished]
        if not done:
            return []
        gone = [self.rows[i] for i in done]
        self._remove(done)
        return [(row, row.last_event()) for row in gone]

    def _remove(self, done: Sequence[int]) -> None:
        if self.lane is None or not done:
            return
        stay = [i for i in range(self.lane.size) if i not in done]
        self.lane = leave_lane(self.lane, stay)
        self.rows = [row for i, row in enumerate(self.rows) if i not in done]
        self._fresh_company = True

    def _budget(self, rows: Sequence[Row]) -> list[int]:
        """K per row: what its governor wants, within what is left of the reply."""
        drafter = self.pair.drafter
        if drafter is None or not self.pair.plan.active:
            return [0] * len(rows)
        if len(rows) > 1 and not drafter.capabilities.batch:
            for row in rows:
                row.note_fallback(
                    f"{drafter.kind} drafter serves one request at a time: plain decoding in company; "
                    "with max_rows=1 requests take turns and all are drafted"
                )
            return [0] * len(rows)
        governors = [row.governor if row.drafting else None for row in rows]
        return choose_together(governors, [max(0, row.remaining - 1) for row in rows])

    # -- plain ------------------------------------------------------------------------------------------

    def _start_plain(self, rows: Sequence[Row]) -> None:
        spans = [row.governor.plain_span() for row in rows if row.governor is not None and row.drafting]
        self._run_plain(rows, max(1, min([*spans, max(row.remaining for row in rows)])))

    def _run_plain(self, rows: Sequence[Row], steps: int = 1) -> None:
        if self.lane is None:
            raise RuntimeError("plain step without a lane")
        self._plain = PlainRun(self.lane, self.hooks, rows, self.judge, steps)
        self._span_started = time.perf_counter()

    def _plain_step(self, rows: Sequence[Row]) -> list[tuple[Row, Event]]:
        run, lane = self._plain, self.lane
        if run is None or lane is None:
            raise RuntimeError("plain step without a run")
        results, taps = run.next()
        now = time.perf_counter()
        seconds, self._span_started = now - self._span_started, now
        first, self._fresh_company = self._fresh_company, False
        out: list[tuple[Row, Event]] = []
        keep, tokens = [1] * len(rows), []
        for i, (row, result) in enumerate(zip(rows, results, strict=True)):
            if row.finished:  # what it would have said is only needed to keep the lane's bookkeeping whole
                lane.tokens[i] = list(row.tokens) if lane.tokens[i] is row.tokens else lane.tokens[i]
                tokens.append(result.tokens[:1] or [0])
                continue
            kept = cut_row(row, result)
            row.timings.plain_steps += 1
            if row.governor is not None:
                row.governor.observe(0, 0, None if first else self._cost(seconds))
            tokens.append(list(kept.tokens))
            out.append((row, self._tell(row, kept)))
        self._commit_plain(lane, rows, keep, tokens, taps, run)
        if any(row.finished for row in rows):
            run.stop()
        if run.done or len(rows) == sum(row.finished for row in rows):
            self._plain = None
            out += [(row, row.last_event()) for row in rows if row.finished and not row.announced]  # cancelled
            self._remove([i for i, row in enumerate(rows) if row.finished])
        self._housekeep(len(out))
        self._left = time.perf_counter()
        return out

    def _commit_plain(
        self,
        lane: Lane,
        rows: Sequence[Row],
        keep: Sequence[int],
        tokens: Sequence[Sequence[int]],
        taps: dict[str, mx.array],
        run: PlainRun,
    ) -> None:
        ahead = lane.anchors if run.in_flight else None
        # nobody will ask for the taps of rows that have all stopped drafting
        commit(lane, keep, tokens, taps if any(row.drafting for row in rows) else {})
        for i, row in enumerate(rows):
            if row.finished and lane.tokens[i] is row.tokens:
                lane.tokens[i] = list(row.tokens)  # steps still in flight must not grow a finished reply
        if ahead is not None:
            lane.anchors = ahead

    # -- speculative ------------------------------------------------------------------------------------

    def _round(self, rows: Sequence[Row], flight: Flight, joining: bool) -> list[tuple[Row, Event]]:
        lane, clock = self.lane, self.clock
        if lane is None:
            raise RuntimeError("round without a lane")
        clock.start()
        if flight.pending is None:
            flight = launch(lane, self.hooks, rows, flight.draft, self.judge, clock)
        results = land(flight, clock, self.pair.plan.per_row_accepts)
        kept = [cut_row(row, result) for row, result in zip(rows, results, strict=True)]
        clock.lap("emit")
        keep = [max(1, len(k.tokens)) for k in kept]
        settle(lane, self.hooks, keep, clock)
        for i, k in enumerate(kept):
            if not k.tokens:  # its stand-in token is not part of the reply
                lane.tokens[i] = list(lane.tokens[i])
        commit(lane, keep, [k.tokens or (0,) for k in kept], flight.taps)
        self._rollback_drafter(lane, keep)
        clock.lap("commit")
        self._observe(rows, results, flight.draft, kept, time.perf_counter() - self._span_started)
        self._begin_early(rows, joining)
        clock.start()
        out = [(row, self._tell(row, k)) for row, k in zip(rows, kept, strict=True)]
        self._remove([i for i, row in enumerate(rows) if row.finished])
        self._housekeep(sum(len(k.tokens) for k in kept))
        self._prepare(rows)
        clock.lap("emit")
        self._left = time.perf_counter()
        return out

    def _prepare(self, rows: Sequence[Row]) -> None:
        """Decide on the round after one that was begun early while the device is busy with that."""
        if self.lane is not None and self.lane.flight is not None and rows[0].governor is not None:
            rows[0].governor.prepare()

    def _observe(
        self,
        rows: Sequence[Row],
        results: Sequence[RowResult],
        draft: Draft,
        kept: Sequence[Kept],
        seconds: float,
    ) -> None:
        first, self._fresh_company = self._fresh_company, False
        widest = max(draft.counts or [0])
        for row, result, one, count in zip(rows, results, kept, draft.counts or (), strict=True):
            accepted = min(result.accepted, len(one.tokens))
            row.count_round(RoundRecord(tuple(result.draft_ids), accepted, one.tokens, count + 1))
            if row.governor is not None:
                row.governor.observe(count, result.accepted, None if first else self._cost(seconds), width=widest)
            if result.draft_fault:
                self._report(f"draft fault: {result.draft_fault}", rows)

    def _rollback_drafter(self, lane: Lane, keep: Sequence[int]) -> None:
        try:
            self.hooks.rollback(lane=lane, side="drafter", keep=keep)
        except Exception as exc:  # foreign code: costs acceptance only
            log.debug("drafter rollback raised", exc_info=True)
            self._report(f"drafter rollback raised {type(exc).__name__}: {exc}", self._lane_rows())
            self._stop_drafting(self._lane_rows(), "the drafter could not roll back")

    def _faulty(self, rows: Sequence[Row], reason: str) -> None:
        self._faults += 1
        self._report(reason, rows)
        if self._faults >= FAULT_LIMIT:
            self._stop_drafting(rows, f"{self._faults} drafter faults in a row")
        if self.lane is not None:
            self._rollback_drafter(self.lane, [1] * self.lane.size)
        self._run_plain(rows)

    def _nothing_drafted(self, rows: Sequence[Row]) -> None:
        """A few pipelined steps before asking again: the more often nothing came, the more, up to four."""
        self._empty = min(self._empty + 1, 4)
        drafter, lane = self.pair.drafter, self.lane
        if drafter is not None and lane is not None and lane.draft_state is not None:
            try:
                reasons = [str(reason or "") for reason in drafter.explain(lane.draft_state)]
            except Exception as exc:  # foreign code: costs an explanation only
                log.debug("drafter explain raised", exc_info=True)
                reasons = [f"drafter explain raised {type(exc).__name__}: {exc}"] * len(rows)
            for row, reason in zip(rows, reasons, strict=False):
                if reason:
                    row.note_fallback(reason)
        alone = any(row.sampling.reply_follows_rounds for row in rows)  # in company it would be asked every time
        self._run_plain(rows, 1 if alone else min(self._empty, max(row.remaining for row in rows)))

    def _stop_drafting(self, rows: Sequence[Row], reason: str) -> None:
        for row in rows:
            row.stop_drafting(reason)

    def _report(self, reason: str, rows: Sequence[Row]) -> None:
        for row in rows:
            row.note_fallback(reason)
        if reason not in self._reported:
            self._reported.add(reason)
            log.warning("%s: the reply goes on without these drafts", reason)

    # -- shared -----------------------------------------------------------------------------------------

    def _tell(self, row: Row, kept: Kept) -> Event:
        event = tell_row(row, kept)
        if row.started is not None:
            row.timings.predicted_ms = (time.perf_counter() - row.started) * 1e3
        return event

    def _housekeep(self, tokens: int) -> None:
        """Release freed buffers every 256 tokens, however many tokens a round commits."""
        self._cleared += tokens
        if self._cleared >= 256:
            self._cleared %= 256
            mx.clear_cache()

    def diagnose(self, row: Row, result: Result) -> None:
        """The one line per request, and learned costs to disk."""
        diagnostics.request_line(row, result, self.clock)
        if row.governor is not None:
            row.governor.finish()
        if self.pair.costs is not None:
            self.pair.costs.save()


__all__ = ["Advancer", "RequestError"]
