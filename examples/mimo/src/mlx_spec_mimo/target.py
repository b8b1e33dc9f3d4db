"""MiMo as a Target: mlx-lm 0.32 `models/mimo.py`, module by module, with one more tap.

The head reads the hidden state *before* the final norm, which mlx-lm's trunk does not hand out, so `forward`
walks the same modules in the same order; logits are byte for byte those of the whole module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlx_lm.models.base import create_attention_mask

from mlx_spec import GenericTarget, Verification

if TYPE_CHECKING:
    import mlx.core as mx

    from mlx_spec.state import StateGroup

TAP = "hidden_pre"
"""Name of the tap before the final norm, (B, L, D)."""


class MimoTarget(GenericTarget):
    """A MiMo language model: what core's target over mlx-lm offers, and the tap `hidden_pre`."""

    tap_names = ("hidden", TAP)

    def forward(self, tokens: mx.array, states: StateGroup, taps: Sequence[str] = ()) -> Verification:
        """tokens (B, L) int32 -> logits (B, L, V); taps "hidden" (post-norm) and "hidden_pre" (B, L, D)."""
        trunk = self.model.model
        x = trunk.embed_tokens(tokens)
        mask = create_attention_mask(x, states[0])
        for layer, state in zip(trunk.layers, states, strict=True):
            x = layer(x, mask, state)
        hidden = trunk.norm(x)
        seen = {"hidden": hidden, TAP: x}
        return Verification(self.head(hidden), {name: seen[name] for name in taps})

    def embed(self, tokens: mx.array) -> mx.array:
        """tokens (...,) int32 -> (..., D)."""
        embedded: mx.array = self.model.model.embed_tokens(tokens)
        return embedded

    def head(self, hidden: mx.array) -> mx.array:
        """Post-norm hidden (..., D) -> logits (..., V)."""
        model = self.model
        logits: mx.array = model.lm_head(hidden) if "lm_head" in model else model.model.embed_tokens.as_linear(hidden)
        return logits
