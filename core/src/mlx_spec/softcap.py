"""The soft cap of logits, as a module, so that a plugin's kernel can take its place."""

# mypy: disable-error-code="misc, untyped-decorator"
# mlx.nn is untyped to mypy.

from __future__ import annotations

from functools import partial

import mlx.core as mx
import mlx.nn as nn


class SoftCap(nn.Module):
    """Logits kept between -cap and cap, in plain MLX operations compiled as mlx-lm compiles them.

    Attributes:
        cap: the largest magnitude.
    """

    def __init__(self, cap: float):
        super().__init__()
        self.cap = cap

    def __call__(self, logits: mx.array) -> mx.array:
        """Logits (..., V) -> cap * tanh(logits / cap) (..., V), every operation rounded to their dtype."""
        return _capped(self.cap, logits)


@partial(mx.compile, shapeless=True)
def _capped(cap: float, logits: mx.array) -> mx.array:
    return mx.tanh(logits / cap) * cap


__all__ = ["SoftCap"]
