"""Pairs and engines used from many threads: loaded here, stepped there, waited for everywhere."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tinymodels
from pairs import make_pair, mlx_lm_greedy, tiny_target

import mlx_spec
from mlx_spec import device as devices
from mlx_spec.api import generate, stream
from mlx_spec.device import Device
from mlx_spec.engine import Engine
from mlx_spec.request import Request
from mlx_spec.sampling import Sampling
from mlx_spec.testing.drafters import ScriptedDrafter, flaky

TOKENS, THREADS = 16, 8
SCALED = tinymodels.LLAMA | {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}  # this rope keeps an array that loading leaves unevaluated


def prompt_of(i: int) -> list[int]:
    return [(7 * j + 5 * i + j * j) % 97 for j in range(3 + 2 * i)]


def plain(target, i: int, count: int = TOKENS) -> list[int]:
    return mlx_lm_greedy(target, prompt_of(i), count)


class Ran:
    """Work in a thread of its own, which does not keep a failing test from ending."""

    def __init__(self, work: Callable[[], Any]):
        self._work, self._value, self._error = work, None, None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:  # raised again by whoever asks for the value
            self._error = error

    def result(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive(), "a thread did not come back"
        if self._error is not None:
            raise self._error
        return self._value


def in_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns or raises in a thread of its own."""
    return Ran(work).result()


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """What all of them return, each in a thread of its own, started together."""
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> Any:
        barrier.wait(20)
        return work()

    return [ran.result() for ran in [Ran(lambda w=work: run(w)) for work in works]]


def submit(engine: Engine, i: int, count: int = TOKENS, sampling: Sampling | None = None):
    return engine.submit(Request(prompt_of(i), sampling or Sampling(), count, ignore_eos=True))


def drafted_pair(name: str = "llama", right: float = 0.7):
    """A pair on a tiny target whose drafter is often right, and the plain replies to all prompts."""
    target = tiny_target(name)
    replies = [plain(target, i) for i in range(THREADS)]
    table = {tuple(prompt_of(i)): reply for i, reply in enumerate(replies)}
    return make_pair(target, ScriptedDrafter(flaky(table, right, target.vocab_size, seed=2)), 4), replies


@pytest.fixture(scope="module")
def scaled(tmp_path_factory) -> Path:
    return tinymodels.write_model(tmp_path_factory.mktemp("scaled"), SCALED)


def load_scaled(path: Path):
    return mlx_spec.load(str(path), kind="prompt-lookup", probe=False)


def test_a_pair_loaded_in_one_thread_serves_all_others(scaled):
    want = generate(load_scaled(scaled), prompt_of(3), None, TOKENS, speculative=False).token_ids
    pair = in_thread(lambda: load_scaled(scaled))
    for _ in range(2):
        assert in_thread(lambda: generate(pair, prompt_of(3), None, TOKENS)).token_ids == want
        assert generate(pair, prompt_of(3), None, TOKENS).token_ids == want
    here = load_scaled(scaled)
    assert in_thread(lambda: generate(here, prompt_of(3), None, TOKENS)).token_ids == want


@pytest.mark.parametrize("rows", [1, 3, THREADS])
def test_many_threads_wait_for_replies_of_one_engine(rows):
    pair, replies = drafted_pair()
    engine = Engine(pair, max_rows=rows)
    got = at_once(*[lambda i=i: submit(engine, i).result() for i in range(THREADS)])
    assert [out.token_ids for out in got] == replies
    assert not engine.busy


def test_many_threads_iterate_each_its_own_reply():
    pair, replies = drafted_pair("gemma3")
    engine = Engine(pair, max_rows=5)

    def work(i):
        handle = submit(engine, i)
        events = list(handle)
        assert {event.request_id for event in events} == {handle.request.id}
        assert [event.finish_reason for event in events[-1:]] == ["length"]
        return [token for event in events for token in event.token_ids]

    assert at_once(*[lambda i=i: work(i) for i in range(THREADS)]) == replies


def test_handles_may_be_read_where_they_were_not_made():
    pair, replies = drafted_pair()
    engine = Engine(pair)
    handles = [submit(engine, i) for i in range(4)]
    waiters = [lambda h=h: h.result().token_ids for h in handles]
    assert at_once(*waiters, *waiters) == [*replies[:4], *replies[:4]]
    shared = submit(engine, 5)
    parts = at_once(*[lambda: [t for e in shared for t in e.token_ids]] * 3)
    assert sorted(t for part in parts for t in part) == sorted(replies[5])  # each event went to one of them


def test_engines_and_streams_on_one_pair_take_turns():
    pair, replies = drafted_pair()
    progress: list[int] = []

    def work(i):
        tokens = []
        for event in stream(pair, prompt_of(i), None, TOKENS, ignore_eos=True):
            progress.append(i)
            tokens += event.token_ids
        return tokens

    assert at_once(*[lambda i=i: work(i) for i in range(4)]) == replies[:4]
    changes = sum(a != b for a, b in pairwise(progress))
    assert changes > 8  # nobody was made to wait for a whole reply of somebody else


