"""The short convolution: a position has the same bytes in a block as alone; close to float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cpu_layers import as_float64, raw

from mlx_spec import Kernel
from mlx_spec.testing import KernelContract
from mlx_spec_cpu import swap
from mlx_spec_cpu.native import library as load
from mlx_spec_cpu.operations import build_short_convolution, short_convolution_reference

SETS = load().kernel_names().split(",")
DTYPES = [mx.float32, mx.bfloat16, mx.float16]
TOLERANCE = {mx.float32: 1e-6, mx.bfloat16: 8e-3, mx.float16: 1e-3}


def made(B: int, T: int, C: int, K: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> list[mx.array]:
    shapes = ((B, T, C), (K, C), (C,))
    return [mx.random.normal(s, key=mx.random.key(seed + i)).astype(dtype) for i, s in enumerate(shapes)]


class TestContract(KernelContract):
    @pytest.fixture
    def kernel(self) -> Kernel:
        return Kernel("short-convolution", ("cpu",), "1e-5", build_short_convolution, short_convolution_reference)

    @pytest.fixture
    def arguments(self) -> Callable[[int, int], Any]:
        return lambda rows, seed: made(rows, 7, 21, 4, seed=seed)


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("C", "K"), [(96, 4), (33, 4), (5, 1), (4100, 3)])
def test_positions_of_a_block_are_positions_alone(library: Any, C: int, K: int, dtype: mx.Dtype, kernels: str) -> None:
    assert library.use_kernels(kernels)
    x, w, bias = made(2, 12 + K, C, K, dtype)
    for given in (None, bias):
        alone = [library.short_convolution(x[:, t : t + K], w, given) for t in range(13)]
        for threads in (1, 3):
            library.set_threads(threads)
            for L in (1, 2, 5, 13):
                y = library.short_convolution(x[:, : L + K - 1], w, given)
                assert y.dtype == dtype and raw(y) == raw(mx.concatenate(alone[:L], axis=1))
        want = sum(as_float64(w)[j] * as_float64(x)[:, j : j + 13] for j in range(K))
        want = want + (0 if given is None else as_float64(bias))
        assert np.abs(as_float64(y) - want).max() < TOLERANCE[dtype] * np.abs(want).max()


def test_strides_and_nothing(library: Any) -> None:
    x, w, bias = made(2, 9, 24, 4)
    want = library.short_convolution(x, w, bias)
    loose = mx.repeat(x, 2, axis=-1)[..., ::2]
    turned = mx.contiguous(x.swapaxes(1, 2)).swapaxes(1, 2)
    assert raw(library.short_convolution(loose, w.T.T, bias)) == raw(want)
    assert raw(library.short_convolution(turned, mx.contiguous(w.T).T, bias)) == raw(want)
    none = library.short_convolution(x[:0], w)
    mx.eval(none)
    assert none.shape == (0, 6, 24)


def test_nan_stays_where_it_is_read(library: Any) -> None:
    x, w, _ = made(1, 9, 24, 4)
    x[0, 4, 7] = math.nan
    bad = np.isnan(np.array(library.short_convolution(x, w)))
    assert bad[0, 1:5, 7].all() and bad.sum() == 4


@pytest.mark.parametrize(
    "message, change",
    [
        (r"rows: found float32 of shape \(9,24\)", {0: lambda a: a[0]}),
        (r"taps: found .*\(4,23\), expected float32 \(K, 24\), K from 1 to 9", {1: lambda a: a[:, 1:]}),
        (r"taps: found bfloat16", {1: lambda a: a.astype(mx.bfloat16)}),
        (r"taps: found .*, expected .* K from 1 to 3", {0: lambda a: a[:, :3]}),
        (r"bias: found .*\(23\)", {2: lambda a: a[1:]}),
    ],
)
def test_what_does_not_fit_is_refused(library: Any, message: str, change: dict[int, Any]) -> None:
    given = [change.get(i, lambda a: a)(a) for i, a in enumerate(made(2, 9, 24, 4))]
    with pytest.raises(ValueError, match=message):
        library.short_convolution(*given)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_replaced_and_follows_its_weight(bias: bool, dtype: mx.Dtype) -> None:
    old = nn.Conv1d(40, 40, 4, groups=40, bias=bias)
    old.set_dtype(dtype)
    new = swap(old)
    assert type(new).__name__ == "RowConv1d" and new["weight"] is old["weight"]
    x = mx.random.normal((2, 9, 40)).astype(dtype)
    for _ in range(2):
        assert new(x).dtype == dtype
        assert np.abs(as_float64(new(x)) - as_float64(old(x))).max() < TOLERANCE[dtype] * 4
        old.weight = new.weight = mx.random.normal((40, 4, 1)).astype(dtype)
    short = nn.Conv1d(40, 40, 4, groups=40)
    with pytest.raises(ValueError):  # mlx's own refusal
        mx.eval(swap(short)(x[:, :3].astype(mx.float32)))


@pytest.mark.parametrize(
    "options", [{"groups": 4}, {"groups": 8, "stride": 2}, {"groups": 8, "padding": 1}, {"groups": 8, "dilation": 2}]
)
def test_other_convolutions_stay(options: dict[str, int]) -> None:
    assert type(swap(nn.Conv1d(8, 8, 3, **options))) is nn.Conv1d
