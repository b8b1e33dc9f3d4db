"""Rows that are cancelled or fail, and foreign exceptions: the books stay whole and the engine goes on."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest
from pairs import make_pair, mlx_lm_greedy, tiny_target

from mlx_spec.engine import Engine, Handle
from mlx_spec.errors import LoadError
from mlx_spec.request import Request
from mlx_spec.sampling import Sampling
from mlx_spec.testing.drafters import ScriptedDrafter, flaky
from mlx_spec.types import Verification

TOKENS = 16
LENGTHS = (5, 30, 33)
FAILS_AT = 11  # positions, which only the first row passes


def prompt_of(length: int) -> list[int]:
    return [(7 * i + 3 * length + i * i) % 97 for i in range(length)]


def truth(length: int) -> list[int]:
    return mlx_lm_greedy(tiny_target("llama"), prompt_of(length), TOKENS)


def engine_for(drafts: bool) -> Engine:
    target = tiny_target("llama")
    table = {tuple(prompt_of(n)): truth(n) for n in LENGTHS}
    drafter = ScriptedDrafter(flaky(table, 0.7, target.vocab_size, seed=4)) if drafts else None
    return Engine(make_pair(target, drafter, 4), max_rows=3)


def submit(engine: Engine, length: int, sampling: Sampling | None = None) -> Handle:
    return engine.submit(Request(prompt_of(length), sampling or Sampling(), TOKENS, ignore_eos=True, adaptive=False))


def told(handle: Handle) -> list[int]:
    """What the caller was shown; must be what the result says."""
    events = list(handle.events)
    handle.events.clear()
    assert [bool(event.finish_reason) for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1].finish_reason == handle.outcome.finish_reason
    tokens = [token for event in events for token in event.token_ids]
    assert tokens == handle.outcome.token_ids
    return tokens


def others_are_whole(handles: list[Handle]) -> None:
    for handle, length in zip(handles[1:], LENGTHS[1:], strict=True):
        assert told(handle) == truth(length)
        assert handle.outcome.finish_reason == "length"


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("steps", range(1, 9))
def test_a_cancelled_reply_holds_what_was_shown_of_it(drafts, steps):
    """Steps already in flight for the lane's other rows must not grow the reply of a row that left."""
    engine = engine_for(drafts)
    handles = [submit(engine, n) for n in LENGTHS]
    for _ in range(steps):
        engine.step()
    shown = [token for event in handles[0].events for token in event.token_ids]
    handles[0].cancel()
    engine.run()
    assert handles[0].outcome.finish_reason == "cancelled" or len(shown) == TOKENS
    assert told(handles[0]) == shown == truth(LENGTHS[0])[: len(shown)]
    others_are_whole(handles)


@pytest.fixture
def poisoned(monkeypatch):
    """A target whose logits are NaN for a row that reaches FAILS_AT positions."""
    kind = type(tiny_target("llama"))
    real = kind.forward

    def forward(self, tokens, states, taps=()):
        before = states.lengths
        seen = real(self, tokens, states, taps)
        rows = mx.array([[n + 1 + i == FAILS_AT for i in range(tokens.shape[1])] for n in before])
        return Verification(mx.where(rows[..., None], mx.nan, seen.logits), seen.taps)

    monkeypatch.setattr(kind, "forward", forward)


@pytest.mark.parametrize("drafts", [False, True])
def test_a_row_whose_logits_fail_leaves_alone(drafts, request):
    want = [truth(n) for n in LENGTHS]
    engine = engine_for(drafts)
    request.getfixturevalue("poisoned")
    handles = [submit(engine, n) for n in LENGTHS]
    engine.run()
    assert handles[0].outcome.finish_reason == "error" and "NaN" in handles[0].outcome.error
    assert handles[0].outcome.error_code == handles[0].outcome.as_dict()["error_code"] == "R12"
    assert told(handles[0]) == want[0][: FAILS_AT - LENGTHS[0]]
    for handle, reply in zip(handles[1:], want[1:], strict=True):
        assert told(handle) == reply