def test_two_pairs_in_two_threads(scaled):
    settings = Sampling(temperature=0.9, seed=5)
    want = generate(load_scaled(scaled), prompt_of(4), settings, 40, speculative=False).token_ids
    barrier = threading.Barrier(2)

    def work():
        barrier.wait(20)
        pair = load_scaled(scaled)
        return [generate(pair, prompt_of(4), settings, 40).token_ids for _ in range(3)]

    assert at_once(work, work) == [[want] * 3] * 2


def test_a_reader_that_pauses_holds_nobody_up():
    pair, replies = drafted_pair()
    engine = Engine(pair)
    slow = iter(submit(engine, 0))
    first = next(slow)
    assert in_thread(lambda: submit(engine, 1).result()).token_ids == replies[1]
    assert first.token_ids + [t for event in slow for t in event.token_ids] == replies[0]


def test_a_fault_reaches_its_own_caller_only():
    """Whoever steps when code of a request fails: its own caller learns of it, the others get their replies."""
    pair, replies = drafted_pair()
    engine = Engine(pair, max_rows=3)
    real = type(pair.target).forward

    class Broken(type(pair.target)):
        def forward(self, tokens, states, taps=()):
            if tokens.shape[1] > 1 and tokens[0, 0].item() == prompt_of(6)[0] and not states.lengths[0]:
                raise ZeroDivisionError("scripted")
            return real(self, tokens, states, taps)

    def failing(tokens, logits):
        raise ValueError("scripted")

    def raised(i):
        with pytest.raises(ZeroDivisionError, match="scripted"):
            submit(engine, i).result()
        with pytest.raises(ZeroDivisionError, match="scripted"):
            list(submit(engine, i))

    target, was = pair.target, type(pair.target)
    target.__class__ = Broken
    try:
        got = at_once(
            *[lambda i=i: submit(engine, i).result().token_ids for i in range(5)],
            lambda: submit(engine, 7, sampling=Sampling(processors=(failing,))).result(),
            lambda: raised(6),
        )
    finally:
        target.__class__ = was
    assert got[:5] == replies[:5]
    assert got[5].finish_reason == "error" and "ValueError: scripted" in got[5].error
    assert not engine.busy


