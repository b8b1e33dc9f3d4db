"""Steps that follow one another write into K/V in place: nobody who still runs may hold what they write to."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from pairs import make_pair, tiny_target

from mlx_spec import accept
from mlx_spec.api import generate
from mlx_spec.full_model import FullModelDrafter
from mlx_spec.plain import PlainRun
from mlx_spec.state import KVState, StateGroup, WindowState, start_step, steps
from mlx_spec.types import DrafterCard


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Which of mlx's two ways to have something computed was taken, in order."""
    made: list[str] = []
    for name, real in (("eval", mx.eval), ("async_eval", mx.async_eval)):
        monkeypatch.setattr(mx, name, lambda *a, _name=name, _real=real: (made.append(_name), _real(*a))[1])
    return made


def filled(state: KVState, count: int = 4) -> KVState:
    rows = mx.random.normal((1, 2, count, 8))
    state.update_and_fetch(rows, rows)
    return state


def places(group: StateGroup) -> list[int]:
    """Where the arrays of some states lie; nothing of them is held afterwards."""
    return [np.array(array, copy=False).ctypes.data for state in group for array in state.arrays()]


def test_steps_go_in_turn_on_the_cpu_alone_and_where_states_are_large(monkeypatch):
    assert steps.steps_in_turn(steps.COPIED + 1) and not steps.steps_in_turn(steps.COPIED)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert not steps.steps_in_turn(steps.COPIED + 1)


def test_a_step_starts_once_the_one_before_it_has_run(calls, monkeypatch):
    first = mx.ones((3,)) + 1
    large = steps.COPIED + 1
    start_step([first], [], large)
    assert calls == ["async_eval"]
    start_step([first + 1], [first], large)
    assert calls == ["async_eval", "eval", "async_eval"]
    monkeypatch.setattr(steps, "steps_in_turn", lambda held: False)
    start_step([first + 2], [first], large)
    assert calls == ["async_eval", "eval", "async_eval", "async_eval"]


@pytest.mark.parametrize("in_turn, order", [(True, ["read", "start"]), (False, ["start", "read"])])
def test_a_plain_step_starts_after_the_last_one_was_read(in_turn, order, monkeypatch):
    """On a GPU before: it would wait for the host."""
    monkeypatch.setattr(steps, "steps_in_turn", lambda held: in_turn)
    pair, done = make_pair(tiny_target("llama"), None), []
    generate(pair, [3, 4, 5], None, 2)
    for name in ("start", "read"):
        real = getattr(accept.GreedyStep, name)
        monkeypatch.setattr(
            accept.GreedyStep, name, lambda self, _name=name, _real=real: (done.append(_name), _real(self))[1]
        )
    out = generate(pair, [3, 4, 5], None, 6)
    assert len(out.token_ids) == 6
    assert done == ["start", *order * 5, "read"]  # the first start and the last read have no partner


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_plain_steps_write_where_the_state_is(model, monkeypatch):
    """As large states do: 256 rows are reserved at a time, so a short reply never moves."""
    seen: list[list[int]] = []
    real = PlainRun.next

    def watched(self):
        results = real(self)
        seen.append(places(self.lane.states))
        return results

    monkeypatch.setattr(PlainRun, "next", watched)
    monkeypatch.setattr(steps, "steps_in_turn", lambda held: True)
    generate(make_pair(tiny_target(model), None), [3, 4, 5], None, 12)
    assert len(seen) == 12 and all(place == seen[0] for place in seen)


def test_drafts_of_a_model_start_one_after_the_other(calls, monkeypatch):
    monkeypatch.setattr(steps, "steps_in_turn", lambda held: True)
    target = tiny_target("llama")
    drafter = FullModelDrafter(target, DrafterCard("full-model", "llama", vocab_size=target.vocab_size))
    pair = make_pair(target, drafter, 4)
    generate(pair, [3, 4, 5], None, 4, adaptive=False)
    calls.clear()
    out = generate(pair, [3, 4, 5], None, 24, adaptive=False)
    waits = [b for a, b in pairwise(calls) if a == "async_eval"]
    assert out.timings.draft_n == 3 * out.timings.draft_rounds  # so much was drafted, and each but the first waited
    assert waits.count("eval") >= 2 * out.timings.draft_rounds


def test_what_was_given_to_be_read_counts_until_the_next_mark():
    dense, window, untouched = (filled(state) for state in (KVState(), WindowState(16), KVState()))
    group = StateGroup([dense, window, untouched])
    assert group.bytes_read == 0
    dense.view()
    assert group.bytes_read == dense.nbytes > 0
    assert window.lent(3) is not None
    assert group.bytes_read == dense.nbytes + window.nbytes
    group.mark()
    assert group.bytes_read == 0
    assert KVState().lent(0) is None


@pytest.mark.parametrize("read, waits", [(steps.COPIED + 1, 1), (steps.COPIED, 0)])
def test_only_much_that_is_read_is_waited_for(read, waits, calls):
    steps.await_readers([mx.ones((2,)) + 1], read)
    assert calls == ["eval"] * waits
