"""Seeded fuzz of lanes whose rows have settings of every kind: each row gets what it gets alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import mlx.core as mx
import pytest
from pairs import make_pair, tiny_target

from mlx_spec.engine import Engine
from mlx_spec.full_model import FullModelDrafter
from mlx_spec.lane import Lane
from mlx_spec.lookup import PromptLookupDrafter
from mlx_spec.models import Drafter, Target
from mlx_spec.pair import Pair
from mlx_spec.request import Request, Result
from mlx_spec.sampling import Sampling
from mlx_spec.state import StateGroup
from mlx_spec.types import Draft, Verification

ROWS, BLOCK = 7, 5


def settings(rng: random.Random, law: str, vocab_size: int) -> Sampling:
    """One row's settings under a law; about half of everything else is on."""
    values: dict[str, object] = {"logprobs": rng.choice([None, 0, 1, 5, 20])}
    if law != "greedy":
        values |= {"temperature": rng.choice([0.6, 1.0, 1.4]), "seed": rng.getrandbits(40), "acceptance": law}
        values |= rng.choice([{}, {"top_k": 30}, {"top_p": 0.9}, {"min_p": 0.05, "top_k": 50}])
    values |= rng.choice([{}, {}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.4, "presence_penalty": 0.3}])
    values |= rng.choice([{}, {}, {"logit_bias": {rng.randrange(vocab_size): 2.0}}])
    if rng.random() < 0.5:
        values |= {"stop_ids": tuple(rng.sample(range(vocab_size), 6)), "min_tokens": rng.randrange(8)}
    return Sampling(**values)


def requests(seed: int, target: Target, **options: object) -> list[Request]:
    """Requests that take turns over the three laws, prompts and lengths unequal; prompts repeat themselves."""
    rng = random.Random(seed)
    out = []
    for i in range(ROWS):
        law = ("greedy", "rejection", "coupled")[(i + seed) % 3]
        piece = [rng.randrange(target.vocab_size) for _ in range(rng.randint(1, 6))]
        prompt = (piece * 9)[: rng.randint(1, 24)]
        chosen = settings(rng, law, target.vocab_size)
        out.append(Request(prompt, chosen, rng.randint(5, 22), block_size=rng.choice([None, 2, 4]), **options))
    return out


def again(request: Request, **changes: object) -> Request:
    """The same request as a new one."""
    values = {n: getattr(request, n) for n in ("prompt", "sampling", "max_tokens", "block_size", "adaptive")}
    return Request(**(values | changes))


def alone(pair: Pair, request: Request, **changes: object) -> Result:
    return Engine(pair, max_rows=1).submit(again(request, **changes)).result()


def together(pair: Pair, wanted: list[Request], seed: int) -> list[Result]:
    """All of them through lanes of at most three rows; they come in while others run."""
    rng = random.Random(seed)
    engine = Engine(pair, max_rows=3)
    handles = []
    for request in wanted:
        handles.append(engine.submit(again(request)))
        for _ in range(rng.randrange(4)):
            engine.step()
    engine.run()
    return [handle.result() for handle in handles]


def same(found: Result, expected: Result) -> None:
    """Tokens, ends, and log-probabilities: the same alternatives with the same values."""
    assert found.token_ids == expected.token_ids
    assert found.finish_reason == expected.finish_reason
    assert (found.logprobs is None) == (expected.logprobs is None)
    for a, b in zip(found.logprobs or (), expected.logprobs or (), strict=True):
        assert a.token == b.token and [t for t, _ in a.top] == [t for t, _ in b.top]
        assert [a.logprob, *(v for _, v in a.top)] == pytest.approx([b.logprob, *(v for _, v in b.top)], abs=2e-5)


class Tilted:
    """The target with another law: a constant is added to its logits."""

    def __init__(self, target: Target, scale: float):
        self._target = target
        self._tilt = scale * mx.random.normal((target.vocab_size,), key=mx.random.key(7))

    def __getattr__(self, name: str) -> object:
        return getattr(self._target, name)

    def forward(self, tokens: mx.array, states: StateGroup) -> Verification:
        return Verification(self._target.forward(tokens, states).logits + self._tilt, {})


class Moody(FullModelDrafter):
    """Close to the target, and silent where the text so far says so."""

    def __init__(self, target: Target, moods: int):
        super().__init__(Tilted(target, 0.6))
        self.moods = moods

    def propose(self, lane: Lane, budget: Sequence[int]) -> Draft:
        draft = super().propose(lane, budget)
        if self.moods:
            draft.counts = [0 if sum(t) % self.moods else n for t, n in zip(lane.tokens, draft.counts, strict=True)]
        return draft


def drafters(target: Target) -> dict[str, Drafter]:
    """Close to the target's law, the same with silences, and point masses."""
    return {"model": Moody(target, 0), "moody": Moody(target, 3), "lookup": PromptLookupDrafter()}


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("seed", range(2))
def test_a_drafter_with_the_targets_own_law_is_never_refused(model, seed):
    target = tiny_target(model)
    pair = make_pair(target, FullModelDrafter(target), BLOCK)
    wanted = requests(seed, target, adaptive=False)
    for request, out in zip(wanted, together(pair, wanted, seed), strict=True):
        rounds = out.rounds if out.finish_reason == "length" else out.rounds[:-1]  # a stop cuts the last one
        assert out.speculation.law == request.sampling.law
        assert [r.accepted for r in rounds] == [len(r.draft_ids) for r in rounds]
        assert out.timings.draft_n > 0 and not out.speculation.fallbacks


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("drafter", ["model", "moody", "lookup"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_company_changes_nothing(model, drafter, adaptive):
    target = tiny_target(model)
    pair = make_pair(target, drafters(target)[drafter], BLOCK)
    wanted = requests(4 + adaptive, target, adaptive=adaptive)
    tested = []
    for request, out in zip(wanted, together(pair, wanted, 4), strict=True):
        same(out, alone(pair, request))
        if request.sampling.law == "rejection":
            tested.append(out.timings)
        else:
            same(out, alone(pair, request, speculative=False))
    accepted = sum(t.draft_n_accepted for t in tested)
    assert drafter == "lookup" or 0 < accepted < sum(t.draft_n for t in tested)
