"""Rows of an embedding table: the bytes that mlx's take and dequantize give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cpu_layers import PACKINGS, Packing, make_layer, raw

from mlx_spec import Kernel
from mlx_spec.testing import KernelContract
from mlx_spec_cpu import swap
from mlx_spec_cpu.operations import build_rows, rows_reference

DTYPES = [mx.float32, mx.bfloat16, mx.float16]
DENSE, Q4 = Packing("dense"), Packing("affine", 4, 64)


class TestContract(KernelContract):
    @pytest.fixture
    def kernel(self) -> Kernel:
        return Kernel("embedding", ("cpu",), "bitwise", build_rows, rows_reference)

    @pytest.fixture
    def arguments(self) -> Callable[[int, int], Any]:
        packed = make_layer(Packing("affine", 5, 32), mx.bfloat16, 19, 96).arguments
        table = [packed["weight"], packed["scales"], packed["biases"], "affine", 32, 5]
        return lambda rows, seed: [mx.random.randint(0, 19, (rows,), key=mx.random.key(seed)), *table]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_rows_have_mlx_bytes(library: Any, packing: Packing, dtype: mx.Dtype) -> None:
    table = make_layer(packing, dtype, 23, 128).arguments
    for indices in (mx.array([0, 22, 5, 5, -1, -23]), mx.array([[1, 2], [3, 4]], mx.uint32), mx.array([7], mx.int64)):
        for threads in (1, 3):
            library.set_threads(threads)
            ours, theirs = library.rows(indices, **table), rows_reference(indices, **table)
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and raw(ours) == raw(theirs)


@pytest.mark.parametrize("packing", [DENSE, Q4, Packing("mxfp4", 4, 32)], ids=str)
def test_layers_are_replaced_and_read_the_same(packing: Packing) -> None:
    old: Any = nn.Embedding(31, 64)
    if packing.mode != "dense":
        old = old.to_quantized(group_size=packing.group_size, bits=packing.bits, mode=packing.mode)
    new = swap(old)
    assert type(new).__name__ == f"Row{type(old).__name__}" and new["weight"] is old["weight"]
    tokens = mx.array([[3, 30, 0], [1, 1, 9]])
    assert new(tokens).dtype == old(tokens).dtype and raw(new(tokens)) == raw(old(tokens))
    assert raw(new(tokens.astype(mx.uint8))) == raw(old(tokens.astype(mx.uint8)))


@pytest.mark.parametrize("packing", [DENSE, Q4], ids=str)
def test_strided_tables_and_indices(library: Any, packing: Packing) -> None:
    table = make_layer(packing, mx.bfloat16, 40, 128).arguments
    part = {k: v[3:30:2] if isinstance(v, mx.array) else v for k, v in table.items()}
    indices = mx.arange(14)[::-3]
    assert raw(library.rows(indices, **part)) == raw(library.rows(indices * 2 + 3, **table))
    assert raw(library.rows(mx.broadcast_to(mx.array([4]), (3, 2)), **table)) == raw(
        library.rows(mx.array([[4, 4]] * 3), **table)
    )


def test_nothing_and_what_does_not_exist(library: Any) -> None:
    table = make_layer(Q4, mx.float16, 9, 64).arguments
    none = library.rows(mx.zeros((0,), mx.int32), **table)
    mx.eval(none)
    assert none.shape == (0, 64)
    wrong = library.rows(mx.array([8, 9, -10, 2_000_000_000]), **table)
    assert np.isnan(np.array(wrong)).all(axis=1).tolist() == [False, True, True, True]
    assert mx.isnan(library.rows(mx.array([5], mx.uint32), mx.ones((5, 3)))).all().item()


@pytest.mark.parametrize(
    "message, call",
    [
        ("indices: found float32, expected int32", lambda lib: lib.rows(mx.zeros((2,)), mx.ones((3, 4)))),
        (r"weights: found shape \(4\), expected 2 axes", lambda lib: lib.rows(mx.arange(2), mx.ones((4,)))),
        ("weights: found int32, expected", lambda lib: lib.rows(mx.arange(2), mx.ones((3, 4), mx.int32))),
        ("bits of affine", lambda lib: lib.rows(mx.arange(2), mx.ones((3, 4), mx.uint32), mode="affine")),
        (
            "scales: found none",
            lambda lib: lib.rows(mx.arange(2), mx.ones((3, 8), mx.uint32), mode="affine", bits=4, group_size=64),
        ),
    ],
)
def test_what_is_no_table_is_refused(library: Any, message: str, call: Any) -> None:
    with pytest.raises(ValueError, match=message):
        call(library)
