"""DFlash drafters in the engine: the reply is the target's own, whatever is accepted, at any width and in any company.

Random drafters are hardly ever right, so drafts are steered: the drafter proposes for real, with its context and its
selector going on from the token it is told, and every accept count occurs.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from qwen35_oracles.dflash_ours import CASES, Ours, open_ref

import mlx_spec
from mlx_spec.engine import Engine
from mlx_spec.pair import Pair
from mlx_spec.request import Request, Result
from mlx_spec.sampling import Sampling
from mlx_spec.shaping import shape_logprobs
from mlx_spec.testing.rig import Rig, Setup
from mlx_spec.testing.watch import Steer, Watch
from mlx_spec_qwen35.dflash import DFlashDrafter
from mlx_spec_qwen35.dflash_config import dflash_card
from mlx_spec_qwen35.target import Qwen35Target
from mlx_spec_qwen35.tiny import write_tiny

TOKENS = 10
SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=17)
NAMES = ("sliding", "second")
LENGTHS = (1, 9, 14)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Rig]:
    folder = tmp_path_factory.mktemp("dflash")

    @cache
    def make(name: str) -> Rig:
        ours = Ours(*next(case for case in CASES if case.name == name).write(folder))
        return Rig(ours.target, ours.drafter)

    return make


def run(
    rig: Rig, prompts: Sequence[list[int]], sampling: Sampling, block: int, steer: Steer, together: bool
) -> list[Result]:
    """All prompts in one lane, full width every round."""
    pair = rig.pair(rig.drafter, Setup(block))
    pair.plan.per_row_accepts = not together
    engine = Engine(pair, max_rows=len(prompts))
    Watch(engine, steer)
    handles = [engine.submit(Request(p, sampling, TOKENS, ignore_eos=True, adaptive=False)) for p in prompts]
    engine.run()
    return [handle.result() for handle in handles]


def right_for(table: dict[tuple[int, ...], list[int]], right: dict[tuple[int, ...], int], vocab_size: int) -> Steer:
    """Drafts of a prompt's reply are right for right[prompt] tokens, then wrong."""

    def steer(tokens: Sequence[int], step: int) -> int:
        prompt = next(p for p in table if tuple(tokens[: len(p)]) == p)
        at, reply = len(tokens) - len(prompt) + step, table[prompt]
        token = reply[at] if at < len(reply) else 0
        return token if step < right[prompt] else (token + 1) % vocab_size

    return steer


