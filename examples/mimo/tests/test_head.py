"""Target and head against mlx-lm's own module and against an independent implementation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mimo_reference import Reference

import mlx_spec
from mlx_spec import Lane, Request, Sampling, TapBlock
from mlx_spec_mimo.drafter import MimoDrafter

Loaded = Callable[..., mlx_spec.Pair]
TOKENS = 24


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(3, 260, length).tolist()


@pytest.fixture(scope="module")
def reference(folder: Callable[..., Path]) -> Reference:
    return Reference(folder())


class Recorded(MimoDrafter):
    """Notes what every propose drafted, and after which tokens."""

    def propose(self, lane: mlx_spec.Lane, budget: Sequence[int]) -> mlx_spec.Draft:
        draft = super().propose(lane, budget)
        self.seen += [
            (tuple(tokens), tuple(ids[:count]))
            for tokens, ids, count in zip(lane.tokens, draft.tokens.tolist(), draft.counts or (), strict=True)
        ]
        return draft


def recorded(pair: mlx_spec.Pair) -> mlx_spec.Pair:
    """The same pair with a drafter that notes its drafts."""
    own = pair.drafter
    assert isinstance(own, MimoDrafter)
    drafter = Recorded(own.card, own.model, own.target)
    drafter.seen = []
    return replace(pair, drafter=drafter)


def check_drafts(reference: Reference, pair: mlx_spec.Pair, least: int) -> None:
    """At least `least` tokens were drafted, all of them those of the reference."""
    for tokens, ids in [(tokens, ids) for tokens, ids in pair.drafter.seen if ids]:
        expected, gap = reference.drafts(tokens, len(ids), pair.token_limit)
        assert list(ids) == expected or gap < 1e-4
    assert sum(len(ids) for _, ids in pair.drafter.seen) >= least


def test_target_equals_mlx_lm_byte_for_byte(loaded: Loaded) -> None:
    target, tokens = loaded().target, mx.array([prompt(19)])
    for width in (1, 4, 19):
        ours, theirs = target.make_states(), target.make_states()
        seen = target.forward(tokens[:, :width], ours, ("hidden", "hidden_pre"))
        assert mx.array_equal(seen.logits, target.model(tokens[:, :width], cache=theirs))
        assert mx.array_equal(seen.taps["hidden"], target.model.model.norm(seen.taps["hidden_pre"]))


def test_target_equals_the_reference(loaded: Loaded, reference: Reference) -> None:
    target, tokens = loaded().target, prompt(19)
    seen = target.forward(mx.array([tokens]), target.make_states(), ("hidden_pre",))
    assert np.abs(np.array(seen.logits[0]) - reference.logits(tokens)).max() < 1e-3
    assert np.abs(np.array(seen.taps["hidden_pre"][0]) - reference.hidden(tokens)).max() < 1e-3


@pytest.mark.parametrize("length", [2, 3, 9, 30])
@pytest.mark.parametrize("block", [2, 3, 6])
def test_drafts_equal_the_reference(loaded: Loaded, reference: Reference, length: int, block: int) -> None:
    pair = recorded(loaded())
    out = mlx_spec.generate(pair, prompt(length), None, TOKENS, ignore_eos=True, adaptive=False, block_size=block)
    assert out.speculation.fallbacks == []
    check_drafts(reference, pair, least=TOKENS // 2)


def test_rounds_of_every_accept_count_are_compared(loaded: Loaded, reference: Reference) -> None:
    pair = recorded(loaded())
    out = mlx_spec.generate(pair, prompt(9), None, 96, ignore_eos=True, adaptive=False, block_size=4)
    assert {r.accepted for r in out.rounds if len(r.draft_ids) == 3} == {0, 1, 2, 3}
    check_drafts(reference, pair, least=96)


@pytest.mark.parametrize("step", [1, 2, 7])
def test_prompts_in_chunks_prime_the_same_cache(loaded: Loaded, reference: Reference, step: int) -> None:
    pair = recorded(loaded(prefill_step=step))
    mlx_spec.generate(pair, prompt(23), None, TOKENS, ignore_eos=True, adaptive=False)
    check_drafts(reference, pair, least=TOKENS // 2)


def test_a_prompt_of_one_token_drafts_once_something_is_committed(loaded: Loaded, reference: Reference) -> None:
    pair = recorded(loaded())
    mlx_spec.generate(pair, [7], None, TOKENS, ignore_eos=True, adaptive=False)
    assert pair.drafter.seen[0] == ((7,), ())
    check_drafts(reference, pair, least=TOKENS // 2)


def test_rows_in_changing_company_draft_as_if_alone(loaded: Loaded, reference: Reference) -> None:
    """Rows join and leave between rounds, at different lengths and widths; one of them never drafts."""
    lengths, counts, blocks, silent = (9, 30, 2, 17, 1), (TOKENS, 9, 40, 12, TOKENS), (4, 2, 6, 4, 3), 3
    prompts = [prompt(n, seed=1) for n in lengths]
    pair = recorded(loaded())
    engine = mlx_spec.Engine(pair, max_rows=3)
    handles = [
        engine.submit(
            Request(
                tokens, Sampling(), count, ignore_eos=True, adaptive=False, speculative=n != silent, block_size=block
            )
        )
        for n, (tokens, count, block) in enumerate(zip(prompts, counts, blocks, strict=True))
    ]
    engine.run()
    for tokens, count, handle in zip(prompts, counts, handles, strict=True):
        alone = mlx_spec.generate(loaded(), tokens, None, count, ignore_eos=True, speculative=False)
        assert handle.result().token_ids == alone.token_ids
        assert handle.result().speculation.fallbacks == []
    check_drafts(reference, pair, least=100)
    drafted = {tokens[:1] for tokens, ids in pair.drafter.seen if ids}
    assert drafted == {tuple(tokens[:1]) for n, tokens in enumerate(prompts) if n != silent}


def test_plain_stretches_leave_no_gap(loaded: Loaded, reference: Reference) -> None:
    """Six proposes out of seven fail before a plain step: drafts are still those of a whole cache."""
    pair = recorded(loaded())
    propose, calls = pair.drafter.propose, itertools.count()

    def failing(lane: mlx_spec.Lane, budget: Sequence[int]) -> mlx_spec.Draft:
        if next(calls) % 7:
            raise RuntimeError("not now")
        return propose(lane, budget)

    pair.drafter.propose = failing
    out = mlx_spec.generate(pair, prompt(9), None, 60, ignore_eos=True, adaptive=False)
    plain = mlx_spec.generate(pair, prompt(9), None, 60, ignore_eos=True, speculative=False)
    assert out.token_ids == plain.token_ids
    assert out.timings.plain_steps > out.timings.draft_rounds > 3
    check_drafts(reference, pair, least=10)


def test_the_law_of_every_draw_is_reported(loaded: Loaded) -> None:
    pair = recorded(loaded())
    settings = Sampling(temperature=0.9, top_k=20, seed=5)
    out = mlx_spec.generate(pair, prompt(9), settings, TOKENS, ignore_eos=True, adaptive=False)
    plain = mlx_spec.generate(pair, prompt(9), settings, TOKENS, ignore_eos=True, speculative=False)
    assert out.token_ids == plain.token_ids  # a seed makes sampling coupled: the same tokens, drafted or not
    assert out.timings.draft_n_accepted > 0


def test_the_state_of_a_request_is_its_own(loaded: Loaded) -> None:
    drafter = loaded().drafter
    assert drafter is not None
    one, two = drafter.make_state(), drafter.make_state()
    hidden = mx.random.normal((1, 5, 64), key=mx.random.key(0))
    drafter.prime(one, mx.array([prompt(5)]), {"hidden_pre": hidden}, 0)
    assert one.states is not None and two.states is not None
    assert (one.states.lengths, two.states.lengths) == ((4,), (0,))


def test_a_request_it_has_not_followed_from_the_start_gets_no_drafts(loaded: Loaded) -> None:
    """As when drafting was off during the prompt: half a history would be drafted from at wrong positions."""
    pair = loaded()
    lane = Lane(pair.target, pair.drafter, pair.target.make_states(), pair.drafter.make_state())
    lane.tokens, lane.anchors = [prompt(9)], mx.array(prompt(9)[-1:])
    lane.fresh = [TapBlock({"hidden_pre": mx.ones((1, 3, 64))}, [2])]
    draft = pair.drafter.propose(lane, [3])
    assert (draft.tokens.shape, draft.counts) == ((1, 0), [0])
    assert lane.draft_state.states.lengths == (0,)
