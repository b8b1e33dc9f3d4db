"""The soft cap of logits: mlx's own values where few can be stored, close to exact elsewhere."""

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
from mlx_spec.softcap import SoftCap
from mlx_spec.testing import KernelContract
from mlx_spec_cpu.choice import RowSoftCap, swap_cap
from mlx_spec_cpu.native import library as load
from mlx_spec_cpu.operations import build_soft_cap, soft_cap_reference

SETS = load().kernel_names().split(",")
DTYPES = [mx.float32, mx.bfloat16, mx.float16]


class TestContract(KernelContract):
    @pytest.fixture
    def kernel(self) -> Kernel:
        return Kernel("soft-cap", ("cpu",), "1e-5", build_soft_cap, soft_cap_reference)

    @pytest.fixture
    def arguments(self) -> Callable[[int, int], Any]:
        return lambda rows, seed: [40 * mx.random.normal((rows, 37), key=mx.random.key(seed)), 30.0]


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("cap", [30.0, 15.3, 1.0])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_every_stored_value_is_that_of_mlx(library: Any, dtype: mx.Dtype, cap: float, kernels: str) -> None:
    assert library.use_kernels(kernels)
    x = mx.arange(65536).astype(mx.uint16).view(dtype)
    ours, theirs = library.soft_cap(x, cap), soft_cap_reference(x, cap)
    assert ours.dtype == dtype and mx.array_equal(ours, theirs, equal_nan=True).item()


@pytest.mark.parametrize("kernels", SETS)
def test_floats_are_close_to_exact(library: Any, kernels: str) -> None:
    assert library.use_kernels(kernels)
    for spread in (1e-20, 1e-3, 0.5, 1.0, 4.0, 300.0, 1e20):
        x = spread * mx.random.normal((4001,), key=mx.random.key(3))
        want = 30.0 * np.tanh(as_float64(x) / 30.0)
        assert (np.abs(as_float64(library.soft_cap(x, 30.0)) - want) <= 4 * 2**-23 * np.abs(want)).all()


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 15, 33, 4001, 13001])
def test_an_element_is_the_same_anywhere(library: Any, vocab: int, dtype: mx.Dtype, kernels: str) -> None:
    assert library.use_kernels(kernels)
    x = (20 * mx.random.normal((3, vocab), key=mx.random.key(vocab))).astype(dtype)
    want = library.soft_cap(x, 30.0)
    for threads in (1, 3):
        library.set_threads(threads)
        assert [raw(library.soft_cap(row, 30.0)) for row in x] == [raw(row) for row in want]
        turned = mx.contiguous(x.T).T  # columns side by side
        assert raw(library.soft_cap(turned, 30.0)) == raw(want)
    limits = library.soft_cap(mx.array([math.inf, -math.inf, math.nan, 0.0], dtype), 30.0).tolist()
    assert limits[:2] == [30.0, -30.0] and math.isnan(limits[2]) and limits[3] == 0.0


def test_core_calls_it_where_it_is_put(library: Any) -> None:
    module = swap_cap(SoftCap(30.0))
    assert type(module) is RowSoftCap and swap_cap(module) is None and swap_cap(nn.GELU()) is None
    x = mx.random.normal((5, 70))
    assert raw(module(x)) == raw(library.soft_cap(x, 30.0))
    assert module(x.astype(mx.int32)).dtype == SoftCap(30.0)(x.astype(mx.int32)).dtype
    with pytest.raises(ValueError, match="logits: found int32, expected float32, float16 or bfloat16"):
        library.soft_cap(x.astype(mx.int32), 30.0)