def test_an_interrupt_ends_the_lane_and_nothing_else(monkeypatch):
    pair, replies = drafted_pair()
    engine = Engine(pair, max_rows=2)
    handles = [submit(engine, i) for i in range(3)]
    engine.step()
    real = engine._advancer.step

    def interrupted(joining):
        monkeypatch.setattr(engine._advancer, "step", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._advancer, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    outcomes = at_once(*[handle.result for handle in handles])
    assert [out.finish_reason for out in outcomes] == ["error", "error", "length"]
    assert outcomes[0].error == "KeyboardInterrupt: " and outcomes[2].token_ids == replies[2]
    assert submit(engine, 4).result().token_ids == replies[4]


def test_cancelling_what_is_no_id_harms_nobody():
    pair, replies = drafted_pair()
    engine = Engine(pair, max_rows=2)
    handles = [submit(engine, i) for i in range(2)]
    engine.step()
    for nonsense in ([1], {}, None, "1", 10**9):
        engine.cancel(nonsense)
    assert [handle.result().token_ids for handle in handles] == replies[:2]


@pytest.mark.parametrize("where", ["queued", "lane"])
def test_cancelling_from_another_thread(where):
    pair, replies = drafted_pair()
    engine = Engine(pair, max_rows=1)
    going, held = threading.Event(), threading.Event()

    def hold(tokens, logits):
        going.set()
        held.wait(20)
        return logits

    busy = submit(engine, 0, 200, Sampling(processors=(hold,)))
    queued = submit(engine, 1)
    waits = [Ran(busy.result), Ran(queued.result)]
    assert going.wait(20)
    (queued if where == "queued" else busy).cancel()  # while the other thread is inside a step
    held.set()
    first, second = (wait.result() for wait in waits)
    assert first.finish_reason == ("length" if where == "queued" else "cancelled")
    assert second.finish_reason == ("cancelled" if where == "queued" else "length")
    assert second.token_ids == ([] if where == "queued" else replies[1])
    assert (len(first.token_ids) < 200) == (where == "lane")


def test_arrays_of_a_processor_are_evaluated_where_they_were_made():
    pair, _ = drafted_pair()
    engine = Engine(pair)
    wanted = [11, 12, 13]

    class Chooser:
        def __init__(self):
            self.bias = [mx.zeros(131).at[wanted[0]].add(1e3)]

        def __call__(self, tokens, logits):
            return logits + self.bias[0]

        def method(self, tokens, logits):
            return logits + self.bias[0] / 2 + self.other["b"]

    def closure():
        bias = mx.zeros(131).at[wanted[1]].add(1e3)
        return lambda tokens, logits: logits + bias

    def make(kind):
        if kind == "closure":
            return closure()
        chooser = Chooser()
        chooser.other = {"b": mx.zeros(131).at[wanted[2]].add(1e4)}
        return chooser if kind == "object" else chooser.method

    kinds = ("object", "closure", "method")
    handles = [in_thread(lambda k=k: submit(engine, 0, 3, Sampling(processors=(make(k),)))) for k in kinds]
    got = [in_thread(handle.result) for handle in handles]
    assert [(out.error, out.token_ids) for out in got] == [("", [token] * 3) for token in wanted]


# -- devices ----------------------------------------------------------------------------------------------


def test_work_on_a_device_is_nested_ordered_and_raises():
    device = Device()
    assert device.run(lambda: device.run(lambda: 5)) == 5
    assert in_thread(lambda: device.run(lambda: device.run(lambda: 6))) == 6

    def fail():
        raise KeyError("scripted")

    for where in (lambda work: work(), in_thread):
        with pytest.raises(KeyError, match="scripted"):
            where(lambda: device.run(fail))
    lazy = in_thread(lambda: device.run(lambda: mx.arange(5) * 3))
    assert device.run(lazy.tolist) == in_thread(lambda: device.run(lazy.tolist)) == [0, 3, 6, 9, 12]


def test_the_main_thread_works_itself_and_others_share_one_hand():
    device = Device()
    assert device.run(threading.current_thread) is threading.main_thread()
    hands = {in_thread(lambda: device.run(threading.current_thread)) for _ in range(3)}
    assert len(hands) == 1 and hands.pop().daemon


def test_streams_and_threads_of_devices_are_used_again():
    def use():
        device = Device()
        return str(device.run(lambda: mx.default_stream(mx.default_device()))), in_thread(
            lambda: device.run(threading.get_ident)
        )

    first = use()
    assert all(use() == first for _ in range(5))
    a, b = Device(), Device()
    streams = {str(d.run(lambda: mx.default_stream(mx.default_device()))) for d in (a, b)}
    assert len(streams) == 2


def test_an_interrupt_waits_for_the_work_of_another_thread():
    """Who is interrupted while the hand works for it goes on only when the hand has finished."""
    done = []

    class Gate:
        def __init__(self):
            self.real, self.calls = threading.Lock(), 0

        def acquire(self):
            self.calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt
            return self.real.acquire()

        def release(self):
            self.real.release()

    class Threading:
        Lock, Thread = Gate, threading.Thread

    real, devices.threading = devices.threading, Threading
    try:
        with pytest.raises(KeyboardInterrupt):
            devices._Hand().call(lambda: (time.sleep(0.2), done.append(1)))
    finally:
        devices.threading = real
    assert done == [1]


SCRIPT = """
import sys, threading
{first}
import mlx_spec

def load():
    return mlx_spec.load(sys.argv[1], kind="prompt-lookup", probe=False)

def reply(pair):
    sampling = mlx_spec.Sampling(temperature=0.8, seed=3)
    return mlx_spec.generate(pair, [5, 6, 7, 8, 5, 6, 7, 8], sampling, max_tokens=12, ignore_eos=True).token_ids

def threads(*works):
    all_ = [threading.Thread(target=work) for work in works]
    [t.start() for t in all_]
    [t.join() for t in all_]

got = []
{body}
assert len(got) == {count} and all(g == got[0] for g in got), got
print("served")
"""
BODIES = {
    "each thread its own": ("", "threads(*[lambda: got.append(reply(load()))] * 3)", 3),
    "loaded here": ("", "pair = load()\nthreads(*[lambda: got.append(reply(pair))] * 3)", 3),
    "loaded there": (
        "",
        "pairs = []\nthreads(lambda: pairs.append(load()))\ngot.append(reply(pairs[0]))\n"
        "threads(*[lambda: got.append(reply(pairs[0]))] * 2)",
        3,
    ),
    "mlx imported here": (
        "import mlx.core",
        "pairs = []\nthreads(lambda: pairs.append(load()))\ngot.append(reply(pairs[0]))\n"
        "threads(*[lambda: got.append(reply(pairs[0]))] * 2)",
        3,
    ),
    "a thread that goes on": (
        "",
        "pair = load()\ngot.append(reply(pair))\n"
        "def forever():\n    while True:\n        reply(pair)\n"
        "threading.Thread(target=forever, daemon=True).start()\nimport time; time.sleep(0.3)",
        1,
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_process_that_used_threads_ends_well(name, scaled):
    first, body, count = BODIES[name]
    script = SCRIPT.format(first=first, body=body, count=count)
    for _ in range({"each thread its own": 5, "loaded here": 2}.get(name, 1)):  # these two are a race
        done = subprocess.run([sys.executable, "-c", script, str(scaled)], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, "served\n"), done.stderr[-2000:]
