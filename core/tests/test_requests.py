"""Everything a request may ask for gives the same answer with and without drafts, inside blocks of any width."""

from __future__ import annotations

import time
from functools import cache

import mlx.core as mx
import pytest
from pairs import make_pair, mlx_lm_greedy, tiny_target
from tinymodels import write_tokenizer

from mlx_spec.api import generate
from mlx_spec.engine import Engine
from mlx_spec.errors import UsageError
from mlx_spec.pair import _choose_width
from mlx_spec.request import Request
from mlx_spec.sampling import Sampling
from mlx_spec.testing.drafters import ScriptedDrafter, mixed, oracle
from mlx_spec.tokenizer import load_tokenizer
from mlx_spec.types import Capabilities

MODEL, LENGTH, TOKENS = "gemma3", 9, 20


def prompt() -> list[int]:
    return [(5 * i + 3) % 113 for i in range(LENGTH)]


@cache
def reply() -> tuple[int, ...]:
    return tuple(mlx_lm_greedy(tiny_target(MODEL), prompt(), 40))


def run(sampling: Sampling, tokens: int = TOKENS, block: int = 5, truth=None, right: int = 99, **options):
    """One reply with a drafter that is right for `right` tokens of `truth` (default: the greedy reply)."""
    target = tiny_target(MODEL)
    script = mixed({tuple(prompt()): list(truth if truth is not None else reply())}, right, target.vocab_size)
    return generate(
        make_pair(target, ScriptedDrafter(script), block), prompt(), sampling, tokens, adaptive=False, **options
    )


def plain(sampling: Sampling, tokens: int = TOKENS, **options):
    return generate(make_pair(tiny_target(MODEL), None), prompt(), sampling, tokens, **options)


def first_new(i: int) -> int:
    """Index at or after i of a reply token that did not occur before it."""
    ids = reply()
    return next(j for j in range(i, len(ids)) if ids[j] not in ids[:j])


@pytest.mark.parametrize("i", range(12))
@pytest.mark.parametrize("block", [2, 4, 5])
def test_a_stop_id_ends_the_reply_wherever_it_falls(i, block):
    stop = reply()[i]
    at = reply().index(stop)
    out = run(Sampling(stop_ids=(stop,)), block=block)
    assert out.token_ids == list(reply()[: at + 1])
    assert out.finish_reason == "stop"
    assert out.token_ids == plain(Sampling(stop_ids=(stop,))).token_ids


def test_two_end_ids_and_ignore_eos():
    a, b = reply()[first_new(3)], reply()[first_new(6)]
    target = tiny_target(MODEL)
    pair = make_pair(target, ScriptedDrafter(oracle({tuple(prompt()): list(reply())})), 5)
    pair.end_ids = frozenset({a, b})
    end = min(reply().index(a), reply().index(b))
    assert generate(pair, prompt(), None, TOKENS, adaptive=False).token_ids == list(reply()[: end + 1])
    assert generate(pair, prompt(), None, TOKENS, ignore_eos=True, adaptive=False).token_ids == list(reply()[:TOKENS])


@pytest.mark.parametrize("limit", range(1, 9))
def test_the_limit_counts_before_and_after_a_stop(limit):
    at = first_new(2)
    out = run(Sampling(stop_ids=(reply()[at],)), tokens=limit)
    inside = at < limit
    assert out.token_ids == list(reply()[: min(limit, at + 1)])
    assert out.finish_reason == ("stop" if inside else "length")


def test_a_drafted_end_that_the_target_refuses_ends_nothing():
    end = next(t for t in range(113) if t not in reply())
    target = tiny_target(MODEL)
    pair = make_pair(target, ScriptedDrafter(lambda tokens, k: [end] * k), 4)
    pair.end_ids = frozenset({end})
    out = generate(pair, prompt(), None, TOKENS, adaptive=False)
    assert out.token_ids == list(reply()[:TOKENS])
    assert out.timings.draft_n > 0 and out.timings.draft_n_accepted == 0


