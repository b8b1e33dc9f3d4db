"""Random arguments of the gated delta rule."""

from __future__ import annotations

import mlx.core as mx


def inputs(shape, steps, dtype=mx.float32, seed=0):
    """q, k, v, g, beta, state of `steps` steps; q and k of unit length, in `dtype` but for g and state."""
    B, Hk, Hv, Dk, Dv = shape
    keys = mx.random.split(mx.random.key(seed), 6)
    q, k = (mx.random.normal((B, steps, Hk, Dk), key=key) for key in keys[:2])
    q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = mx.random.normal((B, steps, Hv, Dv), key=keys[2])
    g = mx.random.uniform(0.3, 1.0, (B, steps, Hv), key=keys[3])
    beta = mx.random.uniform(0.0, 1.0, (B, steps, Hv), key=keys[4])
    state = mx.random.normal((B, Hv, Dv, Dk), key=keys[5])
    return q.astype(dtype), k.astype(dtype), v.astype(dtype), g, beta.astype(dtype), state
