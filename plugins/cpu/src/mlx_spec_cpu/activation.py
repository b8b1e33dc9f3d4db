"""Activations between linear layers on the kernel: SiLU and tanh-GELU, with what they gate."""

# mypy: disable-error-code="misc, no-any-return"
# mlx.nn is untyped to mypy: its classes and calls are Any.

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations, gemma3_text, gemma4_text

from .native import library
from .twins import FLOATS, Rule, caller, calling, swapper


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x, as mlx-lm's function."""
    return library().activation(gate, x) if _taken(gate, x) else activations.swiglu(gate, x)


def precise_swiglu(h: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x in float32, rounded once to h's dtype, as mlx-lm's function."""
    if not _taken(gate, x) or h.dtype not in FLOATS:
        return activations.precise_swiglu(h, gate, x)
    return library().precise_activation(gate, x, "silu", h)


def geglu(gate: mx.array, x: mx.array) -> mx.array:
    """gelu_approx(gate) * x, as mlx-lm's function of Gemma 4."""
    return library().activation(gate, x, "gelu-tanh") if _taken(gate, x) else gemma4_text.geglu(gate, x)


class RowSiLU(nn.SiLU):
    """nn.SiLU in one operation."""

    def __call__(self, x: mx.array) -> mx.array:
        """x (...) -> (...)."""
        return library().activation(x) if x.dtype in FLOATS else super().__call__(x)


class RowGemma3MLP(gemma3_text.MLP):
    """mlx-lm's feed-forward layer of Gemma 3."""

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., D) -> (..., D)."""
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x)))


def _taken(gate: mx.array, x: mx.array) -> bool:
    return gate.shape == x.shape and gate.dtype in FLOATS and x.dtype in FLOATS


ACTIVATION: tuple[Rule, ...] = (
    (nn.SiLU, RowSiLU, lambda _: True),
    (gemma3_text.MLP, RowGemma3MLP, lambda _: True),
)
MEANINGS = (
    ("swiglu", activations.swiglu, swiglu),
    ("precise_swiglu", activations.precise_swiglu, precise_swiglu),
    ("geglu", gemma4_text.geglu, geglu),
)
_by_type = swapper(ACTIVATION)


def swap_activation(module: nn.Module) -> nn.Module | None:
    """An activation, or a layer whose code calls one of mlx-lm's, on the kernel; None for others."""
    new = _by_type(module)
    return caller(module, MEANINGS) if new is None else new


def acting(kind: Any) -> type | None:
    """The subclass of a layer that runs the same code and means the functions here by their names."""
    return calling(kind, MEANINGS)
