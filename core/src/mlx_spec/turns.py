"""Taking turns between threads: a lock in order of arrival, left early by who has no need any more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock


class _Waiter:
    """One waiting thread: its gate opens when it has the turn, or when what it waits for has come."""

    __slots__ = ("done", "gate", "turn")

    def __init__(self, done: Callable[[], bool] | None):
        self.done, self.turn = done, False
        self.gate = Lock()
        self.gate.acquire()


class Turns:
    """Not reentrant. A plain lock would let a thread that steps in a loop take it again and again."""

    def __init__(self) -> None:
        self._guard = Lock()
        self._held = False
        self._waiting: deque[_Waiter] = deque()

    def take(self, done: Callable[[], bool] | None = None, wait: float | None = None) -> bool:
        """Wait for the turn; True when it is the caller's, who must `give` it back.

        False as soon as `done()` holds, which may then be asked in other threads and must be cheap, or after
        `wait` seconds (0: only look).
        """
        with self._guard:
            if done is not None and done():
                return False
            if not self._held:
                self._held = True
                return True
            if wait == 0:
                return False
            waiter = _Waiter(done)
            self._waiting.append(waiter)
        opened = False
        try:
            opened = waiter.gate.acquire(timeout=-1 if wait is None else wait)
        finally:
            if not opened:  # out of time, or interrupted: the turn may have come in the same moment
                self._abandon(waiter, keep=wait is not None)
        return waiter.turn

    def settle(self) -> None:
        """Let those go whose `done()` holds by now; the turn stays with the caller."""
        with self._guard:
            self._release_done()

    def give(self) -> None:
        """Hand the turn to the thread that has waited longest."""
        with self._guard:
            self._release_done()
            self._pass_on()

    def _release_done(self) -> None:
        for waiter in [w for w in self._waiting if w.done is not None and w.done()]:
            self._waiting.remove(waiter)
            waiter.gate.release()

    def _pass_on(self) -> None:
        if not self._waiting:
            self._held = False
            return
        waiter = self._waiting.popleft()
        waiter.turn = True
        waiter.gate.release()

    def _abandon(self, waiter: _Waiter, keep: bool) -> None:
        """Stop waiting; a turn that came meanwhile is kept by who ran out of time, else passed on."""
        with self._guard:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif waiter.turn and not keep:
                self._pass_on()