# -- stop strings ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Names the target's ids; id 3 is the control token <|end|>."""
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def stopped(tokenizer, sampling: Sampling, truth, block: int | None):
    """The reply to `sampling` with every draft right (block None: plain), and what its events said."""
    script = ScriptedDrafter(oracle({tuple(prompt()): list(truth)}))
    pair = make_pair(tiny_target(MODEL), script if block else None, block or 1)
    pair.tokenizer = tokenizer
    handle = Engine(pair, max_rows=1).submit(Request(prompt(), sampling, TOKENS, adaptive=False))
    events = list(handle)
    out = handle.result()
    assert "".join(e.text for e in events) == out.text
    assert [t for e in events for t in e.token_ids] == out.token_ids == [item.token for item in out.logprobs]
    return out


def written(ids: list[int]):
    """A processor that has these ids written, one after the other."""

    def force(tokens, logits):
        return mx.where(mx.arange(logits.shape[-1]) == ids[tokens.size - len(prompt())], 100.0, logits)

    return (force,)


@pytest.mark.parametrize("place", range(7))
def test_a_spelled_control_token_ends_the_reply_at_every_place_of_a_block(tokenizer, place):
    truth = [40 + i for i in range(TOKENS)]
    truth[place] = 3
    settings = Sampling(processors=written(truth), logprobs=0)
    assert plain(settings).token_ids == truth
    for block in (None, 2, 5, 7):
        out = stopped(tokenizer, settings.replace(stop="<|end|>"), truth, block)
        assert (out.token_ids, out.finish_reason) == (truth[: place + 1], "stop")
        assert out.text == tokenizer.decode(truth[:place]) and (block is None or out.timings.draft_n_accepted)


@pytest.mark.parametrize("place", range(7))
def test_a_stop_string_over_two_tokens_ends_ids_logprobs_and_text_together(tokenizer, place):
    truth = [40 + i for i in range(TOKENS)]
    stop = tokenizer.decode(truth[place : place + 2])
    settings = Sampling(processors=written(truth), logprobs=0, stop=(stop,))
    for block in (None, 2, 4, 5, 9):
        out = stopped(tokenizer, settings, truth, block)
        assert (out.token_ids, out.finish_reason) == (truth[: place + 2], "stop")
        assert out.text == tokenizer.decode(truth[:place]) and (block is None or out.timings.draft_n_accepted)


PENALTIES = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.8, "presence_context_size": 6},
    {"frequency_penalty": 0.5},
    {"logit_bias": {7: 3.0, 11: -50.0}},
    {"min_tokens": 6},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {3: 2.0}, "min_tokens": 4},
]


@pytest.mark.parametrize("extra", PENALTIES, ids=lambda e: "+".join(e))
@pytest.mark.parametrize("right", [0, 1, 2, 99])
@pytest.mark.parametrize("seed", [None, 3])
def test_processors_see_exactly_the_history_each_row_has(extra, right, seed):
    settings = Sampling(temperature=0.0 if seed is None else 0.9, seed=seed, stop_ids=tuple(reply()[:1]), **extra)
    truth = plain(settings, ignore_eos=True).token_ids
    out = run(settings, truth=truth, right=right, ignore_eos=True)
    assert out.token_ids == truth
    if right == 99:
        assert out.timings.draft_n_accepted > 0 or len(truth) < 3


def test_penalties_equal_mlx_lm():
    from mlx_lm.generate import generate_step
    from mlx_lm.sample_utils import make_logits_processors

    target = tiny_target(MODEL)
    theirs = make_logits_processors({5: 2.0}, 1.3, 20, 0.4, 20, 0.2, 20)
    want = [
        int(t) for t, _ in generate_step(mx.array(prompt()), target.model, max_tokens=TOKENS, logits_processors=theirs)
    ]
    settings = Sampling(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, logit_bias={5: 2.0})
    assert plain(settings).token_ids == want
    assert run(settings, truth=want, right=2).token_ids == want


