"""A round that was begun before its caller was told of the last one: used once, or gone with its row."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx
import pytest
from pairs import make_pair, mlx_lm_greedy, tiny_target
from tinymodels import write_tokenizer

from mlx_spec import advance
from mlx_spec.accept import GreedyBlock
from mlx_spec.advance import Advancer
from mlx_spec.costs import BatchCosts, CostModel
from mlx_spec.engine import Engine, Handle
from mlx_spec.full_model import FullModelDrafter
from mlx_spec.lanefile import load_lane, save_lane
from mlx_spec.pair import Pair
from mlx_spec.pilot import Pilot
from mlx_spec.request import Request, Result
from mlx_spec.rounds import recall
from mlx_spec.sampling import Sampling
from mlx_spec.testing.drafters import ScriptedDrafter, flaky
from mlx_spec.tokenizer import load_tokenizer
from mlx_spec.types import Verification

MODEL, TOKENS, BLOCK = "gemma3", 24, 4


def prompt_of(length: int) -> list[int]:
    return [(5 * i + 3 * length) % 113 for i in range(length)]


def truth(length: int = 9, count: int = TOKENS) -> list[int]:
    return mlx_lm_greedy(tiny_target(MODEL), prompt_of(length), count)


class Tilted:
    """The target with another law, so that about half of what it drafts is refused."""

    def __init__(self, target):
        self._target, self._tilt = target, 0.6 * mx.random.normal((target.vocab_size,), key=mx.random.key(7))

    def __getattr__(self, name: str):
        return getattr(self._target, name)

    def forward(self, tokens, states, taps=()):
        return Verification(self._target.forward(tokens, states).logits + self._tilt, {})


class Counting(FullModelDrafter):
    """A drafter with caches of its own that remembers from which texts it was asked to draft."""

    def __init__(self):
        super().__init__(Tilted(tiny_target(MODEL)))
        self.asked: list[tuple[int, ...]] = []

    def propose(self, lane, budget):
        self.asked += [tuple(tokens) for tokens in lane.tokens]
        return super().propose(lane, budget)


def engine_for(drafter=None, rows: int = 1, tokenizer=None) -> Engine:
    pair = make_pair(tiny_target(MODEL), drafter or Counting(), BLOCK)
    pair.tokenizer = tokenizer
    return Engine(pair, max_rows=rows)


def submit(engine: Engine, length: int = 9, sampling: Sampling | None = None, tokens: int = TOKENS) -> Handle:
    request = Request(prompt_of(length), sampling or Sampling(), tokens, ignore_eos=True, adaptive=False)
    return engine.submit(request)


def begun(engine: Engine) -> bool:
    """Whether the lane's next round is under way."""
    lane = engine._advancer.lane
    return lane is not None and lane.flight is not None and lane.states.lengths != lane.lengths


def step_until_begun(engine: Engine) -> None:
    for _ in range(3):
        engine.step()
        if begun(engine):
            return
    raise AssertionError("no round was begun")


def shown(handle: Handle) -> list[int]:
    return [token for event in handle.events for token in event.token_ids]


def asked_once(engine: Engine) -> None:
    asked = engine.pair.drafter.asked
    assert len(set(asked)) == len(asked)


def test_the_device_has_the_next_verify_before_anybody_is_told(monkeypatch):
    engine = engine_for()
    handle = submit(engine)
    step_until_begun(engine)
    order: list[str] = []

    def noted(name: str, real: Callable) -> Callable:
        return lambda *args: (order.append(name), real(*args))[1]

    for name in ("settle", "propose", "tell_row"):
        monkeypatch.setattr(advance, name, noted(name, getattr(advance, name)))
    for name in ("read", "start"):
        monkeypatch.setattr(GreedyBlock, name, noted(name, getattr(GreedyBlock, name)))
    engine.step()
    assert order == ["read", "settle", "propose", "start", "tell_row"]
    monkeypatch.undo()
    assert handle.result().token_ids == truth()


def test_k_is_decided_while_the_device_is_busy(monkeypatch):
    """Not between two rounds, where everything waits for it."""
    engine = engine_for()
    engine.pair.costs = CostModel()
    engine.pair.costs._saved = {1: {k: 0.01 * (1 + k / 20) for k in range(BLOCK)}}
    monkeypatch.setattr(BatchCosts, "observe", lambda *args: None)
    handle = engine.submit(Request(prompt_of(9), Sampling(), 60, ignore_eos=True))
    decided: list[bool] = []
    real = Pilot._decide
    monkeypatch.setattr(Pilot, "_decide", lambda self, crew: (decided.append(begun(engine)), real(self, crew))[1])
    out = handle.result()
    assert out.token_ids == truth(count=60)
    assert sum(decided) > 0.6 * out.timings.draft_rounds > 5


