"""What a state is fed with when it is tested by itself: attention, keys and values by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from ..models import Target
    from ..state import State, StateGroup

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


class Forward:
    """Feeds the states of a target with its own forward; logits come out."""

    def __init__(self, target: Target):
        self.target, self.vocab_size = target, target.vocab_size

    def __call__(self, states: StateGroup, tokens: mx.array) -> mx.array:
        """Run tokens (B, L); logits (B, L, V)."""
        return self.target.forward(tokens, states).logits
