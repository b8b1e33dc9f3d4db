"""`rejection` through the whole engine: what comes out is distributed as the target alone would have it."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
import tinymodels
from pairs import make_pair

from mlx_spec.checkpoint import read_config
from mlx_spec.engine import Engine
from mlx_spec.full_model import FullModelDrafter
from mlx_spec.generic_target import GenericTarget
from mlx_spec.models import Target
from mlx_spec.request import Request
from mlx_spec.sampling import Sampling
from mlx_spec.shaping import shape_logprobs
from mlx_spec.testing.drafters import ScriptedDrafter
from mlx_spec.types import DrafterCard, ModelRef

V, DEPTH, ROWS, BATCHES = 5, 4, 1250, 10  # ROWS * BATCHES * DEPTH = 50,000 draws


def tiny(path, seed: int) -> Target:
    config = tinymodels.SMALL_LLAMA | {"vocab_size": V, "num_hidden_layers": 1, "eos_token_id": V - 1}
    tinymodels.write_model(path, config, seed=seed)
    return GenericTarget.load(ModelRef(path.name, path, read_config(path)))


def law(target: Target, settings: Sampling, prompt: int) -> dict[tuple[int, ...], float]:
    """Probability of every reply of DEPTH tokens, by the chain rule over the target's own logits."""
    replies = list(itertools.product(range(V), repeat=DEPTH))
    tokens = mx.array([[prompt, *reply[:-1]] for reply in replies])
    states = target.make_states()
    states = type(states).merge([states.extract(0) for _ in replies])
    logits = target.forward(tokens, states).logits
    shaped = np.array(shape_logprobs(logits, settings).astype(mx.float32))
    return {
        reply: math.exp(sum(shaped[i, j, token] for j, token in enumerate(reply))) for i, reply in enumerate(replies)
    }


@pytest.mark.parametrize("drafter_kind", ["full-model", "point-mass"])
def test_fifty_thousand_draws_follow_the_target(tmp_path, drafter_kind):
    target = tiny(tmp_path / "target", 3)
    settings = Sampling(temperature=1.3, top_p=0.97)
    if drafter_kind == "full-model":
        card = DrafterCard("full-model", "llama", vocab_size=V)
        drafter = FullModelDrafter(tiny(tmp_path / "drafter", 2), card)
    else:
        drafter = ScriptedDrafter(lambda tokens, k: [(tokens[-1] + 1 + i) % V for i in range(k)])
    pair = make_pair(target, drafter, 3)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = drafted = 0
    for _ in range(BATCHES):
        engine = Engine(pair, max_rows=ROWS)
        handles = [engine.submit(Request([3], settings, DEPTH, ignore_eos=True, adaptive=False)) for _ in range(ROWS)]
        engine.run()
        for handle in handles:
            out = handle.result()
            counts[tuple(out.token_ids)] += 1
            accepted += out.timings.draft_n_accepted
            drafted += out.timings.draft_n
    expected = law(target, settings, 3)
    assert math.isclose(sum(expected.values()), 1.0, abs_tol=1e-4)
    total = ROWS * BATCHES
    assert sum(counts.values()) == total
    assert all(expected[reply] > 0 for reply in counts), "a reply that the target can not write"
    assert 0.05 * drafted < accepted < 0.95 * drafted, "the test must exercise both accepting and rejecting"
    cells = [(counts[r], total * p) for r, p in expected.items() if total * p >= 5]
    rest = (total - sum(c for c, _ in cells), total - sum(e for _, e in cells))
    cells += [rest] if rest[1] >= 5 else []
    chi2 = sum((c - e) ** 2 / e for c, e in cells)
    freedom = len(cells) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom), (chi2, freedom)
