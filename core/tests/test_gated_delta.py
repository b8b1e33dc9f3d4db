"""The gated delta rule: rows by themselves, mlx-lm's bytes, replay, and float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from delta_inputs import inputs
from mlx_lm.models.gated_delta import gated_delta_ops

from mlx_spec.gated_delta import GatedDelta
from mlx_spec.testing.watch import same_bytes

SHAPES = [(1, 2, 4, 32, 16), (3, 2, 6, 24, 40), (2, 3, 3, 8, 8)]  # B, Hk, Hv, Dk, Dv
rule = GatedDelta()


def in_float64(q, k, v, g, beta, state):
    """(y, state, delta) by the definition, one head of one row at a time."""
    q, k, v, g, beta, state = (np.array(x.astype(mx.float32)).astype(np.float64) for x in (q, k, v, g, beta, state))
    B, L, Hv, _ = v.shape
    y, delta = np.zeros_like(v), np.zeros_like(v)
    for b in range(B):
        for h in range(Hv):
            S, source = state[b, h], h // (Hv // k.shape[2])
            for t in range(L):
                S = g[b, t, h] * S
                delta[b, t, h] = beta[b, t, h] * (v[b, t, h] - S @ k[b, t, source])
                S = S + np.outer(delta[b, t, h], k[b, t, source])
                y[b, t, h] = S @ q[b, t, source]
            state[b, h] = S
    return y, state, delta


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_computes_the_rule(shape):
    given = inputs(shape, 9)
    for found, expected in zip(rule(*given), in_float64(*given), strict=True):
        assert found.shape == expected.shape
        np.testing.assert_allclose(np.array(found), expected, atol=2e-5)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_has_the_bytes_of_mlx_lm(shape, dtype):
    q, k, v, g, beta, state = inputs(shape, 5, dtype)
    y, after, delta = rule(q, k, v, g, beta, state)
    expected = gated_delta_ops(q, k, v, g, beta, state)
    assert same_bytes(y, expected[0]) and same_bytes(after, expected[1])
    assert y.dtype == dtype and after.dtype == delta.dtype == mx.float32


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("steps", [2, 5, 16, 130])
def test_a_row_has_the_bytes_it_has_alone(steps, dtype):
    for shape in SHAPES:
        q, k, v, g, beta, state = inputs(shape, steps, dtype)
        y, after, delta = rule(q, k, v, g, beta, state)
        for t in range(steps):
            one, state, left = rule(*(x[:, t : t + 1] for x in (q, k, v, g, beta)), state)
            assert same_bytes(one, y[:, t : t + 1]) and same_bytes(left, delta[:, t : t + 1])
        assert same_bytes(state, after)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_replay_leaves_what_running_the_kept_steps_leaves(dtype):
    q, k, v, g, beta, state = inputs(SHAPES[1], 6, dtype)
    _, _, delta = rule(q, k, v, g, beta, state)
    for keep in ([0, 0, 0], [6, 6, 6], [1, 0, 6], [5, 2, 3], [4, 4, 4]):
        found = rule.replay(state, k, g, delta, mx.array(keep, dtype=mx.int32))
        for b, n in enumerate(keep):
            row = [x[b : b + 1, :n] for x in (q, k, v, g, beta)]
            expected = rule(*row, state[b : b + 1])[1] if n else state[b : b + 1]
            assert same_bytes(found[b : b + 1], expected), (keep, b)