@pytest.mark.parametrize("block", range(2, 10))
def test_a_user_processor_is_called_with_the_right_history(block):
    start = len(prompt())

    def force(tokens, logits):
        if tokens.shape[0] == start + 10:
            return mx.where(mx.arange(logits.shape[-1]) == 5, 100.0, logits)
        return logits

    settings = Sampling(processors=(force,))
    truth = plain(settings).token_ids
    assert truth[10] == 5
    out = run(settings, block=block, truth=truth)
    assert out.token_ids == truth and out.timings.draft_n_accepted == out.timings.draft_n > 0
    assert run(settings, block=block, truth=truth, right=1).token_ids == truth


@pytest.mark.parametrize("right", [0, 1, 2, 99])
@pytest.mark.parametrize("seed", [None, 9])
def test_logprobs_are_those_of_plain_decoding(right, seed):
    settings = Sampling(temperature=0.0 if seed is None else 0.8, seed=seed, logprobs=3)
    want = plain(settings)
    out = run(settings, truth=want.token_ids, right=right)
    assert [item.token for item in out.logprobs] == out.token_ids == want.token_ids
    assert len(out.logprobs) == TOKENS
    for a, b in zip(out.logprobs, want.logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
        assert [t for t, _ in a.top] == [t for t, _ in b.top] and len(a.top) == 3
        assert a.logprob < 0


def test_logprobs_equal_mlx_lm():
    from mlx_lm.generate import generate_step

    steps = list(generate_step(mx.array(prompt()), tiny_target(MODEL).model, max_tokens=TOKENS))
    out = run(Sampling(logprobs=0))
    for item, (token, logprobs) in zip(out.logprobs, steps, strict=True):
        assert item.token == int(token)
        assert item.logprob == pytest.approx(float(logprobs[int(token)]), abs=1e-4)


def test_mixed_rows_keep_their_own_settings():
    target = tiny_target(MODEL)
    settings = [
        Sampling(),
        Sampling(temperature=0.9, seed=7, top_k=12),
        Sampling(repetition_penalty=1.5),
        Sampling(temperature=1.1, seed=8, min_p=0.05, logprobs=2),
    ]
    want = [plain(s).token_ids for s in settings]
    engine = Engine(make_pair(target, ScriptedDrafter(oracle({tuple(prompt()): list(reply())})), 4), max_rows=4)
    handles = [engine.submit(Request(prompt(), s, TOKENS, adaptive=False)) for s in settings]
    engine.run()
    assert [h.result().token_ids for h in handles] == want


def test_rows_without_a_seed_differ_and_report_rejection():
    settings = Sampling(temperature=1.5)
    a, b = plain(settings, tokens=40), plain(settings, tokens=40)
    assert a.token_ids != b.token_ids
    assert a.speculation.law == "rejection"


@pytest.mark.parametrize("bad", [[], [-1], [113], [1.5], [True], ["a"], [None]])
def test_bad_prompts_are_refused_at_the_door(bad):
    with pytest.raises(UsageError, match="prompt"):
        generate(make_pair(tiny_target(MODEL), None), bad, None, 4)


def test_the_context_bounds_the_reply_and_the_prompt():
    target = tiny_target(MODEL)  # context 256
    drafter = ScriptedDrafter(lambda tokens, k: [1] * k)
    for length in (250, 254, 255):
        ids = [(i * 7) % 113 for i in range(length)]
        out = generate(make_pair(target, drafter, 5), ids, None, 50, adaptive=False)
        assert len(out.token_ids) == 256 - length and out.finish_reason == "length"
        assert out.token_ids == generate(make_pair(target, None), ids, None, 50).token_ids
    for length in (256, 260):
        with pytest.raises(UsageError, match="context 256"):
            generate(make_pair(target, None), [1] * length, None, 4)
    assert generate(make_pair(target, None), prompt(), None, 4).token_ids == list(reply()[:4])


def test_counters_count_what_was_drafted_and_tested():
    target = tiny_target(MODEL)
    table = {tuple(prompt()): list(reply())}
    for right, rate in ((0, 0.0), (2, 0.5), (99, 1.0)):
        out = generate(
            make_pair(target, ScriptedDrafter(mixed(table, right, 113)), 5), prompt(), None, 31, adaptive=False
        )
        full = [r for r in out.rounds if len(r.draft_ids) == 4]
        assert sum(r.accepted for r in full) / sum(len(r.draft_ids) for r in full) == rate
        assert out.timings.draft_n == sum(len(r.draft_ids) for r in out.rounds)
    lengths = iter([4, 2, 0, 1, *[0] * 60])
    drafter = ScriptedDrafter(lambda tokens, k: list(reply())[len(tokens) - LENGTH :][: min(k, next(lengths))])
    out = generate(make_pair(target, drafter, 5), prompt(), None, 30, adaptive=False)
    assert out.timings.draft_n == 7


@pytest.mark.parametrize("options", [{"speculative": False}, {"block_size": 1}, {"block_size": 0}], ids=str)
def test_a_request_that_turned_drafting_off_says_so(options):
    out = run(Sampling(), **options)
    told = out.speculation
    assert (told.active, told.method, told.block_size) == (False, "none", 1)
    assert told.reason == "the request turned drafting off" and out.timings.draft_n == 0
    assert out.token_ids == list(reply()[:TOKENS])


def test_a_drafter_for_one_request_drafts_when_alone_and_says_what_to_set_when_not():
    class Single(ScriptedDrafter):
        capabilities = Capabilities(batch=False)

    target, drafter = tiny_target(MODEL), Single(oracle({tuple(prompt()): list(reply())}))
    for rows in (1, 2):
        engine = Engine(make_pair(target, drafter, 4), max_rows=rows)
        handles = [engine.submit(Request(prompt(), Sampling(), n, adaptive=False)) for n in (8, TOKENS)]
        short, long = (handle.result() for handle in handles)
        assert short.token_ids == list(reply()[:8]) and long.token_ids == list(reply()[:TOKENS])
        assert (short.timings.draft_n > 0) == (rows == 1) and long.timings.draft_n > 0
        for out in (short, long):
            assert ["max_rows=1" in text for text in out.speculation.fallbacks] == [True] * (rows - 1)


@pytest.mark.parametrize(("bits", "active"), [(None, True), (8, False)])
def test_a_drafter_that_does_not_read_quantised_kv_names_the_setting(bits, active):
    class Dense(ScriptedDrafter):
        capabilities = Capabilities(quantised_kv=False)

    pair = make_pair(tiny_target(MODEL), Dense(oracle({})), kv_bits=bits)
    _choose_width(pair, None, "")
    assert pair.plan.active is active
    assert pair.plan.reason == (
        "drafter loaded" if active else "plain decoding: scripted does not read 8-bit K/V; without kv_bits it drafts"
    )


def test_zero_tokens_is_an_empty_reply():
    out = plain(Sampling(), tokens=0)
    assert out.token_ids == [] and out.finish_reason == "length"


def test_events_join_to_the_result():
    target = tiny_target(MODEL)
    engine = Engine(make_pair(target, ScriptedDrafter(oracle({tuple(prompt()): list(reply())})), 4), max_rows=1)
    handle = engine.submit(Request(prompt(), Sampling(), TOKENS))
    ids = [t for event in handle for t in event.token_ids]
    assert ids == handle.result().token_ids == list(reply()[:TOKENS])


def test_the_clock_of_a_reply_covers_its_first_round(monkeypatch):
    """A reply that is one single round still takes time: its tokens are not counted for free."""
    from mlx_spec import rounds

    real = rounds.propose
    waited = []

    def slow(*args, **kwargs):
        waited.append(time.sleep(0.05))
        return real(*args, **kwargs)

    monkeypatch.setattr("mlx_spec.advance.propose", slow)
    out = run(Sampling(), tokens=5, block=5)
    assert len(waited) == out.timings.draft_rounds == 1 and out.timings.plain_steps == 0
    assert out.timings.predicted_ms >= 50
