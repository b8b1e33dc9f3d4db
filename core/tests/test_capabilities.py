"""What a drafter or target says it cannot do is not asked of it, and the reply says so."""

from __future__ import annotations

import dataclasses

import pytest
import tinymodels
from pairs import make_pair, mlx_lm_greedy, tiny_target

import mlx_spec
from mlx_spec.api import generate
from mlx_spec.engine import Engine
from mlx_spec.errors import ExactnessError, LoadError, UsageError
from mlx_spec.generic_target import GenericTarget
from mlx_spec.lookup import PromptLookupDrafter
from mlx_spec.pair import Plan
from mlx_spec.request import Request
from mlx_spec.sampling import Sampling
from mlx_spec.testing.drafters import ScriptedDrafter, oracle
from mlx_spec.types import Capabilities, ExactnessReport

PROMPT, TOKENS = [3, 5, 7, 11, 2, 9], 14
SEEDED = Sampling(temperature=0.8, seed=6)


def drafter_with(**flags) -> ScriptedDrafter:
    drafter = ScriptedDrafter(oracle({tuple(PROMPT): mlx_lm_greedy(tiny_target("llama"), PROMPT, TOKENS)}))
    drafter.capabilities = Capabilities(**flags)
    return drafter


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.8), SEEDED, SEEDED.replace(acceptance="rejection")])
def test_a_drafter_for_greedy_requests_leaves_sampled_ones_alone(sampling, caplog):
    pair = make_pair(tiny_target("llama"), drafter_with(sampling=False))
    outs = [generate(pair, PROMPT, sampling, TOKENS, adaptive=False) for _ in range(2)]
    reason = "plain decoding: scripted drafts for greedy requests only"
    for out in outs:
        assert out.timings.draft_n == 0 and out.speculation.active is False
        assert out.speculation.reason == reason and out.speculation.fallbacks == [reason]
    assert [record.getMessage() for record in caplog.records] == [reason]
    if sampling.seed is not None:
        assert outs[0].token_ids == generate(pair, PROMPT, sampling, TOKENS, speculative=False).token_ids


def test_greedy_requests_draft_beside_sampled_ones():
    target = tiny_target("llama")
    pair = make_pair(target, drafter_with(sampling=False))
    engine = Engine(pair, max_rows=3)
    settings = [Sampling(), SEEDED, Sampling(repetition_penalty=1.01)]
    handles = [engine.submit(Request(PROMPT, s, TOKENS, ignore_eos=True, adaptive=False)) for s in settings]
    outs = [handle.result() for handle in handles]
    assert [out.timings.draft_n > 0 for out in outs] == [True, False, True]
    plain = make_pair(target, None)
    assert [out.token_ids for out in outs] == [
        generate(plain, PROMPT, s, TOKENS, ignore_eos=True).token_ids for s in settings
    ]


@pytest.mark.parametrize("drafts", [False, True])
def test_a_target_for_one_row_serves_requests_one_at_a_time(monkeypatch, drafts):
    target = tiny_target("llama")
    monkeypatch.setattr(target, "capabilities", Capabilities(batch=False))
    real, sizes = type(target).forward, set()

    def forward(self, tokens, states, taps=()):
        sizes.add(tokens.shape[0])
        return real(self, tokens, states, taps)

    monkeypatch.setattr(type(target), "forward", forward)
    engine = Engine(make_pair(target, drafter_with() if drafts else None), max_rows=4)
    handles = [engine.submit(Request(PROMPT, Sampling(), TOKENS, ignore_eos=True)) for _ in range(3)]
    assert [h.result().token_ids for h in handles] == [mlx_lm_greedy(target, PROMPT, TOKENS)] * 3
    assert sizes == {1} and engine.max_rows == 1


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_kv_is_refused_for_a_target_that_keeps_none(tmp_path, monkeypatch, bits):
    path = tinymodels.write_model(tmp_path / "target", tinymodels.LLAMA | {"head_dim": 64})
    assert mlx_spec.load(str(path), kv_bits=bits).plan.kv_bits == bits
    monkeypatch.setattr(GenericTarget, "capabilities", Capabilities(quantised_kv=False))
    with pytest.raises(UsageError, match="keeps no quantised K/V") as refused:
        mlx_spec.load(str(path), kv_bits=bits)
    assert refused.value.code == "U39"
    assert mlx_spec.load(str(path)).plan.kv_bits is None


def test_a_drafter_whose_drafts_branch_is_refused(tmp_path, monkeypatch):
    path = str(tinymodels.write_model(tmp_path / "target", tinymodels.LLAMA))
    assert mlx_spec.load(path, kind="prompt-lookup").drafter is not None
    monkeypatch.setattr(PromptLookupDrafter, "capabilities", Capabilities(tree=True))
    with pytest.raises(LoadError, match="found the capability tree") as refused:
        mlx_spec.load(path, kind="prompt-lookup")
    assert refused.value.code == "L34"


@pytest.mark.parametrize(
    ("level", "passes"),
    [
        ("bitwise", ["bitwise", "greedy", "distribution", "lossy"]),
        ("distribution", ["distribution", "lossy"]),
        (None, ["lossy"]),
    ],
)
def test_a_level_can_be_demanded(level, passes):
    report = ExactnessReport(level=level, width=4, asked_width=4) if level else None
    plan = Plan(active=True, block_size=4, reason="for a reason", exactness=report)
    for asked in ("bitwise", "greedy", "distribution", "lossy"):
        dataclasses.replace(plan, active=False).demand(asked)  # plain decoding is what all is compared with
        if asked in passes:
            plan.demand(asked)
            continue
        with pytest.raises(ExactnessError, match=f"expected at least {asked}") as refused:
            plan.demand(asked)
        assert refused.value.code == "X01" and "(for a reason)" in str(refused.value)


@pytest.mark.parametrize("level", ["unproven", "", "perfect"])
def test_no_verdict_is_no_level_to_demand(level):
    for active in (False, True):
        with pytest.raises(
            mlx_spec.UsageError, match=r"expected bitwise \| greedy \| distribution \| lossy"
        ) as refused:
            Plan(active=active).demand(level)
        assert refused.value.code == "U42"
