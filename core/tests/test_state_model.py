"""States under a whole model of mlx-lm: full and sliding layers, layers that share K/V, rows out of step."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gemma4_text
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec.state import StateGroup, from_mlx_lm

WINDOW, VOCAB, LENGTH = 16, 61, 100


def build(shared: int):
    mx.random.seed(3)
    args = gemma4_text.ModelArgs(
        hidden_size=24,
        num_hidden_layers=5,
        intermediate_size=40,
        num_attention_heads=4,
        head_dim=32,
        global_head_dim=64,
        vocab_size=VOCAB,
        vocab_size_per_layer_input=VOCAB,
        num_key_value_heads=2,
        num_kv_shared_layers=shared,
        hidden_size_per_layer_input=8,
        sliding_window=WINDOW,
        layer_types=[f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
    )
    model = gemma4_text.Model(args)
    mx.eval(model.parameters())
    return model


MODELS = {shared: build(shared) for shared in (0, 2)}
IDS = np.random.default_rng(1).integers(0, VOCAB, (3, LENGTH))
WRONG = np.random.default_rng(2).integers(0, VOCAB, LENGTH)


def forward(model, states, rows):
    return model(mx.array(np.array(rows), dtype=mx.int32), cache=states)


def singles(model, states, ids):
    """Logits (len(ids), V) of one row, one token at a time."""
    return np.concatenate([np.array(forward(model, states, [[int(t)]]))[0] for t in ids])


def stepwise(model, caches) -> np.ndarray:
    """Logits (B, LENGTH, V) of all texts side by side, one token at a time."""
    steps = [forward(model, caches, IDS[:, p : p + 1]) for p in range(LENGTH)]
    return np.array(mx.concatenate(steps, axis=1))


WANTED = {shared: stepwise(model, make_prompt_cache(model)) for shared, model in MODELS.items()}


@pytest.fixture(params=[(0, None), (2, None), (0, 8)], ids=["plain", "shared-kv", "8-bit"])
def setup(request):
    shared, bits = request.param
    model = MODELS[shared]

    def make():
        return from_mlx_lm(model, kv_bits=bits, kv_group_size=32)

    wanted = WANTED[shared] if bits is None else stepwise(model, StateGroup.merge([make() for _ in IDS]))
    return model, make, wanted


@pytest.mark.parametrize("shared", [0, 2])
def test_steps_before_the_window_is_full_equal_mlx_lm(shared):
    model, ids = MODELS[shared], IDS[0][:WINDOW]
    ours, theirs = from_mlx_lm(model), make_prompt_cache(model)
    assert singles(model, ours, ids).tobytes() == singles(model, theirs, ids).tobytes()


def drift(got, wanted) -> float:
    return float(np.abs(got - wanted).max()) if got.size else 0.0


def test_rounds_of_a_ragged_batch_match_single_steps(setup):
    """Attention is bitwise equal (see test_state_kinds); matmuls of another shape need not be."""
    model, make, wanted = setup
    rng = random.Random(4)
    parts = []
    for row, n in enumerate((2, 14, 40)):
        parts.append(make())
        forward(model, parts[-1], [IDS[row][:n]])
    states = StateGroup.merge(parts)
    while max(states.lengths) < LENGTH - 5:
        width = rng.randint(1, 5)
        keep = [rng.randint(0, width) for _ in IDS]
        before = states.lengths
        rows = [[*ids[n : n + k], *WRONG[: width - k]] for ids, n, k in zip(IDS, before, keep, strict=True)]
        mark = states.mark()
        logits = np.array(forward(model, states, rows))
        states.rewind(mark, keep)
        assert states.lengths == tuple(n + k for n, k in zip(before, keep, strict=True))
        for b, (n, k) in enumerate(zip(before, keep, strict=True)):
            assert drift(logits[b, :k], wanted[b][n : n + k]) < 2e-4, (b, before, keep)


@pytest.mark.parametrize("start", range(1, 21))
def test_blocks_never_make_a_sliding_layer_outgrow_its_window(start):
    model = MODELS[0]
    states, rng = from_mlx_lm(model), random.Random(start)
    forward(model, states, [IDS[0][:start]])
    done = 0
    while done < 64:
        width = rng.randint(2, 6)
        n, keep = states.lengths[0], rng.randint(1, width)
        mark = states.mark()
        logits = np.array(forward(model, states, [[*IDS[0][n : n + keep], *WRONG[: width - keep]]]))
        states.rewind(mark, [keep])
        assert drift(logits[0, :keep], WANTED[0][0, n : n + keep]) < 2e-4
        for state in (states[0], states[2]):
            assert state.view().size <= WINDOW + state.align
            assert state.nbytes <= state.capacity * 2 * (32 + 32) * 4
        done += keep