@pytest.mark.parametrize("together", [False, True], ids=["per-row", "shortest-row"])
@pytest.mark.parametrize("sampling", [Sampling(), SEEDED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("block", [2, 5])
@pytest.mark.parametrize("name", NAMES)
def test_every_accept_count_gives_the_plain_reply(
    rig: Callable[[str], Rig], name: str, block: int, sampling: Sampling, together: bool
) -> None:
    bench = rig(name)
    prompts = [bench.prompt(length, 5) for length in LENGTHS]
    table = {tuple(p): bench.plain(p, TOKENS, sampling) for p in prompts}
    for fewest in range(block):
        right = {
            tuple(p): (fewest + i) % block if not together else min(block - 1, fewest + i)
            for i, p in enumerate(prompts)
        }
        results = run(bench, prompts, sampling, block, right_for(table, right, bench.target.vocab_size), together)
        assert [r.token_ids for r in results] == list(table.values())
        assert not any(r.speculation.fallbacks for r in results)
        for prompt, result in zip(prompts, results, strict=True):
            whole = [r.accepted for r in result.rounds if len(r.draft_ids) == block - 1]
            assert whole and set(whole) == {fewest if together else right[tuple(prompt)]}


@pytest.mark.parametrize("name", NAMES)
def test_requests_that_come_and_go_reply_as_alone(rig: Callable[[str], Rig], name: str) -> None:
    """More requests than rows, of unequal length, some sampled, some undrafted for a while (adaptive)."""
    bench = rig(name)
    prompts = [bench.prompt(3 + 2 * i, 7) for i in range(7)]
    samplings = [Sampling(), SEEDED, Sampling(temperature=0.7, seed=3)] * 3
    counts = [4 + 3 * (i % 4) for i in range(7)]
    expected = [bench.plain(p, n, s) for p, n, s in zip(prompts, counts, samplings, strict=False)]
    for adaptive in (False, True):
        engine = Engine(bench.pair(bench.drafter, Setup(5)), max_rows=3)
        requests = [
            Request(p, s, n, ignore_eos=True, adaptive=adaptive)
            for p, s, n in zip(prompts, samplings, counts, strict=False)
        ]
        handles = [engine.submit(request) for request in requests[:4]]
        for _ in range(3):
            engine.step()
        handles += [engine.submit(request) for request in requests[4:]]
        engine.run()
        assert [handle.result().token_ids for handle in handles] == expected
        assert not any(handle.result().speculation.fallbacks for handle in handles)


def test_one_row_can_be_cancelled_and_one_can_decline_drafts(rig: Callable[[str], Rig]) -> None:
    bench = rig("sliding")
    prompts = [bench.prompt(length, 9) for length in (6, 9, 12)]
    engine = Engine(bench.pair(bench.drafter, Setup(4)), max_rows=3)
    handles = [
        engine.submit(Request(p, Sampling(), TOKENS, ignore_eos=True, adaptive=False, speculative=i != 2))
        for i, p in enumerate(prompts)
    ]
    for _ in range(4):
        engine.step()
    handles[0].cancel()
    engine.run()
    for handle, prompt in zip(handles[1:], prompts[1:], strict=True):
        assert handle.result().token_ids == bench.plain(prompt, TOKENS)
    assert handles[1].result().timings.draft_n > 0 == handles[2].result().timings.draft_n


# -- rejection, by enumeration -----------------------------------------------------------------------------

V, DEPTH = 6, 3


def small(folder: Path, drafter: str) -> tuple[Qwen35Target, DFlashDrafter]:
    """A pair over V tokens, cut out of a tiny one; with so few a random drafter is right now and then."""
    sizes = {"num_hidden_layers": 2, "full_attention_interval": 2}
    target, source = write_tiny(folder, 8, drafter=drafter, block_size=4, **sizes)
    for path in (target, source):
        assert path is not None
        config = json.loads((path / "config.json").read_text())
        config["vocab_size"] = V
        if "dflash_config" in config:
            config["dflash_config"] |= {"mask_token_id": V - 1, "target_layer_ids": [0, 1]}
            if drafter == "dflash2":
                config["dflash_config"]["selector_top_k"] = 4
        (path / "config.json").write_text(json.dumps(config))
        for file in path.glob("*.safetensors"):
            held = dict(mx.load(str(file)).items())
            cut = {name: narrowed(name, value) for name, value in held.items()}
            mx.save_safetensors(str(file), cut, {"format": "mlx"})
    ref = open_ref(target)
    loaded = Qwen35Target.load(ref, ref.config)
    ref = open_ref(source)  # type: ignore[arg-type]
    card = dflash_card(ref)
    assert card is not None
    return loaded, DFlashDrafter.load(ref, card, loaded)


def narrowed(name: str, value: mx.array) -> mx.array:
    if value.shape[0] == 320:  # embedding, output head, codebooks
        return mx.contiguous(value[:V])
    return mx.contiguous(value[:, :128]) if name == "fc.weight" else value


def law(target: Qwen35Target, settings: Sampling, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Probability of every reply of DEPTH tokens, by the chain rule over the target's own logits."""
    replies = list(itertools.product(range(V), repeat=DEPTH))
    tokens = mx.array([[*prompt, *reply[:-1]] for reply in replies])
    states = target.make_states()
    states = type(states).merge([states.extract(0) for _ in replies])
    logits = target.forward(tokens, states).logits[:, len(prompt) - 1 :]
    shaped = np.array(shape_logprobs(logits, settings))
    return {r: math.exp(sum(shaped[i, j, token] for j, token in enumerate(r))) for i, r in enumerate(replies)}


@pytest.mark.parametrize("together", [False, True], ids=["per-row", "shortest-row"])
@pytest.mark.parametrize("drafter", ["dflash", "dflash2"])
def test_rejection_sampling_has_the_targets_law(tmp_path: Path, drafter: str, together: bool) -> None:
    """Replies of three tokens against the exact probability of each of the 216."""
    target, blocks = small(tmp_path, drafter)
    pair: Any = Rig(target, blocks).pair(blocks, Setup(4))
    pair.plan.per_row_accepts = not together
    settings, prompt = Sampling(temperature=1.5, top_p=0.98), [3, 1, 4]
    rows, count = (2, 900) if together else (30, 1500)
    engine = Engine(pair, max_rows=rows)
    seeded = [settings.replace(seed=i, acceptance="rejection") for i in range(count)]  # the same draws every time
    handles = [engine.submit(Request(prompt, each, DEPTH, ignore_eos=True, adaptive=False)) for each in seeded]
    engine.run()
    results = [handle.result() for handle in handles]
    kept = Counter(r.rounds[0].accepted for r in results)
    assert all(kept[n] > 0 for n in range(DEPTH)), "blocks must be cut at every length"
    found, expected = Counter(tuple(r.token_ids) for r in results), law(target, settings, prompt)
    assert math.isclose(sum(expected.values()), 1.0, abs_tol=1e-4)
    assert all(expected[reply] > 0 for reply in found), "a reply that the target cannot write"
    cells = [(found[r], count * p) for r, p in expected.items() if count * p >= 5]
    rest = (count - sum(c for c, _ in cells), count - sum(e for _, e in cells))
    cells += [rest] if rest[1] >= 5 else []
    chi2 = sum((c - e) ** 2 / e for c, e in cells)
    freedom = len(cells) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom), (chi2, freedom, kept)


# -- from directories --------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["dflash", "dflash2"])
def test_a_loaded_pair_is_proven_and_drafts_packed(tmp_path: Path, drafter: str) -> None:
    folders = write_tiny(tmp_path, 6, drafter=drafter, block_size=5, sliding=True)
    pair: Pair = mlx_spec.load(*map(str, folders))
    assert pair.plan.active and pair.plan.requested == "dflash" and pair.plan.block_size == 5
    assert pair.plan.block_size_from == "drafter" and pair.plan.level in ("bitwise", "greedy")
    out = mlx_spec.generate(pair, [7, 8, 9, 7, 8, 9], None, 16, ignore_eos=True, adaptive=False)
    plain = mlx_spec.generate(pair, [7, 8, 9, 7, 8, 9], None, 16, ignore_eos=True, speculative=False)
    assert out.token_ids == plain.token_ids and out.timings.draft_n > 0
    assert out.speculation.per_row_accepts and out.timings.draft_kind == "dflash"
