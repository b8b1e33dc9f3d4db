"""The threads: one pool per process, every task once, quiet when idle, whole after fork."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_every_task_runs_once(library: Any, threads: int, count: int) -> None:
    library.set_threads(threads)
    assert library.threads() == threads
    assert library.count_in_parallel(count) == count


def test_the_default_is_the_cpuset(library: Any) -> None:
    assert library.usable_cores() == len(os.sched_getaffinity(0))
    assert library.threads() == library.usable_cores()


def test_callers_on_several_threads_take_turns(library: Any) -> None:
    library.set_threads(3)
    done: list[int] = []
    callers = [
        threading.Thread(target=lambda: done.extend(library.count_in_parallel(50) for _ in range(200)))
        for _ in range(4)
    ]
    before = threads_of_this_process()
    for caller in callers:
        caller.start()
    most = max(threads_of_this_process() for _ in range(20))
    for caller in callers:
        caller.join()
    assert done == [50] * 800
    assert most <= before + len(callers) + 2  # the callers and two workers, however many call


def threads_of_this_process() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_changing_the_number_ends_the_workers(library: Any) -> None:
    library.set_threads(1)
    base = threads_of_this_process()
    library.set_threads(6)
    library.count_in_parallel(10)
    assert threads_of_this_process() == base + 5
    library.set_threads(1)
    assert threads_of_this_process() == base


def test_an_idle_pool_uses_no_processor_time(library: Any) -> None:
    library.set_threads(4)
    library.count_in_parallel(1000)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.03


def test_a_child_of_fork_has_a_pool_of_its_own(library: Any) -> None:
    library.set_threads(3)
    assert library.count_in_parallel(100) == 100
    child = os.fork()
    if child == 0:  # no pytest in here
        os._exit(0 if library.threads() == 3 and library.count_in_parallel(1000) == 1000 else 1)
    deadline = time.monotonic() + 20
    status = None
    while status is None and time.monotonic() < deadline:
        pid, code = os.waitpid(child, os.WNOHANG)
        status = code if pid else None
        time.sleep(0.01)
    if status is None:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert status == 0
    assert library.count_in_parallel(100) == 100
