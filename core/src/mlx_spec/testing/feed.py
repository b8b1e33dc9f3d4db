"""What a state is fed with when it is tested by itself: what its layer would append, by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from ..models import Target
    from ..state import DeltaState, State, StateGroup

Feed = Callable[[Any, mx.array], mx.array]  # (state group, tokens (B, L)) -> what comes out (B, L, ...)


class Attention:
    """Feeds attention states: K, V and queries by token id, so batch size and width change nothing.

    Args:
        heads: K/V heads; twice as many query heads.
        key_width, value_width: Dk, Dv; multiples of 32 for quantised states.
    """

    def __init__(self, heads: int = 2, key_width: int = 32, value_width: int = 64, vocab_size: int = 64, seed: int = 0):
        keys = mx.random.split(mx.random.key(seed), 3)
        shapes = ((heads, key_width), (heads, value_width), (2 * heads, key_width))
        self.tables = [mx.random.normal((vocab_size, *shape), key=key) for shape, key in zip(shapes, keys, strict=True)]
        self.vocab_size = vocab_size

    def __call__(self, states: Sequence[State], tokens: mx.array) -> mx.array:
        """Append tokens (B, L) to every state of the group; what they attend to, (B, L, layers, H, Dv)."""
        from mlx_lm.models.base import scaled_dot_product_attention

        out = []
        for state in states:
            mask = state.make_mask(tokens.shape[1])
            keys, values, queries = (table[tokens].swapaxes(1, 2) for table in self.tables)
            held = state.update_and_fetch(keys, values)
            cache = state if hasattr(state, "bits") else None
            scale = keys.shape[-1] ** -0.5
            out.append(scaled_dot_product_attention(queries, *held, cache=cache, scale=scale, mask=mask))
        return mx.stack(out, axis=1).transpose(0, 3, 1, 2, 4)


class GatedDeltas:
    """Feeds `DeltaState`s: a convolution and the gated delta rule over rows by token id.

    Nothing but the state ties one row to the next, so batch size and width change nothing.

    Args:
        key_heads, value_heads: Hk, Hv; value_heads a multiple of key_heads.
        key_width, value_width: Dk, Dv.
        kernel: K, width of the convolution.
    """

    def __init__(
        self,
        key_heads: int = 2,
        value_heads: int = 6,
        key_width: int = 32,
        value_width: int = 24,
        kernel: int = 4,
        vocab_size: int = 64,
        seed: int = 0,
    ):
        from ..gated_delta import GatedDelta

        self.shape = (value_heads, value_width, key_width)
        self.key_dim, self.vocab_size, self.rule = key_heads * key_width, vocab_size, GatedDelta()
        channels = 2 * self.key_dim + value_heads * value_width
        keys = mx.random.split(mx.random.key(seed), 4)
        self.rows = mx.random.normal((vocab_size, channels), key=keys[0])
        self.taps = 0.5 * mx.random.normal((kernel, channels), key=keys[1])
        self.decay = mx.random.uniform(0.5, 1.0, (vocab_size, value_heads), key=keys[2])
        self.rate = mx.random.uniform(0.0, 1.0, (vocab_size, value_heads), key=keys[3])

    def __call__(self, states: Sequence[DeltaState], tokens: mx.array) -> mx.array:
        """Append tokens (B, L) to every state of the group; what they read, (B, L, layers, Hv, Dv)."""
        from ..state.delta import Steps

        (Hv, Dv, Dk), (B, L) = self.shape, tokens.shape
        out = []
        for state in states:
            rows = self.rows[tokens]
            joined = state.joined(rows, len(self.taps) - 1)
            mixed = sum(self.taps[j] * joined[:, j : j + L] for j in range(len(self.taps)))
            q, k, v = mx.split(mixed, [self.key_dim, 2 * self.key_dim], axis=-1)
            q, k = (_unit(x.reshape(B, L, -1, Dk)) for x in (q, k))
            g, beta = self.decay[tokens], self.rate[tokens]
            start = state.recurrent((B, Hv, Dv, Dk))
            y, after, delta = self.rule(q, k, v.reshape(B, L, Hv, Dv), g, beta, start)
            state.append(after, Steps(joined, k, g, delta), self.rule)
            out.append(y)
        return mx.stack(out, axis=2)


def _unit(x: mx.array) -> mx.array:
    return x * mx.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6)


class Forward:
    """Feeds the states of a target with its own forward; logits come out."""

    def __init__(self, target: Target):
        self.target, self.vocab_size = target, target.vocab_size

    def __call__(self, states: StateGroup, tokens: mx.array) -> mx.array:
        """Run tokens (B, L); logits (B, L, V)."""
        return self.target.forward(tokens, states).logits
