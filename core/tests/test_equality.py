"""Token identity: whatever a drafter does, at whatever width, alone or in company, the reply is the target's own."""

from __future__ import annotations

from functools import cache

import pytest
from pairs import make_pair, mlx_lm_greedy, tiny_target

from mlx_spec.api import generate
from mlx_spec.engine import Engine
from mlx_spec.request import Request
from mlx_spec.sampling import Sampling
from mlx_spec.testing.drafters import BrokenDrafter, ScriptedDrafter, empty, flaky, mixed, noise, oracle

TOKENS = 16
LENGTHS = (1, 2, 5, 7, 8, 9, 15, 21)  # the window of the tiny gemma3 is 8


def prompt_of(length: int, vocab_size: int) -> list[int]:
    return [(7 * i + 3 * length + i * i) % vocab_size for i in range(length)]


@cache
def plain_reply(model: str, length: int) -> tuple[int, ...]:
    target = tiny_target(model)
    return tuple(mlx_lm_greedy(target, prompt_of(length, target.vocab_size), TOKENS))


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("length", LENGTHS)
def test_plain_decoding_equals_mlx_lm(model, length):
    target = tiny_target(model)
    out = generate(make_pair(target, None), prompt_of(length, target.vocab_size), None, TOKENS)
    assert tuple(out.token_ids) == plain_reply(model, length)
    assert out.finish_reason == "length"
    assert out.timings.draft_rounds == 0


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("block", range(2, 9))
def test_every_accept_count_equals_plain(model, length, block):
    target = tiny_target(model)
    prompt, reply = prompt_of(length, target.vocab_size), list(plain_reply(model, length))
    for right in range(block):
        drafter = ScriptedDrafter(mixed({tuple(prompt): reply}, right, target.vocab_size))
        out = generate(make_pair(target, drafter, block), prompt, None, TOKENS, adaptive=False)
        assert out.token_ids == reply, f"right for {right} tokens"
        full = [r for r in out.rounds if len(r.draft_ids) == block - 1]
        assert full and all(r.accepted == right for r in full)


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("kv_bits", [4, 8])
def test_quantised_kv_equals_its_own_plain_run(model, kv_bits):
    target = tiny_target(model + "_kv32")
    prompt = prompt_of(9, target.vocab_size)
    reply = generate(make_pair(target, None, kv_bits=kv_bits), prompt, None, TOKENS).token_ids
    for block in (2, 4, 7):
        for right in range(block):
            drafter = ScriptedDrafter(mixed({tuple(prompt): reply}, right, target.vocab_size))
            out = generate(make_pair(target, drafter, block, kv_bits=kv_bits), prompt, None, TOKENS, adaptive=False)
            assert out.token_ids == reply


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_other_scripts_equal_plain(model):
    target = tiny_target(model)
    prompt, reply = prompt_of(9, target.vocab_size), list(plain_reply(model, 9))
    table = {tuple(prompt): reply}
    scripts = {
        "oracle": oracle(table),
        "random": noise(target.vocab_size, seed=5),
        "empty": empty,
        "flaky": flaky(table, 0.7, target.vocab_size, seed=6),
    }
    for name, script in scripts.items():
        for adaptive in (True, False):
            out = generate(make_pair(target, ScriptedDrafter(script), 5), prompt, None, TOKENS, adaptive=adaptive)
            assert out.token_ids == reply, name


