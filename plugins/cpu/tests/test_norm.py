"""RMSNorm: rows of any block, close to mlx's own, rounded where mlx rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from cpu_layers import raw

from mlx_spec import Kernel
from mlx_spec.testing import KernelContract
from mlx_spec_cpu.native import library as load
from mlx_spec_cpu.operations import build_rms_norm, rms_norm_reference

DTYPES = [mx.float32, mx.bfloat16, mx.float16]


class TestContract(KernelContract):
    @pytest.fixture
    def kernel(self) -> Kernel:
        return Kernel("rms-norm", ("cpu",), "1e-5", build_rms_norm, rms_norm_reference)

    @pytest.fixture
    def arguments(self) -> Callable[[int, int], Any]:
        def make(rows: int, seed: int) -> list[Any]:
            key = mx.random.key(seed)
            return [mx.random.normal((rows, 77), key=key), mx.random.normal((77,), key=key), 1e-5]

        return make


@pytest.mark.parametrize("kernels", load().kernel_names().split(","))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [1, 15, 16, 33, 256])
def test_rows_alone_and_together(library: Any, D: int, dtype: mx.Dtype, kernels: str) -> None:
    assert library.use_kernels(kernels)
    x = (mx.random.normal((9, 5, D), key=mx.random.key(1)) * 3).astype(dtype)
    weight = mx.random.normal((D,), key=mx.random.key(2)).astype(dtype)
    for given in (weight, None):
        y = library.rms_norm(x, given, 1e-6)
        theirs = mx.fast.rms_norm(x, given, 1e-6)
        assert y.dtype == theirs.dtype and y.shape == theirs.shape
        ulp = {mx.float32: 1e-6, mx.bfloat16: 2e-2, mx.float16: 2e-3}[dtype]
        gap = mx.abs(y.astype(mx.float32) - theirs.astype(mx.float32))
        assert (gap <= ulp * (1e-3 + mx.abs(theirs.astype(mx.float32)))).all().item()
        for i in range(9):
            for j in range(5):
                assert raw(y[i, j]) == raw(library.rms_norm(x[i, j][None], given, 1e-6)[0])


def test_strides_dtypes_and_nothing(library: Any) -> None:
    x = mx.random.normal((6, 4, 40))
    view = x.swapaxes(0, 1)[:, ::2, 1:39:2]
    tidy = mx.contiguous(view)
    assert raw(library.rms_norm(view, None, 1e-6)) == raw(library.rms_norm(tidy, None, 1e-6))
    assert library.rms_norm(mx.zeros((0, 8)), None, 1e-6).shape == (0, 8)
    mixed = library.rms_norm(x.astype(mx.bfloat16), mx.ones((40,)), 1e-6)
    assert mixed.dtype == mx.fast.rms_norm(x.astype(mx.bfloat16), mx.ones((40,)), 1e-6).dtype
    assert mx.isnan(library.rms_norm(mx.array([[1.0, float("nan")], [1.0, 2.0]]), None, 1e-6)).tolist() == [
        [True, True],
        [False, False],
    ]


def test_a_weight_of_another_size_is_refused(library: Any) -> None:
    with pytest.raises(ValueError, match=r"norm weight: found .*\(7\).*, expected floats of shape \(8,\)"):
        library.rms_norm(mx.zeros((2, 8)), mx.zeros((7,)), 1e-6)
