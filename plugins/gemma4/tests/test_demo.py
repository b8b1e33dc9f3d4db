"""The trained demo pair: what is released, on real text, gives the target's own replies."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

import mlx_spec_gemma4
from mlx_spec.engine import Engine
from mlx_spec.pair import Pair, load
from mlx_spec.request import Request, Result
from mlx_spec.sampling import Sampling

PROMPTS = [
    "def walk(node):\n    for child",
    "class Stack:\n    def push",
    "import os\n\n",
    "for i in range(10):\n    print(",
    "# A function that",
]
TOKENS = 200


@pytest.fixture
def pair() -> Pair:
    demo = Path(mlx_spec_gemma4.__file__).parent / "demo"
    return load(str(demo / "target"), str(demo / "drafter"), probe=False)


def replies(pair: Pair, speculative: bool) -> list[Result]:
    """Greedy replies to all prompts, in one lane."""
    engine = Engine(pair, max_rows=len(PROMPTS))
    handles = [
        engine.submit(
            Request(
                pair.tokenizer.encode(p), Sampling(), TOKENS, ignore_eos=True, adaptive=False, speculative=speculative
            )
        )
        for p in PROMPTS
    ]
    engine.run()
    return [handle.result() for handle in handles]


def test_two_hundred_tokens_of_five_texts_are_the_targets_own(pair: Pair) -> None:
    drafted, plain = replies(pair, True), replies(pair, False)
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    for out in drafted:
        assert len(out.token_ids) == TOKENS and out.speculation.acceptance_by_position[0] > 0.5
    steps = generate_step(mx.array(pair.tokenizer.encode(PROMPTS[0])), pair.target.model, max_tokens=64)
    assert drafted[0].token_ids[:64] == [int(token) for token, _ in steps]
