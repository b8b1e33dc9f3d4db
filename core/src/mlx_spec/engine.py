"""Many requests, one model owner: requests join and leave a lane between rounds.

Submitting, waiting for replies, iterating and cancelling work from any thread. The engine has no thread of
its own: one of the threads that wait for something steps it for all, the others sleep until what they wait
for has come or the one that steps is served. `Engine._turns` says who steps; `Pair.device` says which engine of
a pair works.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from .advance import Advancer
from .errors import SpecError
from .intake import check_pair, check_request, check_rows
from .prefill import Prefill
from .request import Event, Request, Result, Row, next_id
from .rows import new_row
from .turns import Turns

if TYPE_CHECKING:
    from .pair import Pair

log = logging.getLogger("mlx_spec.engine")


class Handle:
    """The caller's end of one request; may be used in any thread, also in several.

    Attributes:
        prompt_done: prompt tokens processed so far, chunk by chunk; the last one is the first round's.
    """

    def __init__(self, engine: Engine, request: Request):
        self._engine = engine
        self.request = request
        self.events: deque[Event] = deque()
        self.outcome: Result | None = None
        self.fault: Exception | None = None
        self.prompt_done = 0

    def __iter__(self) -> Iterator[Event]:
        """Events as they are committed; steps the engine when no other thread does.

        The last one has a finish reason. Every event goes to one iterator only. When code of a plugin or of
        the target failed in a way that has no message, that exception is raised after the last event.
        """
        while True:
            last = self.outcome is not None  # looked at first: the last event is there before the outcome is
            try:
                event = self.events.popleft()
            except IndexError:  # none waits: the reply is over, or the engine has to go on
                if last:
                    break
                self._engine.drive(self._has_news)
            else:
                yield event
        if self.fault is not None:
            raise self.fault

    def result(self) -> Result:
        """Wait for the end of the reply, stepping the engine when no other thread does, and return it.

        A request that cannot go on has finish_reason "error" and says why in `error`. An exception without
        a message for users, raised by code of a plugin or of the target, is raised here again.
        """
        self._engine.drive(self._is_done)
        if self.fault is not None:
            raise self.fault
        if self.outcome is None:
            raise RuntimeError("the engine stopped before this request was finished")
        return self.outcome

    def cancel(self) -> None:
        """Leave the lane at the next step; the other rows do not notice."""
        self._engine.cancel(self.request.id)

    def _is_done(self) -> bool:
        return self.outcome is not None

    def _has_news(self) -> bool:
        return bool(self.events) or self.outcome is not None


class Engine:
    """One pair, one lane of up to `max_rows` requests, a queue in front of it.

    On a target without the capability `batch` the lane has one row, and the queue does the rest. All methods may
    be called from any thread. Engines that share a pair take turns, step by step.
    """

    def __init__(self, pair: Pair, max_rows: int = 8):
        self.pair = check_pair(pair)
        self.max_rows = check_rows(max_rows)
        if max_rows > 1 and not pair.target.capabilities.batch:
            log.info("%s serves one request at a time: max_rows %d is 1", pair.target.model_type, max_rows)
            self.max_rows = 1
        self._waiting: deque[Handle] = deque()
        self._handles: dict[int, Handle] = {}  # of every request that is not finished
        self._cancelled: deque[int] = deque()  # ids, until the next step
        self._prefill: tuple[Handle, Prefill] | None = None
        self._advancer = Advancer(pair)
        self._turns = Turns()  # who holds them may touch what is above
        self._door = threading.Lock()  # ids are handed out one at a time

    def submit(self, request: Request) -> Handle:
        """Queue a request; raises UsageError when it can never be served, and queues nothing then.

        The handle's `request` is a checked copy, with an id of its own when the same one is being served already.
        """
        request = check_request(request, self.pair)
        if request.sampling.processors:
            from .processors import evaluate_held

            evaluate_held(request.sampling.processors)
        handle = Handle(self, request)
        with self._door:
            if request.id in self._handles:
                handle.request = request = replace(request, id=next_id())
            self._handles[request.id] = handle
            self._waiting.append(handle)
        return handle

    def cancel(self, request_id: int) -> None:
        """End a request wherever it is: queued, in prefill or in the lane. Unknown ids are ignored.

        While another thread steps, this happens before its next step.
        """
        if not isinstance(request_id, int):
            return
        self._cancelled.append(request_id)
        turn = self._turns.claim()
        try:
            if turn.take(wait=0):
                self._cancel_asked()
        finally:
            turn.give()

    @property
    def busy(self) -> bool:
        """True while any request is queued, in prefill or in the lane."""
        return bool(self._handles)

    def step(self) -> bool:
        """One unit of work: a prefill chunk and/or one round. Returns `busy`.

        What goes wrong with a request ends that request, and its handle tells; nothing is raised here but
        what is no Exception (KeyboardInterrupt above all), which ends every request of the lane.
        """
        turn = self._turns.claim()
        try:
            turn.take()
            return self._step()
        finally:
            turn.give()

    def run(self) -> None:
        """Step until every submitted request is finished."""
        while self.step():
            pass

    def drive(self, done: Callable[[], bool]) -> None:
        """Step until `done()` holds or nothing is left to do; while another thread steps, wait.

        `done` is asked after every step, also in other threads: it may only look.
        """
        more = True
        while more and not done():
            turn = self._turns.claim()
            try:
                if not turn.take(done):
                    return
                while more and not done():
                    more = self._step()
                    self._turns.settle()
            finally:
                turn.give()

    # -- one step, by whoever has the turn --------------------------------------------------------------

    def _step(self) -> bool:
        try:
            self._cancel_asked()
            if self._handles:
                self.pair.device.run(self._work)
        except BaseException as exc:  # interrupted anywhere: what was not waiting any more is in no known state
            known = {row.request.id: row for row in self._advancer.drop_all()}
            self._prefill = None
            for handle in [h for h in list(self._handles.values()) if h not in self._waiting]:
                self._fail(handle, known.get(handle.request.id) or self._new_row(handle), exc)
            raise
        return self.busy

    def _work(self) -> None:
        self._admit()
        if self._advancer.rows:
            self._advance()

    def _new_row(self, handle: Handle) -> Row:
        return new_row(self.pair, handle.request)

    def _cancel_asked(self) -> None:
        while self._cancelled:
            request_id = self._cancelled.popleft()
            handle = self._handles.get(request_id)
            if handle is None:
                continue
            if handle in self._waiting:
                self._waiting.remove(handle)
                self._finish(handle, self._new_row(handle), "cancelled")
            elif self._prefill is not None and self._prefill[0] is handle:
                row = self._prefill[1].row
                self._prefill = None
                self._finish(handle, row, "cancelled")
            else:
                for row in self._advancer.rows:
                    if row.request.id == request_id:
                        row.finish_reason = "cancelled"

    # -- admission --------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Prefill waiting requests and let them join, up to one chunk's worth of prompt tokens per step.

        Running rows thus wait for at most one chunk between rounds; with an empty lane nobody waits and
        prefill goes on until somebody can run.
        """
        spent = 0
        while spent < self.pair.plan.prefill_step or not self._advancer.rows:
            if self._prefill is None:
                if not self._waiting or len(self._advancer.rows) >= self.max_rows:
                    return
                handle = self._waiting.popleft()
                row = self._new_row(handle)
                try:
                    self._prefill = (handle, Prefill(self.pair, row))
                except Exception as exc:  # ends this request; its handle raises or tells
                    self._fail(handle, row, exc)
                    continue
            handle, work = self._prefill
            before = work.done
            try:
                complete = work.chunk()
            except Exception as exc:  # likewise
                self._prefill = None
                self._fail(handle, work.row, exc)
                continue
            spent += max(1, work.done - before)
            handle.prompt_done = work.done
            if complete:
                self._prefill = None
                self._advancer.join(work)

    @property
    def _joining(self) -> bool:
        """True when a request is being prefilled, or one waits and there is a row for it."""
        return self._prefill is not None or bool(self._waiting and len(self._advancer.rows) < self.max_rows)

    # -- rounds -----------------------------------------------------------------------------------------

    def _advance(self) -> None:
        try:
            emitted = self._advancer.step(joining=self._joining)
        except Exception as exc:  # the lane is in no known state: its requests end, the engine can go on
            for row in self._advancer.drop_all():
                if row.request.id in self._handles:
                    self._fail(self._handles[row.request.id], row, exc)
            return
        for row, event in emitted:
            handle = self._handles[row.request.id]
            handle.events.append(event)
            if row.finished:
                self._close(handle, row)

    def _fail(self, handle: Handle, row: Row, exc: BaseException) -> None:
        """End a request with an error; what is no message for users reaches its caller as it is."""
        row.error = str(exc) if isinstance(exc, SpecError) else f"{type(exc).__name__}: {exc}"
        row.error_code = exc.code if isinstance(exc, SpecError) else ""
        if isinstance(exc, Exception) and not isinstance(exc, SpecError):
            log.debug("request %d failed", row.request.id, exc_info=exc)
            handle.fault = exc
        self._finish(handle, row, "error")

    def _finish(self, handle: Handle, row: Row, reason: str) -> None:
        row.finish_reason = reason
        handle.events.append(row.last_event())
        self._close(handle, row)

    def _close(self, handle: Handle, row: Row) -> None:
        result = row.result()
        try:
            self._advancer.diagnose(row, result)
        except Exception:  # a log that cannot be written must not keep the reply back
            log.warning("the line of request %d could not be written", row.request.id, exc_info=True)
        handle.outcome = result
        del self._handles[row.request.id]
