"""Rotary positions of mlx and mlx-lm on the kernel: the same angles, turned in one operation."""

# mypy: disable-error-code="misc, no-any-return"
# mlx.nn is untyped to mypy: its classes and calls are Any.

from __future__ import annotations

import math
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import Llama3RoPE, ProportionalRoPE, SuScaledRoPE, YarnRoPE

from .native import library
from .twins import FLOATS, Rule, swapper


class RowRoPE(nn.RoPE):
    """nn.RoPE in one operation."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """x (B, ..., L, D), row l of batch b at position offset[b] + l -> the same shape."""
        if not _takes(x, offset):
            return super().__call__(x, offset)
        inverse = _inverse(self.dims, self.base)
        return library().rope(x, self.dims, self.traditional, self.scale, inverse, _int32(offset))


class RowLlama3RoPE(Llama3RoPE):
    """mlx-lm's Llama3RoPE."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """As RowRoPE."""
        return _by_wavelength(self, x, self.dims, offset) if _takes(x, offset) else super().__call__(x, offset)


class RowProportionalRoPE(ProportionalRoPE):
    """mlx-lm's ProportionalRoPE: wavelengths past the rotated part are infinite."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """As RowRoPE."""
        return _by_wavelength(self, x, self.dims, offset) if _takes(x, offset) else super().__call__(x, offset)


class RowSuScaledRoPE(SuScaledRoPE):
    """mlx-lm's SuScaledRoPE."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """As RowRoPE, over a scaled x."""
        if not _takes(x, offset):
            return super().__call__(x, offset)
        return _by_wavelength(self, x.at[..., : self.dim].multiply(self._scale), self.dim, offset)


class RowYarnRoPE(YarnRoPE):
    """mlx-lm's YarnRoPE."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0, scale: float = 1.0, inverse: bool = False) -> mx.array:
        """As RowRoPE, over a scaled x."""
        if scale != 1.0 or inverse or not _takes(x, offset):
            return super().__call__(x, offset, scale, inverse)
        if self.mscale != 1.0:
            x = x.at[..., : self.dims].multiply(self.mscale)
        return _by_wavelength(self, x, self.dims, offset)


def _takes(x: mx.array, offset: int | mx.array) -> bool:
    """Whether the kernel reads these: rows of floats, whole positions."""
    whole = not isinstance(offset, mx.array) or mx.issubdtype(offset.dtype, mx.integer)
    return x.ndim >= 3 and x.dtype in FLOATS and whole


def _int32(offset: int | mx.array) -> int | mx.array:
    return offset.astype(mx.int32) if isinstance(offset, mx.array) else offset


def rotation(layer: Any) -> tuple[int, bool, float, mx.array] | None:
    """dims, neighbours, scale and inverse for the kernel; None for a layer that does more than rotate."""
    if type(layer) is RowRoPE:
        return layer.dims, layer.traditional, layer.scale, _inverse(layer.dims, layer.base)
    if type(layer) in (RowLlama3RoPE, RowProportionalRoPE):
        return layer.dims, getattr(layer, "traditional", False), 1.0, _inverse_wavelengths(layer)
    return None


def _by_wavelength(layer: Any, x: mx.array, dims: int, offset: int | mx.array) -> mx.array:
    """A layer that holds wavelengths (dims / 2,)."""
    inverse = _inverse_wavelengths(layer)
    return library().rope(x, dims, getattr(layer, "traditional", False), 1.0, inverse, _int32(offset))


def _inverse_wavelengths(layer: Any) -> mx.array:
    """Computed once for the wavelengths the layer holds."""
    wavelengths = layer._freqs
    known, inverse = layer.__dict__.get("inverse_wavelengths", (None, None))
    if known is not wavelengths:
        inverse = 1 / wavelengths
        mx.eval(inverse)
        layer.__dict__["inverse_wavelengths"] = (wavelengths, inverse)
    return inverse


@cache
def _inverse(dims: int, base: float) -> mx.array:
    """base ** (-i / (dims / 2)), by the operations of mlx's rope, so that angles have its bytes."""
    inverse = mx.exp(mx.arange(0, -(dims // 2), -1, dtype=mx.float32) * mx.array(math.log(base) / (dims // 2)))
    mx.eval(inverse)
    return inverse


def _known(layer: Any) -> bool:
    """Whether its dims are pairs; an odd number is for mlx to refuse."""
    return (layer.dim if isinstance(layer, SuScaledRoPE) else layer.dims) % 2 == 0


ROPE: tuple[Rule, ...] = (
    (nn.RoPE, RowRoPE, _known),
    (Llama3RoPE, RowLlama3RoPE, _known),
    (ProportionalRoPE, RowProportionalRoPE, _known),
    (SuScaledRoPE, RowSuScaledRoPE, _known),
    (YarnRoPE, RowYarnRoPE, _known),
)
swap_rope = swapper(ROPE)
