"""The gated delta rule, one step after the other, with a tape from which any prefix can be run again.

    step t:  S <- g_t S;  delta_t = beta_t (v_t - S k_t);  S <- S + delta_t k_t^T;  y_t = S q_t

Letters: B rows, L steps, Hk and Hv key and value heads, Dk and Dv their widths; value head h reads key head
h // (Hv / Hk). S is (B, Hv, Dv, Dk) in float32.

`GatedDelta` is a module without parameters, so that a plugin's kernel can take its place as it takes that of
a linear layer. Everything that runs the rule (prefill, decode, verify, replay) goes through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

BURST = 64
"""Steps after which a long run is started: building the graph and computing it overlap, memory stays bounded."""


class Owed(NamedTuple):
    """Steps to run again from `state`, row b the first keep[b]: the arguments of `GatedDelta.replay`."""

    state: mx.array
    k: mx.array
    g: mx.array
    delta: mx.array
    keep: mx.array


class GatedDelta(nn.Module):  # type: ignore[misc]  # mlx.nn is untyped
    """The rule in plain MLX operations.

    Row t has the bytes it has when the steps are run one by one, on every device: no operation sees more than
    one step. Each element of S is updated by two products and a sum, rounded one by one and never fused, here
    and in every implementation: so a tape can be replayed by another one, or after a way through a file.

    Attributes:
        resumes: whether `resume` costs less than `replay` and a call: then kept steps of a tape are left to it.
    """

    resumes = False

    def __call__(
        self, q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Run L steps from `state`; returns (y, state after the last step, delta).

        Args:
            q, k: (B, L, Hk, Dk), normalised, the readout scale in q.
            v: (B, L, Hv, Dv).
            g: (B, L, Hv) float32, the decay exp(...) in (0, 1].
            beta: (B, L, Hv).
            state: (B, Hv, Dv, Dk) float32.

        y is (B, L, Hv, Dv) in v's dtype; delta, what each step added along its key, (B, L, Hv, Dv) float32.
        """
        groups = v.shape[2] // k.shape[2]
        queries, keys = _keys(q, groups), _keys(k, groups)
        values, rates = _steps(v[..., None]), _steps(beta[..., None, None])
        decays = _steps(g[..., None, None])
        outputs, deltas = [], []
        for t, (q_t, k_t, v_t, b_t, g_t) in enumerate(zip(queries, keys, values, rates, decays, strict=True)):
            state = state * g_t
            delta = (v_t - (state * k_t).sum(-1, keepdims=True)) * b_t
            state = state + k_t * delta
            outputs.append((state * q_t).sum(-1, keepdims=True))
            deltas.append(delta)
            if t % BURST == BURST - 1:
                mx.async_eval(state)
        return _joined(outputs).astype(v.dtype), state, _joined(deltas)

    def replay(self, state: mx.array, k: mx.array, g: mx.array, delta: mx.array, keep: mx.array) -> mx.array:
        """`state` after the first keep[b] steps of row b: the bytes that running only those would have left.

        Args:
            state: (B, Hv, Dv, Dk) float32, before the first step.
            k, g, delta: as they were given to, and came from, the run.
            keep: (B,) int32, each from 0 to L.
        """
        counts: list[int] = keep.tolist()  # type: ignore[assignment]
        keys = _keys(k, delta.shape[2] // k.shape[2])
        decays, deltas = _steps(g[..., None, None]), _steps(delta[..., None])
        for t in range(max(counts)):
            after = state * decays[t] + keys[t] * deltas[t]
            state = after if min(counts) > t else mx.where((keep > t)[:, None, None, None], after, state)
        return state

    def resume(
        self, owed: Owed, q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Pay what is owed, then run L steps; returns (y, state before those steps, delta).

        The state after the steps is not returned: those kept of them are owed in turn. The bytes are those of
        `replay` and a call.
        """
        state = self.replay(*owed)
        y, _, delta = self(q, k, v, g, beta, state)
        return y, state, delta


def _keys(x: mx.array, groups: int) -> Sequence[mx.array]:
    """(B, L, Hk, Dk) -> one (B, Hv, 1, Dk) float32 per step."""
    return _steps((mx.repeat(x, groups, axis=2) if groups > 1 else x)[..., None, :])


def _steps(x: mx.array) -> Sequence[mx.array]:
    """(B, L, ...) -> L arrays (B, ...) float32."""
    x = x.astype(mx.float32)
    return [x.squeeze(1)] if x.shape[1] == 1 else [x[:, t] for t in range(x.shape[1])]


def _joined(steps: Sequence[mx.array]) -> mx.array:
    """L arrays (B, Hv, Dv, 1) -> (B, L, Hv, Dv)."""
    return (steps[0][:, None] if len(steps) == 1 else mx.stack(steps, axis=1)).squeeze(-1)


__all__ = ["GatedDelta", "Owed"]