@pytest.mark.parametrize("fault", ["raise", "none", "range", "negative", "float", "shape", "state", "nan"])
def test_a_broken_drafter_costs_only_acceptance(fault, caplog):
    target = tiny_target("gemma3")
    prompt, reply = prompt_of(9, target.vocab_size), list(plain_reply("gemma3", 9))
    drafter = BrokenDrafter(fault, target.vocab_size)
    out = generate(make_pair(target, drafter, 4), prompt, None, TOKENS, adaptive=False)
    assert out.token_ids == reply
    assert drafter.calls > 0
    if fault != "nan":  # greedy acceptance never reads probabilities
        assert out.timings.draft_n_accepted == 0
        assert out.speculation.fallbacks
        said = [r.getMessage() for r in caplog.records if r.name == "mlx_spec.engine"]
        assert said and len(said) == len(set(said)), "each fault is logged once"


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("right", [0, 1, 3, 6])
def test_coupled_sampling_equals_plain_sampling(model, right):
    target = tiny_target(model)
    prompt = prompt_of(9, target.vocab_size)
    for settings in (
        Sampling(temperature=0.8, seed=11),
        Sampling(temperature=1.3, top_p=0.9, top_k=20, min_p=0.02, seed=12),
    ):
        reply = generate(make_pair(target, None), prompt, settings, TOKENS).token_ids
        for block in (2, 4, 7):
            drafter = ScriptedDrafter(mixed({tuple(prompt): reply}, right, target.vocab_size))
            out = generate(make_pair(target, drafter, block), prompt, settings, TOKENS, adaptive=False)
            assert out.token_ids == reply
            full = [r for r in out.rounds if len(r.draft_ids) == block - 1]
            assert all(r.accepted == min(right, block - 1) for r in full)


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("adaptive", [True, False])
def test_rows_in_changing_company_equal_their_solo_runs(model, adaptive):
    target = tiny_target(model)
    table, expected, requests = {}, [], []
    for i, length in enumerate(LENGTHS):
        prompt = prompt_of(length, target.vocab_size)
        sampling = Sampling(temperature=0.9, seed=40 + i) if i % 3 == 2 else Sampling()
        count = 6 + 5 * (i % 4)
        reply = generate(make_pair(target, None), prompt, sampling, count).token_ids
        table[tuple(prompt)] = generate(make_pair(target, None), prompt, sampling, 40).token_ids
        expected.append(reply)
        requests.append(Request(prompt, sampling, count, adaptive=adaptive))
    drafter = ScriptedDrafter(flaky(table, 0.7, target.vocab_size, seed=8))
    engine = Engine(make_pair(target, drafter, 5), max_rows=3)
    handles = [engine.submit(r) for r in requests[:4]]
    for _ in range(5):
        engine.step()
    handles += [engine.submit(r) for r in requests[4:]]
    engine.run()
    assert [h.result().token_ids for h in handles] == expected
    assert adaptive or drafter.calls > 3


def test_cancelling_one_row_leaves_the_others_alone():
    target = tiny_target("gemma3")
    prompts = [prompt_of(n, target.vocab_size) for n in (5, 9, 15)]
    replies = [list(plain_reply("gemma3", n)) for n in (5, 9, 15)]
    drafter = ScriptedDrafter(oracle({tuple(p): r for p, r in zip(prompts, replies, strict=True)}))
    engine = Engine(make_pair(target, drafter, 3), max_rows=3)
    handles = [engine.submit(Request(p, Sampling(), TOKENS, adaptive=False)) for p in prompts]
    for _ in range(4):
        engine.step()
    handles[1].cancel()
    engine.run()
    assert handles[0].result().token_ids == replies[0]
    assert handles[2].result().token_ids == replies[2]
    assert handles[1].result().finish_reason == "cancelled"
    assert handles[1].result().token_ids == replies[1][: len(handles[1].result().token_ids)]


@pytest.mark.parametrize("step", [1, 3, 7, 8])
def test_prefill_chunks_do_not_change_the_reply(step):
    target = tiny_target("gemma3")
    prompt, reply = prompt_of(21, target.vocab_size), list(plain_reply("gemma3", 21))
    drafter = ScriptedDrafter(flaky({tuple(prompt): reply}, 0.7, target.vocab_size))
    out = generate(make_pair(target, drafter, 4, prefill_step=step), prompt, None, TOKENS, adaptive=False)
    assert out.token_ids == reply


@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_cancelling_a_plain_row_ends_it_and_only_it(steps):
    target = tiny_target("llama")
    prompts = [prompt_of(n, target.vocab_size) for n in (5, 9)]
    engine = Engine(make_pair(target, None), max_rows=2)
    handles = [engine.submit(Request(p, Sampling(), TOKENS)) for p in prompts]
    for _ in range(steps):
        engine.step()
    handles[0].cancel()
    engine.run()
    gone = handles[0].result()
    assert gone.finish_reason == "cancelled"
    assert gone.token_ids == list(plain_reply("llama", 5))[: len(gone.token_ids)]
    assert handles[1].result().token_ids == list(plain_reply("llama", 9))
