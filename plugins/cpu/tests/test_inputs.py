"""What is handed in need not be tidy: strides, offsets, nothing at all, infinities; what cannot be is refused."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cpu_layers import PACKINGS, Packing, make_layer, raw

DENSE, Q4 = Packing("dense"), Packing("affine", 4, 64)


@pytest.mark.parametrize("packing", [DENSE, Q4, Packing("affine", 3, 32)], ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_strided_activations(library: Any, packing: Packing, dtype: mx.Dtype) -> None:
    layer = make_layer(packing, dtype, 13, 64)
    big = mx.random.normal((6, 5, 128), key=mx.random.key(3)).astype(dtype)
    views = {
        "every second column": big[:, :, ::2],
        "swapped axes": big[:, :, :64].swapaxes(0, 1),
        "columns from one on": big[:, :, 1:65],
        "backwards": big[::-1, :, :64],
        "one row for all": mx.broadcast_to(big[:1, :1, :64], (3, 4, 64)),
        "transposed": mx.random.normal((64, 7), key=mx.random.key(4)).astype(dtype).T,
    }
    for name, view in views.items():
        tidy = mx.array(np.array(view.astype(mx.float32))).astype(dtype)
        assert raw(library.linear(view, **layer.arguments)) == raw(library.linear(tidy, **layer.arguments)), name


@pytest.mark.parametrize("packing", [DENSE, Q4], ids=str)
def test_strided_and_misaligned_weights(library: Any, packing: Packing) -> None:
    layer = make_layer(packing, mx.bfloat16, 30, 128)
    x = mx.random.normal((3, 128)).astype(mx.bfloat16)
    whole = library.linear(x, **layer.arguments)
    for rows in (slice(1, 30), slice(0, 30, 3), slice(None, None, -1)):
        part = {k: v[rows] if isinstance(v, mx.array) else v for k, v in layer.arguments.items()}
        assert raw(library.linear(x, **part)) == raw(whole[:, rows])


def test_a_transposed_weight(library: Any) -> None:
    weight, x = mx.random.normal((40, 24)), mx.random.normal((2, 40))
    assert raw(library.linear(x, weight.T)) == raw(library.linear(x, mx.array(np.array(weight.T))))


@pytest.mark.parametrize("packing", [DENSE, Q4], ids=str)
def test_nothing_gives_nothing(library: Any, packing: Packing) -> None:
    layer = make_layer(packing, mx.float32, 8, 64)
    assert library.linear(mx.zeros((0, 64)), **layer.arguments).shape == (0, 8)
    assert library.linear(mx.zeros((2, 0, 64)), **layer.arguments).shape == (2, 0, 8)
    mx.eval(library.linear(mx.zeros((0, 64)), **layer.arguments))


def test_sums_over_nothing_are_the_bias(library: Any) -> None:
    assert library.linear(mx.zeros((2, 0)), mx.zeros((3, 0))).tolist() == [[0, 0, 0]] * 2
    assert library.linear(mx.zeros((9, 0)), mx.zeros((3, 0)), bias=mx.array([1.0, 2, 3])).tolist() == [[1, 2, 3]] * 9
    assert library.linear(mx.zeros((2, 5)), mx.zeros((0, 5))).shape == (2, 0)


def test_one_vector(library: Any) -> None:
    weight, x = mx.random.normal((7, 20)), mx.random.normal((20,))
    y = library.linear(x, weight)
    assert y.shape == (7,) and raw(y) == raw(library.linear(x[None], weight))


@pytest.mark.parametrize("rows", [1, 4, 12])
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_nan_and_infinity_stay_in_their_row(library: Any, packing: Packing, rows: int) -> None:
    layer = make_layer(packing, mx.float32, 11, 128)
    clean = mx.random.normal((rows, 128), key=mx.random.key(8))
    plain = library.linear(clean, **layer.arguments)
    sure = np.abs(layer.exact[:, 5]) > 1e-5  # a weight that only rounds to zero makes NaN or infinity, either is right
    for value in (float("nan"), float("inf"), -float("inf")):
        x = mx.array(clean)
        x[0, 5] = value
        y = np.array(library.linear(x, **layer.arguments))
        assert np.array_equal(np.isnan(y[0])[sure], np.isnan(value * layer.exact[sure, 5]))
        assert np.array_equal(np.isposinf(y[0])[sure], np.isposinf(value * layer.exact[sure, 5]))
        assert y[1:].tobytes() == raw(plain[1:])


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_rounding_is_mlx_rounding(library: Any, dtype: mx.Dtype) -> None:
    special = [0.0, -0.0, 1e-8, 6e-8, 3e-5, 6.1e-5, 65504.0, 65519.9, 65520.0, 1e30, -1e30, 3.3e38]
    values = mx.concatenate([mx.array(special), mx.random.normal((4000,)) * 10 ** mx.random.uniform(-9, 6, (4000,))])
    y = library.linear(values[:, None], mx.ones((1, 1)), bias=None).reshape(-1)
    stored = library.linear(values.astype(dtype)[:, None], mx.ones((1, 1), dtype)).reshape(-1)
    assert raw(y) == raw(values + 0.0)
    assert raw(stored) == raw(values.astype(dtype) + mx.array(0, dtype))


Q = mx.zeros((3, 8), mx.uint32)


@pytest.mark.parametrize(
    "message, call",
    [
        (
            r"weights: found shape \(3,21\), expected 20 columns",
            lambda lib: lib.linear(mx.zeros((2, 20)), mx.zeros((3, 21))),
        ),
        (
            "activations: found int32, expected float32",
            lambda lib: lib.linear(mx.zeros((2, 4), mx.int32), mx.zeros((3, 4))),
        ),
        ("weights: found int8, expected float32", lambda lib: lib.linear(mx.zeros((2, 4)), mx.zeros((3, 4), mx.int8))),
        (
            r"weights: found shape \(1,3,4\), expected 2 axes",
            lambda lib: lib.linear(mx.zeros((2, 4)), mx.zeros((1, 3, 4))),
        ),
        (
            r"bias: found .*\(4\), expected floats of shape \(3,\)",
            lambda lib: lib.linear(mx.zeros((2, 4)), mx.zeros((3, 4)), bias=mx.zeros((4,))),
        ),
        ("mode: found ternary, expected affine", lambda lib: lib.linear(mx.zeros((2, 64)), Q, mode="ternary")),
        (
            "bits of affine weights: found 7, expected 2",
            lambda lib: lib.linear(mx.zeros((2, 64)), Q, mode="affine", bits=7),
        ),
        (
            "group size of mxfp4 weights: found 0, expected 32",
            lambda lib: lib.linear(mx.zeros((2, 64)), Q, mode="mxfp4", bits=4),
        ),
        (
            "scales: found none, expected one per group",
            lambda lib: lib.linear(mx.zeros((2, 64)), Q, mode="mxfp4", bits=4, group_size=32),
        ),
        (
            "indices: found int32, expected uint32",
            lambda lib: lib.gathered(mx.zeros((1, 4)), mx.zeros((2, 3, 4)), mx.zeros((1,), mx.int32)),
        ),
    ],
)
def test_what_cannot_be_multiplied_is_refused(library: Any, message: str, call: Any) -> None:
    with pytest.raises(ValueError, match=message):
        call(library)


def test_an_expert_that_does_not_exist_gives_nan(library: Any) -> None:
    y = library.gathered(mx.ones((2, 1, 4)), mx.ones((3, 5, 4)), mx.array([1, 3], mx.uint32))
    assert y[0].tolist() == [[4.0] * 5] and mx.isnan(y[1]).all().item()
