"""Rotary positions: the bytes of mlx's own, whatever the block, the offsets and the layout of what is turned."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cpu_layers import as_float64, raw
from mlx_lm.models.rope_utils import initialize_rope

from mlx_spec import Kernel
from mlx_spec.testing import KernelContract
from mlx_spec_cpu import rope, swap
from mlx_spec_cpu.native import library as load
from mlx_spec_cpu.operations import build_rope, rope_reference

SETS = load().kernel_names().split(",")
DTYPES = [mx.float32, mx.bfloat16, mx.float16]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {
    "original_max_position_embeddings": 512,
    "short_factor": [1.0] * 12,
    "long_factor": [1.5 + i for i in range(12)],
}
SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "linear", "factor": 3.0},
    LLAMA3,
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 0.5},
    {"rope_type": "longrope", **LONG},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
]


def layer(scaling: dict[str, Any] | None, dims: int = 24, traditional: bool = False) -> nn.Module:
    return initialize_rope(dims, 10_000.0, traditional, scaling, 2048)


def made(L: int, D: int = 40, dtype: mx.Dtype = mx.float32, batch: int = 2) -> mx.array:
    return (mx.random.normal((batch, 3, L, D), key=mx.random.key(L)) * 3).astype(dtype)


class TestContract(KernelContract):
    rows_axis = 0
    by_row = (0, 5)

    @pytest.fixture
    def kernel(self) -> Kernel:
        return Kernel("rope", ("cpu",), "1e-5", build_rope, rope_reference)

    @pytest.fixture
    def arguments(self) -> Callable[[int, int], Any]:
        inverse = mx.exp(mx.arange(0, -9, -1, dtype=mx.float32))
        return lambda rows, seed: [made(3, 22, batch=rows), 18, bool(seed % 2), 0.5, inverse, mx.arange(rows) * 7]


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("traditional", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize(("dims", "D"), [(40, 40), (24, 40), (2, 5), (256, 256), (0, 7)])
def test_every_row_has_mlx_bytes(
    library: Any, dims: int, D: int, traditional: bool, dtype: mx.Dtype, kernels: str
) -> None:
    assert library.use_kernels(kernels)
    old = nn.RoPE(dims, traditional, base=500_000.0) if dims else nn.RoPE(2)
    new = swap(old)
    x = made(11, D, dtype)
    if not dims:  # nothing to turn
        assert raw(library.rope(x, 0, traditional, 1.0, mx.zeros((0,)), 5)) == raw(x)
        return
    for offset in (0, 31, 4095, 1_000_003, 20_000_000, mx.array([3, 70_000]), mx.array(12)):
        theirs = old(x, offset=offset)
        for threads in (1, 3):
            library.set_threads(threads)
            ours = new(x, offset=offset)
            assert ours.dtype == dtype and equal(ours, theirs)
        for r in range(11):
            assert raw(new(x[:, :, r : r + 1], offset=offset + r)) == raw(ours[:, :, r : r + 1])


def equal(ours: mx.array, theirs: mx.array) -> bool:
    """The same bytes; on a Mac mlx rounds its sines in another order."""
    if sys.platform != "darwin":
        return raw(ours) == raw(theirs)
    return bool(np.allclose(as_float64(ours), as_float64(theirs), atol=2e-2))


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"] if s else "plain")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_scaled_kinds_of_mlx_lm(scaling: dict[str, Any] | None, dtype: mx.Dtype) -> None:
    old = layer(scaling)
    new = swap(old)
    assert type(new).__name__ == f"Row{type(old).__name__}" and isinstance(new, type(old))
    x = made(5, dtype=dtype)
    for offset in (0, 9, mx.array([4, 800])):
        assert equal(new(x, offset=offset), old(x, offset=offset))
    assert equal(new(x), old(x))


def test_yarn_turned_back_is_mlx_lms_own() -> None:
    old = layer(SCALINGS[3])
    new, x = swap(old), made(4)
    assert raw(new(x, offset=3, inverse=True)) == raw(old(x, offset=3, inverse=True))
    assert raw(new(x, offset=3, scale=0.5)) == raw(old(x, offset=3, scale=0.5))


def test_angles_are_close_to_exact_ones(library: Any) -> None:
    inverse = mx.array([1.0, 0.1, 1e-3, 0.7], mx.float32)
    x = mx.ones((1, 1, 900, 8))
    y = as_float64(library.rope(x, 8, False, 1.0, inverse, 100))[0, 0]
    angles = (np.arange(900, dtype=np.float32)[:, None] + np.float32(100)) * np.array(inverse)
    angles = angles.astype(np.float64)
    want = np.concatenate([np.cos(angles) - np.sin(angles), np.cos(angles) + np.sin(angles)], axis=1)
    assert np.abs(y - want).max() < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_axes_and_nothing(library: Any, dtype: mx.Dtype) -> None:
    new, old = swap(nn.RoPE(16)), nn.RoPE(16)
    big = made(9, 40, dtype)
    for view in (big.swapaxes(1, 2), big[..., ::2], big[:, :, 2:7, 5:], big[0], big[None], big[:, ::-1]):
        assert raw(new(view, offset=6)) == raw(old(view, offset=6))
    assert new(big[:, :, :0], offset=6).shape == (2, 3, 0, 40)
    assert new(big[:0], offset=6).shape == (0, 3, 9, 40)
    mx.eval(new(big[:, :, :0], offset=6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_stay_in_their_pair(dtype: mx.Dtype) -> None:
    x = made(3, 16, dtype)
    for value in (math.nan, math.inf, -math.inf, 6e4):
        x[0, 1, 2, 3] = value
        ours, theirs = swap(nn.RoPE(16))(x, offset=2), nn.RoPE(16)(x, offset=2)
        assert mx.array_equal(ours, theirs, equal_nan=True).item()


def test_what_the_kernel_does_not_read_goes_to_mlx() -> None:
    whole = mx.ones((1, 1, 2, 8), mx.int32).astype(mx.float32)
    assert mx.array_equal(swap(nn.RoPE(8))(whole, offset=mx.array([2], mx.int64)), nn.RoPE(8)(whole, offset=2)).item()
    assert type(swap(nn.RoPE(7))) is nn.RoPE
    assert rope.swap_rope(nn.Linear(2, 2)) is None


@pytest.mark.parametrize(
    "message, arguments",
    [
        (r"expected float32.*at least three axes", (mx.zeros((2, 8)), 8, False, 1.0, mx.zeros((4,)), 0)),
        (r"dims: found 10, expected an even number up to 8", (mx.zeros((1, 2, 8)), 10, False, 1.0, mx.zeros((5,)), 0)),
        (r"dims: found 3, expected", (mx.zeros((1, 2, 8)), 3, False, 1.0, mx.zeros((1,)), 0)),
        (r"inverse wavelengths: found .*\(3\), expected", (mx.zeros((1, 2, 8)), 8, False, 1.0, mx.zeros((3,)), 0)),
        (r"offset: found .*\(3\), expected int32", (mx.zeros((2, 2, 8)), 8, False, 1.0, mx.zeros((4,)), mx.arange(3))),
    ],
)
def test_what_does_not_fit_is_refused(library: Any, message: str, arguments: Any) -> None:
    with pytest.raises(ValueError, match=message):
        library.rope(*arguments)


def test_wavelengths_that_are_replaced_later_are_followed() -> None:
    """Alone, and in a recipe that asks for the layer's rotation again, as one does whose parts were replaced."""
    ours, x = swap(layer(LLAMA3)), made(5, 24)
    before, first = ours(x, 3), rope.rotation(ours)
    assert first is not None and rope.rotation(ours)[3] is first[3]  # computed once
    ours._freqs = ours._freqs * 2
    theirs = layer(LLAMA3)
    theirs._freqs = ours._freqs
    assert raw(ours(x, 3)) == raw(theirs(x, 3)) != raw(before)
    assert mx.array_equal(rope.rotation(ours)[3], first[3] / 2).item()
