"""Taking turns between threads: a lock in order of arrival, left early by who has no need any more.

    turn = turns.claim()
    try:
        if turn.take():
            ...
    finally:
        turn.give()

The turn belongs to the claim, not to the thread, and only for as long as somebody refers to the claim: one that
an interrupt took out of the hands of its thread, between any two lines, is free again within a second.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from threading import Lock

LOOK = 1.0  # seconds after which a waiting thread looks whether the turn was lost


class Turns:
    """Not reentrant. A plain lock would let a thread that steps in a loop take it again and again."""

    def __init__(self) -> None:
        self.guard = Lock()  # what is below changes under it
        self.waiting: deque[Claim] = deque()
        self._held: weakref.ref[Claim] | None = None

    @property
    def holder(self) -> Claim | None:
        """The claim that has the turn."""
        return None if self._held is None else self._held()

    def claim(self) -> Claim:
        """A claim of the calling thread, not made yet."""
        return Claim(self)

    def settle(self) -> None:
        """Let those go whose `done()` holds by now; the turn stays with the caller."""
        with self.guard:
            self.release_done()

    def release_done(self) -> None:
        """Open the gates of claims that have no need any more."""
        for claim in [c for c in self.waiting if c.done is not None and c.done()]:
            self.let_in(claim)

    def hand_to(self, claim: Claim | None) -> None:
        """Give the turn to `claim`, or to nobody."""
        self._held = None if claim is None else weakref.ref(claim)
        if claim is not None:
            self.let_in(claim)

    def let_in(self, claim: Claim) -> None:
        """End the wait of one claim; may be repeated after an interrupt."""
        if claim.gate.locked():
            claim.gate.release()
        if claim in self.waiting:
            self.waiting.remove(claim)


class Claim:
    """One thread's claim to a turn; its gate opens with the turn, or when what it waits for has come."""

    __slots__ = ("__weakref__", "_turns", "done", "gate")

    def __init__(self, turns: Turns):
        self._turns = turns
        self.done: Callable[[], bool] | None = None
        self.gate = Lock()
        self.gate.acquire()

    def take(self, done: Callable[[], bool] | None = None, wait: float | None = None) -> bool:
        """Wait for the turn; True when it is the caller's, until `give`.

        False as soon as `done()` holds, which may then be asked in other threads and must be cheap, or after
        `wait` seconds (0: only look).
        """
        turns = self._turns
        with turns.guard:
            if done is not None and done():
                return False
            if turns.holder is None and not turns.waiting:
                turns.hand_to(self)
                return True
            if wait == 0:
                return False
            self.done = done
            turns.waiting.append(self)
        end = None if wait is None else time.monotonic() + wait
        while not self.gate.acquire(timeout=LOOK if end is None else max(0.0, min(LOOK, end - time.monotonic()))):
            with turns.guard:
                if turns.holder is None:  # lost
                    turns.hand_to(turns.waiting[0])
                if turns.holder is self:
                    turns.let_in(self)
                elif end is not None and time.monotonic() >= end:
                    turns.waiting.remove(self)
                    return False
        return turns.holder is self

    def give(self) -> None:
        """Hand the turn to the thread that has waited longest, or stop waiting for it; else do nothing."""
        turns = self._turns
        with turns.guard:
            if turns.holder is self:
                turns.release_done()
                turns.hand_to(turns.waiting[0] if turns.waiting else None)
            elif self in turns.waiting:
                turns.waiting.remove(self)
