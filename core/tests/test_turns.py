"""The lock under engines and devices: order of arrival, leaving early, running out of time, being interrupted."""

from __future__ import annotations

import threading
import time

import pytest

from mlx_spec.turns import Turns


def start(*targets) -> list[threading.Thread]:
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    return threads


def until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


def waiting(turns: Turns) -> int:
    return len(turns.waiting)


def test_the_turn_goes_round_in_order_of_arrival():
    turns, order = Turns(), []
    first = turns.claim()
    assert first.take()

    def worker(i):
        def work():
            turn = turns.claim()
            turn.take()
            order.append(i)
            turn.give()

        return work

    threads = []
    for i in range(6):
        threads += start(worker(i))
        until(lambda n=i: waiting(turns) == n + 1)
    first.give()
    for thread in threads:
        thread.join(20)
    assert order == list(range(6))


def test_a_thread_that_takes_turns_in_a_loop_does_not_shut_others_out():
    turns, log, stop = Turns(), [], threading.Event()

    def loop(name):
        def work():
            while not stop.is_set():
                turn = turns.claim()
                turn.take()
                log.append(name)
                time.sleep(0.0005)
                turn.give()

        return work

    threads = start(loop("a"), loop("b"))
    until(lambda: len(log) > 200)
    stop.set()
    for thread in threads:
        thread.join(20)
    both = log[log.index("b") :] if log[0] == "a" else log[log.index("a") :]
    assert max(both.count("a"), both.count("b")) < 0.7 * len(both)


def test_who_has_what_it_waits_for_leaves_without_the_turn():
    turns, news, said = Turns(), [], []
    mine = turns.claim()
    assert mine.take(lambda: bool(news))  # nothing yet: the caller has to do it itself
    threads = start(lambda: said.append(turns.claim().take(lambda: bool(news))))
    until(lambda: waiting(turns) == 1)
    turns.settle()
    assert waiting(turns) == 1
    news.append(1)
    turns.settle()
    threads[0].join(20)
    assert said == [False]
    mine.give()
    assert not turns.claim().take(lambda: True) and turns.claim().take(wait=0)


def test_running_out_of_time():
    turns = Turns()
    mine = turns.claim()
    mine.take()
    assert not turns.claim().take(wait=0) and not turns.claim().take(wait=0.01)
    assert waiting(turns) == 0
    turns.claim().give()  # a claim that holds nothing gives nothing
    assert not turns.claim().take(wait=0)
    mine.give()
    assert turns.claim().take(wait=0)


@pytest.mark.parametrize("late", [False, True], ids=["while waiting", "with the turn"])
def test_an_interrupted_wait_leaves_the_turn_to_others(late):
    """Ctrl-C may fall just before or just after the turn has come."""
    turns = Turns()
    held = turns.claim()
    held.take()

    class Gate:
        def acquire(self, timeout):
            if late:
                held.give()
            raise KeyboardInterrupt

        def locked(self):
            return False

    turn = turns.claim()
    turn.gate = Gate()
    with pytest.raises(KeyboardInterrupt):
        try:
            turn.take()
        finally:
            turn.give()
    assert waiting(turns) == 0
    if not late:
        held.give()
    assert turns.claim().take(wait=0)


def test_a_turn_nobody_can_give_back_is_free_again():
    """What an interrupt between taking and giving leaves behind: a claim that no thread refers to."""
    turns, got = Turns(), []
    assert turns.claim().take()
    assert turns.claim().take(wait=0)
    lost = [turns.claim()]
    assert lost[0].take()

    def worker():
        turn = turns.claim()
        try:
            got.append(turn.take())
        finally:
            turn.give()

    threads = start(worker, worker)
    until(lambda: waiting(turns) == 2)
    lost.clear()
    for thread in threads:
        thread.join(20)
    assert got == [True, True] and turns.claim().take(wait=0)
