"""Linear layers, dense and packed: every row of every block gives the bytes it gives alone, close to float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
import pytest
from cpu_layers import PACKINGS, Layer, Packing, as_float64, make_layer, raw

from mlx_spec import Kernel
from mlx_spec.testing import KernelContract
from mlx_spec_cpu.native import library as load
from mlx_spec_cpu.operations import (
    build_gathered,
    build_linear,
    gathered_reference,
    linear_reference,
)

SETS = load().kernel_names().split(",")
DTYPES = [mx.float32, mx.bfloat16, mx.float16]
PAIRED = [*(Packing("affine", bits, group) for bits in (4, 8) for group in (32, 64)), Packing("mxfp4", 4, 32)]
TOLERANCE = {mx.float32: 2e-6, mx.bfloat16: 8e-3, mx.float16: 1e-3}
DENSE_K, PACKED_K, N = 389, 384, 83
ROWS = 37


def width(packing: Packing) -> int:
    return DENSE_K if packing.mode == "dense" else PACKED_K


def activations(rows: int, K: int, dtype: mx.Dtype, seed: int = 1) -> mx.array:
    return mx.random.normal((rows, K), key=mx.random.key(seed)).astype(dtype)


class LinearKernel(KernelContract):
    """The kit's proof, in float32; the claim is close to mlx's own operation."""

    packing: ClassVar[Packing] = Packing("dense")

    @pytest.fixture
    def kernel(self) -> Kernel:
        return Kernel("linear", ("cpu",), "2e-4", build_linear, linear_reference)

    @pytest.fixture
    def arguments(self) -> Callable[[int, int], Any]:
        def make(rows: int, seed: int) -> list[Any]:
            layer = make_layer(self.packing, mx.float32, 51, width(self.packing), seed)
            given = layer.arguments
            packed = [given.get(name) for name in ("weight", "scales", "biases")]
            options = [given.get("mode", "dense"), given.get("group_size", 0), given.get("bits", 0)]
            return [activations(rows, width(self.packing), mx.float32, seed), *packed, None, *options]

        return make


class TestDense(LinearKernel):
    pass


class TestAffine4(LinearKernel):
    packing = Packing("affine", 4, 64)


class TestAffine6(LinearKernel):
    packing = Packing("affine", 6, 32)


class TestMxfp4(LinearKernel):
    packing = Packing("mxfp4", 4, 32)


class TestExperts(KernelContract):
    """Rows that choose among experts: neighbours with the same choice are multiplied together."""

    by_row = (0, 2)

    @pytest.fixture
    def kernel(self) -> Kernel:
        return Kernel("experts", ("cpu",), "2e-4", build_gathered, gathered_reference)

    @pytest.fixture
    def arguments(self) -> Callable[[int, int], Any]:
        def make(rows: int, seed: int) -> list[Any]:
            weight = mx.random.normal((5, 19, 72), key=mx.random.key(seed))
            x = mx.random.normal((rows, 1, 1, 72), key=mx.random.key(seed + 1))
            chosen = mx.random.randint(0, 5, (rows, 3), key=mx.random.key(seed + 2)).astype(mx.uint32)
            return [x, weight, chosen]

        return make


def check_blocks(library: Any, layer: Layer, x: mx.array, sizes: list[int]) -> mx.array:
    """Blocks of every size on every number of threads against single rows; the last block is returned."""
    alone = [raw(library.linear(x[r : r + 1], **layer.arguments)) for r in range(x.shape[0])]
    for threads in (1, 2, 4):
        library.set_threads(threads)
        for rows in sizes:
            y = library.linear(x[:rows], **layer.arguments)
            wrong = [r for r in range(rows) if raw(y[r : r + 1]) != alone[r]]
            assert wrong == [], f"{rows} rows on {threads} threads"
    return y


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_rows_do_not_depend_on_their_block(library: Any, packing: Packing, dtype: mx.Dtype, kernels: str) -> None:
    assert library.use_kernels(kernels)
    K = width(packing)
    layer, x = make_layer(packing, dtype, N, K), activations(ROWS, K, dtype)
    y = check_blocks(library, layer, x, [*range(1, 17), ROWS])
    exact = as_float64(x) @ layer.exact.T
    assert np.abs(as_float64(y) - exact).max() < TOLERANCE[dtype] * np.abs(exact).max()


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("packing", [Packing("dense"), Packing("affine", 4, 64)], ids=str)
def test_rows_of_a_prefill_are_rows(library: Any, packing: Packing, kernels: str) -> None:
    assert library.use_kernels(kernels)
    layer, x = make_layer(packing, mx.bfloat16, 301, 256), activations(512, 256, mx.bfloat16)
    whole = library.linear(x, **layer.arguments)
    for row in (0, 1, 5, 6, 255, 509, 510, 511):
        assert raw(whole[row : row + 1]) == raw(library.linear(x[row : row + 1], **layer.arguments))


@pytest.mark.parametrize("K", [1, 3, 15, 16, 17, 31, 33])
@pytest.mark.parametrize("kernels", SETS)
def test_dense_rows_of_any_length(library: Any, kernels: str, K: int) -> None:
    assert library.use_kernels(kernels)
    for columns in (1, 2, 7, 9):
        layer, x = make_layer(Packing("dense"), mx.float32, columns, K), activations(11, K, mx.float32)
        y = check_blocks(library, layer, x, [1, 2, 5, 9, 11])
        assert np.allclose(as_float64(y), as_float64(x) @ layer.exact.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_it_is_close_to_mlx(library: Any, packing: Packing) -> None:
    K = width(packing)
    layer, x = make_layer(packing, mx.float32, N, K), activations(3, K, mx.float32)
    theirs = linear_reference(x, **layer.arguments)
    ours = library.linear(x, **layer.arguments)
    assert ours.dtype == theirs.dtype
    assert np.abs(as_float64(ours) - as_float64(theirs)).max() < 1e-5 * np.abs(as_float64(theirs)).max()


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("K", [128, 416, 1152], ids="K{}".format)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_bfloat16_rows_are_summed_as_floats(library: Any, bits: int, group: int, K: int, kernels: str) -> None:
    assert library.use_kernels(kernels)
    K = K // group * group
    layer, x = make_layer(Packing("affine", bits, group), mx.float32, N, K), activations(11, K, mx.bfloat16)
    y = check_blocks(library, layer, x, [*range(1, 10), 11])
    theirs = linear_reference(x.astype(mx.float32), **layer.arguments)
    assert y.dtype == mx.float32
    assert np.abs(as_float64(y) - as_float64(theirs)).max() < 1e-5 * np.abs(as_float64(theirs)).max()


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("packing", [*PAIRED, Packing("nvfp4", 4, 16)], ids=str)
def test_bfloat16_rows_that_end_anywhere(library: Any, packing: Packing, kernels: str) -> None:
    assert library.use_kernels(kernels)
    for K in (*range(packing.group_size, 321, packing.group_size), 512, 576, 704):
        layer, x = make_layer(packing, mx.bfloat16, 18, K), activations(18, K, mx.bfloat16)
        y = check_blocks(library, layer, x, [1, 3, 7, 8, 9, 16, 18])
        exact = as_float64(x) @ layer.exact.T
        assert np.abs(as_float64(y) - exact).max() < TOLERANCE[mx.bfloat16] * np.abs(exact).max(), K


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("K", [1, 31, 32, 33, 64, 130])
def test_bfloat16_rows_by_bfloat16_weights(library: Any, K: int, kernels: str) -> None:
    """Rows read where they lie, copied because they end early, or gathered because they lie apart."""
    assert library.use_kernels(kernels)
    layer, x = make_layer(Packing("dense"), mx.bfloat16, 35, K), activations(11, K, mx.bfloat16)
    y = check_blocks(library, layer, x, [*range(1, 10), 11])
    exact = as_float64(x) @ layer.exact.T
    assert np.abs(as_float64(y) - exact).max() < TOLERANCE[mx.bfloat16] * np.abs(exact).max()
    apart = mx.as_strided(mx.contiguous(x.T), x.shape, (1, x.shape[0]))
    assert raw(library.linear(apart, **layer.arguments)) == raw(y)


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("packing", PAIRED, ids=str)
def test_values_that_overflow_when_multiplied_with_codes(library: Any, packing: Packing, kernels: str) -> None:
    """Rows beyond what codes can be multiplied with, among ordinary ones: each is the row it is alone."""
    assert library.use_kernels(kernels)
    layer, x = make_layer(packing, mx.bfloat16, 21, 128), activations(9, 128, mx.bfloat16)
    large = mx.array([[1.0], [1e37], [1.0], [mx.inf], [1.0], [-3e38], [mx.nan], [1.0], [1.0]], mx.bfloat16)
    first = mx.arange(128) == 5
    x = mx.where(first, large, x)
    y = check_blocks(library, layer, x, [2, 4, 7, 9])
    with np.errstate(invalid="ignore"):
        theirs = as_float64(linear_reference(x.astype(mx.float32), **layer.arguments))
    ours = as_float64(y)
    assert (np.isnan(ours) == np.isnan(theirs)).all()
    assert (np.isposinf(ours[3]) == np.isposinf(theirs[3])).all()
    finite = np.abs(theirs) < 1e38
    assert np.allclose(ours[finite], theirs[finite], rtol=2e-2, atol=0.1)


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize(
    "packing", [Packing("dense"), *PAIRED, Packing("affine", 4, 128), Packing("nvfp4", 4, 16)], ids=str
)
def test_there_is_one_nan(library: Any, packing: Packing, kernels: str) -> None:
    """NaN of both signs meet in rows and in scales: which one an addition keeps must not show."""
    assert library.use_kernels(kernels)
    layer, x = make_layer(packing, mx.bfloat16, 26, 384), activations(17, 384, mx.bfloat16)
    picked = np.random.default_rng(3).permuted(np.tile(np.arange(384), (17, 1)), axis=1)
    rows = as_float64(x)
    for column, value in zip(picked.T, (np.nan, -np.nan, np.inf, -np.inf), strict=False):
        rows[np.arange(17), column] = value
    check_blocks(library, layer, mx.array(rows.astype(np.float32)).astype(mx.bfloat16), [2, 7, 8, 9, 17])
    if packing.mode == "nvfp4":
        scales = np.array(layer.arguments["scales"])
        scales[::3, ::5], scales[::3, 1::5] = 0x7F, 0xFF
        layer.arguments["scales"] = mx.array(scales)
        y = check_blocks(library, layer, x, [7, 8, 16, 17])
        assert np.isnan(as_float64(y))[:, ::3].all() and np.isfinite(as_float64(y))[:, 1::3].all()


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", [Packing("dense"), Packing("affine", 4, 32), Packing("affine", 8, 64)], ids=str)
def test_rows_longer_than_a_cache(library: Any, packing: Packing, dtype: mx.Dtype, kernels: str) -> None:
    assert library.use_kernels(kernels)
    layer, x = make_layer(packing, dtype, 19, 4160), activations(10, 4160, dtype)
    y = check_blocks(library, layer, x, [1, 2, 5, 8, 10])
    exact = as_float64(x) @ layer.exact.T
    assert np.abs(as_float64(y) - exact).max() < TOLERANCE[dtype] * np.abs(exact).max()


@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("w_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", [Packing("dense"), Packing("affine", 4, 32)], ids=str)
def test_the_result_has_mlx_dtype(library: Any, packing: Packing, x_dtype: mx.Dtype, w_dtype: mx.Dtype) -> None:
    layer, x = make_layer(packing, w_dtype, 9, 64), activations(2, 64, x_dtype)
    assert library.linear(x, **layer.arguments).dtype == linear_reference(x, **layer.arguments).dtype


def test_a_bias_is_added_before_rounding(library: Any) -> None:
    layer, x = make_layer(Packing("affine", 4, 64), mx.bfloat16, 21, 128), activations(10, 128, mx.bfloat16)
    bias = mx.random.normal((21,)).astype(mx.bfloat16)
    exact = library.linear(x.astype(mx.float32), **layer.arguments) + bias.astype(mx.float32)
    for rows in (1, 10):
        y = library.linear(x[:rows], bias=bias, **layer.arguments)
        assert raw(y) == raw(exact[:rows].astype(mx.bfloat16))


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_experts_give_the_rows_of_their_own_layer(library: Any, packing: Packing) -> None:
    K = width(packing)
    layers = [make_layer(packing, mx.bfloat16, 29, K, seed) for seed in range(4)]
    arrays = {
        name: mx.stack([layer.arguments[name] for layer in layers])
        for name, value in layers[0].arguments.items()
        if isinstance(value, mx.array)
    }
    given = {**layers[0].arguments, **arrays}
    x = activations(23, K, mx.bfloat16)
    chosen = mx.random.randint(0, 4, (23, 2), key=mx.random.key(5)).astype(mx.uint32)
    y = library.gathered(x[:, None, None, :], indices=chosen, **given)
    assert y.shape == (23, 2, 1, 29)
    for row in range(23):
        for place, expert in enumerate(chosen[row].tolist()):
            assert raw(y[row, place]) == raw(library.linear(x[row : row + 1], **layers[expert].arguments))


def test_experts_of_rows_that_are_multiplied_in_two_ways(library: Any) -> None:
    """Ordinary and infinite rows of the same expert, in bfloat16: each is the row of its own layer."""
    layers = [make_layer(Packing("affine", 4, 64), mx.bfloat16, 29, 128, seed) for seed in range(3)]
    arrays = {name: mx.stack([layer.arguments[name] for layer in layers]) for name in ("weight", "scales", "biases")}
    x = mx.where(mx.arange(12)[:, None] % 3 == 1, mx.array(mx.inf, mx.bfloat16), activations(12, 128, mx.bfloat16))
    chosen = mx.array([row % 2 for row in range(12)], mx.uint32)[:, None]
    y = library.gathered(x[:, None, None, :], indices=chosen, **{**layers[0].arguments, **arrays})
    for row in range(12):
        assert raw(y[row, 0]) == raw(library.linear(x[row : row + 1], **layers[row % 2].arguments))


def test_sorted_experts_are_the_same_rows(library: Any) -> None:
    weight = mx.random.normal((6, 17, 40))
    x = activations(20, 40, mx.float32)[:, None, :]
    chosen = mx.sort(mx.random.randint(0, 6, (20,)).astype(mx.uint32))
    y = library.gathered(x, weight, chosen)
    assert y.shape == (20, 1, 17)
    for row, expert in enumerate(chosen.tolist()):
        assert raw(y[row]) == raw(library.linear(x[row], weight[expert]))
