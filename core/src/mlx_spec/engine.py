"""Many requests, one model owner: requests join and leave a lane between rounds.

The engine is a plain object that is stepped; whoever calls `step` (a handle being iterated, `run`) owns
the device for that long. A lock makes calls take turns, but MLX binds streams to threads: load a pair and
step its engine in one thread. From another one it can fail with a missing stream.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from .advance import Advancer
from .errors import RequestError, SpecError
from .prefill import Prefill
from .request import Event, Request, Result, Row, check_prompt, next_id

if TYPE_CHECKING:
    from .pair import Pair

log = logging.getLogger("mlx_spec.engine")


class Handle:
    """The caller's end of one request."""

    def __init__(self, engine: Engine, request: Request):
        self._engine = engine
        self.request = request
        self.events: deque[Event] = deque()
        self.outcome: Result | None = None

    def __iter__(self) -> Iterator[Event]:
        """Events as they are committed; drives the engine when nothing is waiting."""
        while True:
            while self.events:
                yield self.events.popleft()
            if self.outcome is not None:
                return
            self._engine.step()

    def result(self) -> Result:
        """Run to the end and return the reply; raises RequestError when the request failed."""
        for _ in self:
            pass
        outcome = self.outcome
        if outcome is None:
            raise RuntimeError("the engine stopped before this request was finished")
        return outcome

    def cancel(self) -> None:
        """Leave the lane at the next step; the other rows do not notice."""
        self._engine.cancel(self.request.id)


class Engine:
    """One pair, one lane of up to `max_rows` requests, a queue in front of it."""

    def __init__(self, pair: Pair, max_rows: int = 8):
        self.pair = pair
        self.max_rows = max_rows
        self._waiting: deque[Handle] = deque()
        self._handles: dict[int, Handle] = {}
        self._prefill: tuple[Handle, Prefill] | None = None
        self._advancer = Advancer(pair)
        self._lock = threading.RLock()

    def submit(self, request: Request) -> Handle:
        """Queue a request; raises UsageError at once when it can never be served."""
        target = self.pair.target
        limit = self.pair.token_limit or target.vocab_size
        request.prompt = check_prompt(request.prompt, limit, target.context)
        target.check_prompt(request.prompt)
        request.sampling.check_ids(target.vocab_size)
        handle = Handle(self, request)
        with self._lock:
            if request.id in self._handles:  # the same object again while the first is being served
                handle.request = request = replace(request, id=next_id())
            self._handles[request.id] = handle
            self._waiting.append(handle)
        return handle

    def cancel(self, request_id: int) -> None:
        """End a request wherever it is: queued, in prefill or in the lane."""
        with self._lock:
            handle = self._handles.get(request_id)
            if handle is None or handle.outcome is not None:
                return
            if handle in self._waiting:
                self._waiting.remove(handle)
                self._finish(self._new_row(handle), "cancelled")
            elif self._prefill is not None and self._prefill[0] is handle:
                row = self._prefill[1].row
                self._prefill = None
                self._finish(row, "cancelled")
            else:
                for row in self._advancer.rows:
                    if row.request.id == request_id:
                        row.finish_reason = "cancelled"

    @property
    def busy(self) -> bool:
        """True while any request is queued, in prefill or in the lane."""
        return bool(self._waiting or self._prefill or self._advancer.rows)

    def step(self) -> bool:
        """One unit of work: a prefill chunk and/or one round. Returns `busy`."""
        with self._lock:
            self._admit()
            if self._advancer.rows:
                self._advance()
            return self.busy

    def run(self) -> None:
        """Step until every submitted request is finished."""
        while self.step():
            pass

    # -- admission --------------------------------------------------------------------------------------

    def _new_row(self, handle: Handle) -> Row:
        return self._advancer.new_row(handle.request)

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
                self._prefill = (handle, Prefill(self.pair, self._new_row(handle)))
            work = self._prefill[1]
            before = work.done
            try:
                complete = work.chunk()
            except SpecError as exc:
                self._prefill = None
                self._fail(work.row, str(exc))
                continue
            except BaseException as exc:  # a fault of code: shown to who steps, and the engine can go on
                self._prefill = None
                self._fail(work.row, f"{type(exc).__name__}: {exc}")
                raise
            spent += max(1, work.done - before)
            if complete:
                self._prefill = None
                self._advancer.join(work)

    # -- rounds -----------------------------------------------------------------------------------------

    def _advance(self) -> None:
        try:
            emitted = self._advancer.step(more_waiting=bool(self._waiting or self._prefill))
        except RequestError as exc:
            for row in self._advancer.drop_all():
                self._fail(row, str(exc))
            return
        except BaseException as exc:  # the lane is in no known state: its requests end, the engine can go on
            for row in self._advancer.drop_all():
                self._fail(row, f"{type(exc).__name__}: {exc}")
            raise
        for row, event in emitted:
            handle = self._handles[row.request.id]
            handle.events.append(event)
            if row.finished:
                self._close(handle, row)

    def _fail(self, row: Row, text: str) -> None:
        row.error = text
        self._finish(row, "error")

    def _finish(self, row: Row, reason: str) -> None:
        row.finish_reason = reason
        handle = self._handles[row.request.id]
        handle.events.append(row.last_event())
        self._close(handle, row)

    def _close(self, handle: Handle, row: Row) -> None:
        handle.outcome = row.result()
        del self._handles[row.request.id]
        self._advancer.diagnose(row, handle.outcome)
