"""Weights of every layout, and what a row must give: shared by the tests of the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_spec_cpu.recipe import Recipe


@dataclass(frozen=True)
class Packing:
    """How weights are stored: mode, bits and group size ("dense", 0, 0 for plain ones)."""

    mode: str
    bits: int = 0
    group_size: int = 0

    def __str__(self) -> str:
        return f"{self.mode}{self.bits}g{self.group_size}" if self.bits else self.mode


PACKINGS = [
    Packing("dense"),
    *(Packing("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)),
    Packing("mxfp4", 4, 32),
    Packing("nvfp4", 4, 16),
]


@dataclass
class Layer:
    """Arguments of a linear call, and the weights (N, K) they stand for in float64."""

    arguments: dict[str, Any]
    exact: np.ndarray


def make_layer(packing: Packing, dtype: mx.Dtype, N: int, K: int, seed: int = 0) -> Layer:
    """Random weights in a layout."""
    weight = mx.random.normal((N, K), key=mx.random.key(seed)).astype(dtype)
    if packing.mode == "dense":
        return Layer({"weight": weight}, as_float64(weight))
    options = {"mode": packing.mode, "bits": packing.bits, "group_size": packing.group_size}
    words, scales, *biases = mx.quantize(weight, **options)
    affine = [a.astype(mx.float32) for a in (scales, *biases)] if biases else [scales]
    exact = mx.dequantize(words, *affine, **options, dtype=mx.float32)
    return Layer(
        {"weight": words, "scales": scales, "biases": biases[0] if biases else None, **options}, as_float64(exact)
    )


def as_float64(a: mx.array) -> np.ndarray:
    return np.array(a.astype(mx.float32)).astype(np.float64)


def raw(a: mx.array) -> bytes:
    """Bytes of an array."""
    return np.array(a if a.dtype == mx.float32 else a.view(mx.uint16)).tobytes()


def refusal(build: Callable[[Recipe], Any]) -> str:
    """What the library says to a recipe that it does not take."""
    recipe = Recipe()
    build(recipe)
    with pytest.raises(ValueError, match=", expected ") as refused:
        recipe.build(mx.float32)
    return str(refused.value)


class Twice(nn.Module):
    """Another layer, times two: a part that no kernel knows."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array) -> mx.array:
        return self.inner(x) * 2