def raising(at: int) -> Callable[[mx.array, mx.array], mx.array]:
    def processor(tokens, logits):
        if tokens.shape[0] == at:
            raise LookupError("scripted")
        return logits

    return processor


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_processor_that_raises_ends_its_own_request(drafts, after):
    engine = engine_for(drafts)
    failing = Sampling(processors=(raising(LENGTHS[0] + after),))
    handles = [submit(engine, LENGTHS[0], failing), *(submit(engine, n) for n in LENGTHS[1:])]
    engine.run()
    assert handles[0].result().finish_reason == "error"
    assert "processor: found LookupError: scripted" in handles[0].outcome.error
    assert handles[0].outcome.error_code == "R13"
    assert told(handles[0]) == truth(LENGTHS[0])[:after]
    others_are_whole(handles)


@pytest.mark.parametrize("drafts", [False, True])
def test_a_failed_row_is_cut_off_after_what_was_right_before_it(drafts):
    """The whole reply of a row that fails late in a wide block is there up to the failure."""
    engine = engine_for(drafts)
    handle = submit(engine, LENGTHS[0], Sampling(processors=(raising(LENGTHS[0] + 3),)))
    assert handle.result().token_ids == truth(LENGTHS[0])[:3]
    assert len(handle.outcome.text) == 0 and not engine.busy


@pytest.mark.parametrize("where", ["prefill", "round"])
@pytest.mark.parametrize("drafts", [False, True])
def test_the_engine_outlives_a_target_that_raises(monkeypatch, where, drafts):
    engine = engine_for(drafts)
    kind = type(engine.pair.target)
    real, left = kind.forward, [3]

    def forward(self, tokens, states, taps=()):
        if (where == "prefill") == (tokens.shape[1] > 20) and states.lengths[0] != 4:
            left[0] -= 1
            if left[0] == (2 if where == "prefill" else 0):
                raise OSError("scripted")
        return real(self, tokens, states, taps)

    want = [truth(n) for n in LENGTHS]
    monkeypatch.setattr(kind, "forward", forward)
    handles = [submit(engine, n) for n in LENGTHS]
    engine.run()
    failed = [h for h in handles if h.outcome.finish_reason == "error"]
    assert len(failed) == (1 if where == "prefill" else 3)
    for handle in failed:
        assert (handle.outcome.error, handle.outcome.error_code) == ("OSError: scripted", "")
        shown = told(handle)
        assert shown == want[handles.index(handle)][: len(shown)]
        for read in (handle.result, lambda h=handle: list(h)):
            with pytest.raises(OSError, match="scripted"):
                read()
    for handle, reply in zip(handles, want, strict=True):
        assert handle in failed or told(handle) == reply
    assert [submit(engine, n).result().token_ids for n in LENGTHS] == want


def test_an_error_for_users_keeps_its_code(monkeypatch):
    def make_states(self, *args):
        raise LoadError("state", found="none", expected="one", next_step="Make one", code="L30")

    engine = engine_for(False)
    monkeypatch.setattr(type(engine.pair.target), "make_states", make_states)
    handle = submit(engine, LENGTHS[0])
    assert handle.result().error_code == "L30" and "error_code" in handle.outcome.as_dict()
    assert [event.error_code for event in handle] == ["L30"]


def test_a_row_that_cannot_be_made_does_not_stop_the_queue(monkeypatch):
    engine = engine_for(False)
    kind, left = type(engine.pair.target), [1]
    real = kind.make_states

    def make_states(self, *args):
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError("scripted")
        return real(self, *args)

    monkeypatch.setattr(kind, "make_states", make_states)
    handles = [submit(engine, n) for n in LENGTHS]
    engine.run()
    assert (handles[0].outcome.finish_reason, handles[0].outcome.error) == ("error", "MemoryError: scripted")
    others_are_whole(handles)
