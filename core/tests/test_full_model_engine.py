"""The built-in drafters through the whole engine: the reply is the target's own, alone and in company."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from pairs import make_pair, mlx_lm_greedy, tiny_target
from tinymodels import LLAMA, write_model

from mlx_spec.api import generate
from mlx_spec.engine import Engine
from mlx_spec.errors import UsageError
from mlx_spec.full_model import FullModelDrafter
from mlx_spec.generic_target import GenericTarget
from mlx_spec.loading import open_ref
from mlx_spec.lookup import PromptLookupDrafter
from mlx_spec.models import Target
from mlx_spec.pair import Pair
from mlx_spec.request import Request
from mlx_spec.sampling import Sampling
from mlx_spec.types import DrafterCard

TOKENS = 32
PROMPT = [(i * i * 5 + i) % 90 + 2 for i in range(21)]
REPEATING = [7, 8, 9, 10, 11] * 4


@pytest.fixture(scope="module")
def replies() -> dict[tuple[str, int], list[int]]:
    """Plain replies of mlx-lm, by target and prompt length."""
    prompts = (PROMPT, REPEATING)
    return {(n, len(p)): mlx_lm_greedy(tiny_target(n), p, TOKENS) for n in ("llama", "gemma3") for p in prompts}


@pytest.mark.parametrize("block_size", range(2, 9))
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_the_target_as_its_own_drafter_is_accepted_every_time(replies, model, block_size):
    target = tiny_target(model)
    pair = make_pair(target, FullModelDrafter(target), block_size, prefill_step=8)
    out = generate(pair, PROMPT, None, TOKENS, adaptive=False, ignore_eos=True)
    assert out.token_ids == replies[model, len(PROMPT)]
    assert out.timings.draft_n_accepted == out.timings.draft_n > 0
    assert not out.speculation.fallbacks


@pytest.mark.parametrize("settings", [None, Sampling(temperature=0.9, seed=5)], ids=["greedy", "coupled"])
def test_full_model_in_a_changing_batch(settings):
    target = tiny_target("gemma3")
    prompts = [PROMPT[:n] for n in (3, 21, 9, 14)]
    alone = [generate(make_pair(target, None), p, settings, TOKENS, ignore_eos=True).token_ids for p in prompts]
    engine = Engine(make_pair(target, FullModelDrafter(target), 4, prefill_step=8), max_rows=3)
    counts = [TOKENS, 11, 23, TOKENS]
    handles = [
        engine.submit(Request(p, settings or Sampling(), n, ignore_eos=True, adaptive=False))
        for p, n in zip(prompts, counts, strict=True)
    ]
    results = [handle.result() for handle in handles]
    assert [r.token_ids for r in results] == [a[:n] for a, n in zip(alone, counts, strict=True)]
    assert all(r.timings.draft_n_accepted == r.timings.draft_n > 0 for r in results)


def test_a_reply_longer_than_the_drafters_context_goes_on_plainly(replies):
    target = tiny_target("llama")
    small = FullModelDrafter(target)
    small.lm = _Shorter(target, 30)
    out = generate(make_pair(target, small, 4), PROMPT, None, TOKENS, adaptive=False, ignore_eos=True)
    assert out.token_ids == replies["llama", len(PROMPT)]
    assert 0 < out.timings.draft_n <= 9
    assert out.timings.plain_steps >= TOKENS - 12


class _Shorter:
    """The same model with fewer positions."""

    def __init__(self, model: object, context: int):
        self._model, self.context = model, context

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_prompt_lookup_changes_nothing_whatever_its_n(replies, model, n):
    drafter = PromptLookupDrafter(DrafterCard("prompt-lookup", "", extra={"min_n": n}))
    pair = make_pair(tiny_target(model), drafter, 6)
    for adaptive in (False, True):
        out = generate(pair, REPEATING, None, TOKENS, adaptive=adaptive, ignore_eos=True)
        assert out.token_ids == replies[model, len(REPEATING)]
    assert generate(pair, REPEATING, None, TOKENS, adaptive=False, ignore_eos=True).timings.draft_n > 0


def test_prompt_lookup_proposes_what_followed_before():
    target = tiny_target("llama")
    seen = generate(make_pair(target, None), PROMPT, None, TOKENS, ignore_eos=True).token_ids
    row = PromptLookupDrafter().make_state().rows[0]
    assert row.propose([*PROMPT, *seen, *PROMPT], 8) == seen[:8]


# -- padding of the embedding (reports 130 and 134) ------------------------------------------------------

NAMED = 120  # ids with a token; the target has 131 rows, its drafter 127


def planted(folder: Path, vocab_size: int) -> Target:
    """A model whose rows past NAMED come in pairs of opposite sign: one of each pair always has a huge logit."""
    config = LLAMA | {"vocab_size": vocab_size, "num_hidden_layers": 2}
    target = GenericTarget.load(open_ref(str(write_model(folder / str(vocab_size), config, seed=vocab_size))))
    head = target.model.lm_head
    tail = 100.0 * head.weight[NAMED:]
    tail[1::2] = -tail[0::2][: tail[1::2].shape[0]]
    head.weight = mx.concatenate([head.weight[:NAMED], tail])
    return target


@pytest.fixture(scope="module")
def padded(tmp_path_factory) -> Pair:
    folder = tmp_path_factory.mktemp("padded")
    pair = make_pair(planted(folder, 131), FullModelDrafter(planted(folder, 127)), 4)
    pair.token_limit = NAMED
    return pair


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 100.0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 50.0, "seed": 4},
    ],
    ids=str,
)
def test_padding_is_neither_drafted_nor_emitted_nor_an_alternative(padded, settings):
    logits = padded.target.forward(mx.array([PROMPT]), padded.target.make_states()).logits
    assert (mx.argmax(logits, axis=-1) >= NAMED).all().item()  # what would be chosen
    sampling = Sampling(**settings, logprobs=20)
    out = generate(padded, PROMPT, sampling, TOKENS, ignore_eos=True, adaptive=False)
    drafted = [t for r in out.rounds for t in r.draft_ids]
    assert len(out.token_ids) == TOKENS and max(out.token_ids) < NAMED
    assert len(drafted) > TOKENS // 2 and max(drafted) < NAMED
    assert max(t for item in out.logprobs for t, _ in item.top) < NAMED
    if sampling.law != "rejection":
        alone = generate(padded, PROMPT, sampling, TOKENS, ignore_eos=True, speculative=False)
        assert out.token_ids == alone.token_ids


def test_padding_is_no_prompt(padded):
    with pytest.raises(UsageError, match=f"found {NAMED}, expected 0 to {NAMED - 1}"):
        generate(padded, [3, NAMED], None, 4)