LAWS = {
    "greedy": Sampling(),
    "coupled": Sampling(temperature=0.9, seed=5),
    "rejection": Sampling(temperature=0.9, seed=5, acceptance="rejection"),
    "penalties": Sampling(repetition_penalty=1.3, presence_penalty=0.4),
    "minimum": Sampling(min_tokens=6, stop_ids=(17, 40)),
}


@pytest.mark.parametrize("law", LAWS)
def test_replies_and_rounds_are_those_of_rounds_begun_late(law, monkeypatch):
    def reply(pair: Pair, early: list[bool]) -> Result:
        engine = Engine(pair, max_rows=1)
        handle = submit(engine, sampling=LAWS[law])
        while engine.step():
            early.append(begun(engine))
        return handle.result()

    pairs = [make_pair(tiny_target(MODEL), Counting(), BLOCK) for _ in range(2)]
    early: list[bool] = []
    found = reply(pairs[0], early)
    assert any(early)
    monkeypatch.setattr(Advancer, "_begin_early", lambda self, rows, joining: None)
    late: list[bool] = []
    expected = reply(pairs[1], late)
    assert not any(late)
    assert found.token_ids == expected.token_ids and found.rounds == expected.rounds
    assert pairs[0].drafter.asked == pairs[1].drafter.asked
    assert 0 < found.timings.draft_n_accepted < found.timings.draft_n


@pytest.mark.parametrize("limit", range(1, 13))
def test_nothing_is_drafted_for_a_reply_that_is_over(limit):
    """By length, and by a stop id at every place of a block."""
    reply = truth()
    for sampling, tokens in ((Sampling(), limit), (Sampling(stop_ids=(reply[limit],)), TOKENS)):
        engine = engine_for()
        out = submit(engine, sampling=sampling, tokens=tokens).result()
        end = limit if tokens == limit else reply.index(reply[limit]) + 1
        assert out.token_ids == reply[:end]
        assert len(engine.pair.drafter.asked) == out.timings.draft_rounds
        assert engine._advancer.lane is None and engine._advancer.rows == []
        assert submit(engine).result().token_ids == reply


