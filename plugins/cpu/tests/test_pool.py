"""The threads: one pool per process, every task once, quiet when idle, whole after fork."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mlx_spec import cores, generate, load
from mlx_spec.cores import usable_cores
from mlx_spec.settings import reset_settings
from mlx_spec.testing.tiny import write_llama
from mlx_spec_cpu import native


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_every_task_runs_once(library: Any, threads: int, count: int) -> None:
    library.set_threads(threads)
    assert library.threads() == threads
    assert library.count_in_parallel(count) == count


def test_the_default_is_what_cpuset_and_quota_allow(library: Any) -> None:
    assert library.usable_cores() == len(os.sched_getaffinity(0))
    assert library.threads() == usable_cores()


@pytest.mark.parametrize(
    ("quota", "asked", "threads"), [(None, None, 6), (2, None, 2), (2, "4", 4), (2, "99", 6), (9, "1", 1)]
)
def test_what_is_asked_for_wins_over_the_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, asked: str | None, threads: int
) -> None:
    monkeypatch.setattr(cores, "cpu_quota", lambda *_: quota)
    monkeypatch.setattr(cores, "cpuset_cores", lambda: 6)
    if asked is None:
        monkeypatch.delenv("MLX_SPEC_THREADS", raising=False)
    else:
        monkeypatch.setenv("MLX_SPEC_THREADS", asked)
    reset_settings()
    assert native._threads() == threads


def test_two_engines_share_the_threads(library: Any, tmp_path: Path) -> None:
    """Both at work at once start fewer threads than a second pool has, their callers and streams included."""
    workers = 11
    library.set_threads(workers + 1)
    library.count_in_parallel(100)
    target, _ = write_llama(tmp_path, seed=1)
    answers: list[list[int]] = [[], []]

    def work(i: int) -> None:
        pair = load(str(target), kind="none")
        answers[i] = list(generate(pair, [3, 4, 5], max_tokens=40, ignore_eos=True).token_ids)

    work(0)  # loading starts threads of its own, once
    before = threads_of_this_process()
    callers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for caller in callers:
        caller.start()
    most = 0
    while any(caller.is_alive() for caller in callers):
        most = max(most, threads_of_this_process())
        time.sleep(0.002)
    assert len(answers[0]) == 40 and answers[0] == answers[1]
    assert most < before + workers


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


@pytest.mark.parametrize("pause", [0.0, 3e-5, 7e-5, 9e-5, 2e-4])
def test_workers_that_wait_or_fall_asleep_miss_nothing(library: Any, pause: float) -> None:
    """Runs that come while workers look out for one, while they fall asleep, and when they sleep."""
    library.set_threads(3)
    for i in range(500):
        begin = time.perf_counter()
        while time.perf_counter() - begin < pause:
            pass
        assert library.count_in_parallel(i % 9) == i % 9


def test_workers_that_leave_a_core_may_run_on_it_later(library: Any) -> None:
    """One that finds itself on the core of the thread it works for goes to another, and keeps the cores it had."""
    cores, before = os.sched_getaffinity(0), ids_of_threads()
    library.set_threads(1)
    library.set_threads(min(2, len(cores)))
    library.count_in_parallel(10)
    workers = ids_of_threads() - before
    assert len(workers) == min(2, len(cores)) - 1
    try:
        for core in cores:
            os.sched_setaffinity(0, {core})  # this thread alone
            for _ in range(300):
                library.count_in_parallel(10)
            time.sleep(0.01)  # by then they sleep
            assert all(os.sched_getaffinity(worker) == cores for worker in workers)
    finally:
        os.sched_setaffinity(0, cores)


def ids_of_threads() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


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
