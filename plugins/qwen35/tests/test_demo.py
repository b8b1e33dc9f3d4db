"""The trained checkpoint: drafting with its own head, on real text, it gives the target's own replies."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm import load as mlx_lm_load
from mlx_lm.generate import generate_step

from mlx_spec.cli.options import read_pair_options
from mlx_spec.engine import Engine
from mlx_spec.pair import Pair, load
from mlx_spec.request import Request, Result
from mlx_spec.sampling import Sampling
from mlx_spec_qwen35.plugin import DEMO

PROMPTS = [
    "def walk(node):\n    for child",
    "class Stack:\n    def push",
    "import os\n\n",
    "for i in range(10):\n    print(",
    "# A function that",
]
TOKENS = 120


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load(str(DEMO), str(DEMO), "mtp", 4, probe=False)


def replies(pair: Pair, speculative: bool) -> list[Result]:
    """Greedy replies to all prompts, in one lane."""
    engine = Engine(pair, max_rows=len(PROMPTS))
    how = {"ignore_eos": True, "adaptive": False, "speculative": speculative}
    handles = [engine.submit(Request(pair.tokenizer.encode(p), Sampling(), TOKENS, **how)) for p in PROMPTS]
    engine.run()
    return [handle.result() for handle in handles]


def test_replies_to_five_texts_are_the_targets_own_and_half_of_all_first_drafts_are_kept(pair: Pair) -> None:
    drafted, plain = replies(pair, True), replies(pair, False)
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    kept = [sum(r.accepted > i for out in drafted for r in out.rounds if r.draft_ids) for i in range(3)]
    rounds = sum(1 for out in drafted for r in out.rounds if r.draft_ids)
    assert kept[0] > 0.5 * rounds
    assert kept[1] / kept[0] > 0.8 * kept[0] / rounds  # the head's own hidden states carry it further


def test_mlx_lm_reads_the_same_checkpoint_and_decodes_the_same(pair: Pair) -> None:
    model = mlx_lm_load(str(DEMO))[0]
    prompt = pair.tokenizer.encode(PROMPTS[0])
    steps = [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=48)]
    engine = Engine(pair, max_rows=1)
    reply = engine.submit(Request(prompt, Sampling(), 48, ignore_eos=True)).result()
    assert reply.token_ids == steps


def test_it_is_named_by_its_plugin_and_the_gemma4_pair_stays_the_one_without_a_name() -> None:
    named, unnamed = read_pair_options({"target": "demo:qwen35"}), read_pair_options({})
    assert (named.target, named.draft_model) == (str(DEMO), str(DEMO))
    assert unnamed.demo is not None and unnamed.demo.owner == "gemma4"


def test_it_drafts_for_itself_with_a_kind_and_no_directory() -> None:
    drafter = load(str(DEMO), None, "mtp", probe=False).drafter
    assert drafter is not None and drafter.card.kind == "mtp"