@pytest.mark.parametrize("place", range(1, 9))
def test_nothing_is_drafted_past_a_stop_string(place, tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    reply = truth()
    stop = tokenizer.decode(reply[place : place + 2])
    assert stop
    plain = Engine(make_pair(tiny_target(MODEL), None), max_rows=1)
    plain.pair.tokenizer = tokenizer
    expected = submit(plain, sampling=Sampling(stop=(stop,))).result()
    engine = engine_for(tokenizer=tokenizer)
    out = submit(engine, sampling=Sampling(stop=(stop,))).result()
    assert (out.token_ids, out.text, out.finish_reason) == (expected.token_ids, expected.text, "stop")
    assert len(engine.pair.drafter.asked) == out.timings.draft_rounds


@pytest.mark.parametrize("steps", range(1, 6))
def test_a_cancelled_row_takes_its_begun_round_along(steps):
    engine = engine_for()
    handle = submit(engine)
    for _ in range(steps):
        engine.step()
    assert begun(engine) or steps == 1
    told = shown(handle)
    handle.cancel()
    engine.run()
    out = handle.result()
    assert (out.token_ids, out.finish_reason) == (told, "cancelled") and told == truth()[: len(told)]
    assert engine._advancer.lane is None and engine._advancer.rows == []
    assert submit(engine, 12).result().token_ids == truth(12)
    asked_once(engine)


def test_a_request_that_comes_meanwhile_joins_after_the_begun_round():
    engine = engine_for(rows=2)
    first = submit(engine)
    step_until_begun(engine)
    told = len(shown(first))
    second = submit(engine, 14)
    engine.step()
    assert engine._advancer.lane.size == 1 and len(shown(first)) > told  # its round was not thrown away
    assert not begun(engine)
    engine.step()
    assert engine._advancer.lane.size == 2
    assert first.result().token_ids == truth() and second.result().token_ids == truth(14)
    asked_once(engine)


def test_a_row_left_alone_begins_early_again():
    engine = engine_for(rows=2)
    first, second = submit(engine, tokens=40), submit(engine, 14, tokens=6)
    while second.outcome is None:
        engine.step()
        assert engine._advancer.lane.size == 1 or not begun(engine)
    step_until_begun(engine)
    assert first.result().token_ids == truth(count=40) and second.result().token_ids == truth(14, 6)
    asked_once(engine)


@pytest.mark.parametrize("at", range(2, 8))
def test_what_was_committed_is_told_before_the_begun_round_fails(at, monkeypatch):
    kind, left = type(tiny_target(MODEL)), [at]
    real = kind.forward

    def forward(self, tokens, states, taps=()):
        left[0] -= taps is None or tokens.shape[1] > 1
        if left[0] == 0:
            raise OSError("scripted")
        return real(self, tokens, states, taps)

    engine, reply = engine_for(right_most_times()), truth()
    monkeypatch.setattr(kind, "forward", forward)
    handle = submit(engine)
    engine.run()
    out = handle.outcome
    assert (out.finish_reason, out.error) == ("error", "OSError: scripted")
    assert shown(handle) == out.token_ids == reply[: len(out.token_ids)]
    assert len(out.rounds) == at - 2  # the prompt's own forward comes first
    assert submit(engine).result().token_ids == reply


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_request_that_comes_after_a_failed_beginning_is_none_of_its_business(cancelled, monkeypatch):
    engine = engine_for(right_most_times(), rows=2)
    first = submit(engine)
    step_until_begun(engine)

    def forward(self, tokens, states, taps=()):
        raise OSError("scripted")

    with monkeypatch.context() as patch:
        patch.setattr(type(tiny_target(MODEL)), "forward", forward)
        engine.step()  # the round it begins fails
    second = submit(engine)
    if cancelled:
        first.cancel()
    engine.run()
    assert first.outcome.finish_reason == ("cancelled" if cancelled else "error")
    assert first.outcome.error == ("" if cancelled else "OSError: scripted") and shown(first) == first.outcome.token_ids
    assert (second.outcome.finish_reason, second.outcome.token_ids) == ("length", truth())


def test_an_interrupted_reply_is_what_was_told(monkeypatch):
    engine = engine_for(right_most_times())
    handle = submit(engine)
    step_until_begun(engine)

    def interrupted(self, rows, joining):
        raise KeyboardInterrupt

    monkeypatch.setattr(Advancer, "_begin_early", interrupted)  # a round is committed and not told yet
    told = shown(handle)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    out = handle.outcome
    assert out.finish_reason == "error" and told == shown(handle) == out.token_ids == truth()[: len(told)]


def test_a_row_that_drafts_nothing_in_company_counts_its_forwards():
    engine = engine_for(right_most_times(), rows=2)
    submit(engine)
    plain = engine.submit(Request(prompt_of(9), Sampling(), 12, ignore_eos=True, speculative=False))
    engine.run()
    out = plain.outcome
    assert out.timings.draft_rounds == 0 and 0.9 <= out.speculation.tokens_per_round <= 1.1


def test_the_time_of_a_slow_caller_is_nobodys_cost():
    pair = make_pair(tiny_target(MODEL), right_most_times(), BLOCK)
    pair.costs = CostModel("")
    engine = Engine(pair, max_rows=1)
    handle = engine.submit(Request(prompt_of(9), Sampling(), TOKENS, ignore_eos=True))
    while engine.step():
        time.sleep(0.2)
    costs = pair.costs.for_batch()
    known = [costs.seconds(k) for k in range(BLOCK)]
    assert handle.outcome.token_ids == truth() and all(seconds is None or seconds < 0.15 for seconds in known)


def right_most_times() -> ScriptedDrafter:
    return ScriptedDrafter(flaky({tuple(prompt_of(9)): truth()}, 0.7, tiny_target(MODEL).vocab_size, seed=4))


def test_a_lane_in_mid_round_can_be_saved_and_both_go_on(tmp_path):
    engine = engine_for(right_most_times())
    handle = submit(engine)
    step_until_begun(engine)
    lane = engine._advancer.lane
    drafted = lane.flight.draft.tokens.tolist()
    save_lane(lane, tmp_path / "lane")
    again = load_lane(tmp_path / "lane", lane.target, lane.drafter)
    for one in (lane, again):
        assert one.flight.draft.tokens.tolist() == drafted and one.flight.draft.counts == [BLOCK - 1]
        assert one.states.lengths == one.lengths
    block = mx.array([[again.tokens[0][-1], *drafted[0]]], dtype=mx.int32)
    ids = mx.argmax(again.target.forward(block, again.states).logits, axis=-1).tolist()[0]
    assert ids[0] == truth()[len(again.tokens[0]) - 9]
    out = handle.result()
    assert out.token_ids == truth() and engine.pair.drafter.calls == out.timings.draft_rounds


def test_a_verify_is_taken_back_once():
    engine = engine_for()
    submit(engine)
    step_until_begun(engine)
    lane = engine._advancer.lane
    recall(lane)
    recall(lane)
    assert lane.states.lengths == lane.lengths and lane.mark is None and lane.flight.pending is None


def test_two_engines_of_one_pair_take_turns_with_rounds_under_way():
    pair = make_pair(tiny_target(MODEL), Counting(), BLOCK)
    engines = [Engine(pair, max_rows=1) for _ in range(2)]
    handles = [submit(engine, length) for engine, length in zip(engines, (9, 14), strict=True)]
    both = 0
    while any([engine.step() for engine in engines]):  # noqa: C419 - every engine takes its step
        both += all(begun(engine) for engine in engines)
    assert both and [handle.result().token_ids for handle in handles] == [truth(9), truth(14)]
