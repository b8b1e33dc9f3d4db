"""The soft cap of logits, as a module, so that a plugin's kernel can take its place."""

# mypy: disable-error-code="misc, no-any-return"
# mlx.nn and mlx-lm are untyped to mypy.

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gemma4_text import logit_softcap


class SoftCap(nn.Module):
    """Logits kept between -cap and cap, by mlx-lm's own function.

    Attributes:
        cap: the largest magnitude.
    """

    def __init__(self, cap: float):
        super().__init__()
        self.cap = cap

    def __call__(self, logits: mx.array) -> mx.array:
        """Logits (..., V) -> cap * tanh(logits / cap) (..., V), every operation rounded to their dtype."""
        return logit_softcap(self.cap, logits)


__all__ = ["SoftCap"]
