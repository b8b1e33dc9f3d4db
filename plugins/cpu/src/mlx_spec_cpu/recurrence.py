"""Core's gated delta rule on the kernel."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import mlx.core as mx

from mlx_spec.gated_delta import GatedDelta, Owed

from .native import library
from .twins import FLOATS, Rule, swapper


class RowGatedDelta(GatedDelta):
    """GatedDelta in one operation for all steps, one for a replay, and one for both.

    The state has the bytes of the rule in plain mlx for equal deltas; sums over a key are added in another order.
    A replay alone reads and writes a whole state; on the way to the next steps it costs its arithmetic. A state that
    nobody else refers to is written in place.
    """

    resumes = True

    def __call__(
        self, q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """As GatedDelta: (y, state after the last step, delta)."""
        if any(a.dtype not in FLOATS for a in (q, k, v, beta)):
            return super().__call__(q, k, v, g, beta, state)
        return library().gated_delta(q, k, v, g.astype(mx.float32), beta, state)

    def replay(self, state: mx.array, k: mx.array, g: mx.array, delta: mx.array, keep: mx.array) -> mx.array:
        """As GatedDelta: the state after the first keep[b] steps of row b."""
        if k.dtype not in FLOATS:
            return super().replay(state, k, g, delta, keep)
        return library().replay_delta(state, k, g.astype(mx.float32), delta, keep.astype(mx.int32))

    def resume(
        self, owed: Owed, q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """As GatedDelta: (y, the state before the steps, delta)."""
        if any(a.dtype not in FLOATS for a in (q, k, v, beta, owed.k)):
            return super().resume(owed, q, k, v, g, beta)
        state, owed_k, owed_g, delta, keep = owed
        tape = owed_k, owed_g.astype(mx.float32), delta, keep.astype(mx.int32)
        return library().resume_delta(q, k, v, g.astype(mx.float32), beta, state, *tape)


RECURRENCE: tuple[Rule, ...] = ((GatedDelta, RowGatedDelta, lambda _: True),)
swap_gated_delta = swapper(RECURRENCE)
