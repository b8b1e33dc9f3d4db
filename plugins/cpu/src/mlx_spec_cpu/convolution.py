"""The short convolution along each channel that recurrent layers begin with."""

# mypy: disable-error-code="misc, no-any-return"
# mlx.nn is untyped to mypy: its classes and calls are Any.

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .native import library
from .twins import FLOATS, Rule, swapper


class RowConv1d(nn.Conv1d):
    """nn.Conv1d in which every channel has its own taps, no padding and no steps left out."""

    def __call__(self, x: mx.array) -> mx.array:
        """x (B, T, C) -> (B, T - K + 1, C)."""
        weight = self["weight"]
        if x.ndim != 3 or x.dtype != weight.dtype or x.dtype not in FLOATS or x.shape[1] < weight.shape[1]:
            return super().__call__(x)
        return library().short_convolution(x, _taps(self, weight), self.get("bias"))


def _taps(layer: Any, weight: mx.array) -> mx.array:
    """The weights (C, K, 1) as (K, C), turned once for each weight that the layer is given."""
    known, taps = layer.__dict__.get("taps", (None, None))
    if known is not weight:
        taps = mx.contiguous(weight.squeeze(-1).T)
        mx.eval(taps)
        layer.__dict__["taps"] = (weight, taps)
    return taps


def _own_taps(layer: Any) -> bool:
    """Whether it is such a convolution."""
    channels, _, shared = layer["weight"].shape
    plain = (layer.stride, layer.padding, layer.dilation) == (1, 0, 1)
    bias = layer.get("bias")
    alike = bias is None or bias.dtype == layer["weight"].dtype
    return plain and alike and shared == 1 and layer.groups == channels and layer["weight"].dtype in FLOATS


CONVOLUTION: tuple[Rule, ...] = ((nn.Conv1d, RowConv1d, _own_taps),)
swap_convolution = swapper(CONVOLUTION)
