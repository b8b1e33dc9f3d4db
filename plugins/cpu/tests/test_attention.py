"""Attention: a row sees the same bytes in a block as alone, wherever hidden keys lie; close to float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cpu_layers import as_float64, raw
from mlx_lm.models.base import quantized_scaled_dot_product_attention
from mlx_lm.models.llama import Attention, ModelArgs

from mlx_spec import Kernel
from mlx_spec.testing import KernelContract
from mlx_spec_cpu import attention, swap
from mlx_spec_cpu.native import library as load
from mlx_spec_cpu.operations import attention_reference, build_attention

SETS = load().kernel_names().split(",")
DTYPES = [mx.float32, mx.bfloat16, mx.float16]
TOLERANCE = {mx.float32: 2e-6, mx.bfloat16: 4e-3, mx.float16: 5e-4}


def made(L: int, T: int, D: int, dtype: mx.Dtype, heads: int = 6, kv: int = 2, Dv: int | None = None) -> list[mx.array]:
    shapes = ((2, heads, L, D), (2, kv, T, D), (2, kv, T, Dv or D))
    return [mx.random.normal(shape, key=mx.random.key(i)).astype(dtype) for i, shape in enumerate(shapes)]


def exact(q: mx.array, k: mx.array, v: mx.array, scale: float, seen: np.ndarray) -> np.ndarray:
    """In float64; seen broadcasts to (B, H, L, T)."""
    group = q.shape[1] // k.shape[1]
    q64, k64, v64 = as_float64(q), *(np.repeat(as_float64(a), group, axis=1) for a in (k, v))
    scores = np.where(seen, q64 @ k64.swapaxes(-1, -2) * scale, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ v64 / weights.sum(-1, keepdims=True)


class TestContract(KernelContract):
    rows_axis = 2

    @pytest.fixture
    def kernel(self) -> Kernel:
        return Kernel("attention", ("cpu",), "1e-5", build_attention, attention_reference)

    @pytest.fixture
    def arguments(self) -> Callable[[int, int], Any]:
        return lambda rows, seed: [*made(rows, 21 + seed % 3, 24, mx.float32), 0.3]


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("D", "Dv"), [(64, None), (24, 40), (5, 3), (80, 144), (328, 296)])
def test_a_causal_block_is_its_steps(library: Any, D: int, Dv: int | None, dtype: mx.Dtype, kernels: str) -> None:
    assert library.use_kernels(kernels)
    q, k, v = made(11, 37, D, dtype, Dv=Dv)
    steps = [library.attention(q[:, :, r : r + 1], k[:, :, : 27 + r], v[:, :, : 27 + r], 0.2) for r in range(11)]
    for threads in (1, 2, 4):
        library.set_threads(threads)
        for L in (1, 2, 3, 5, 8, 11):
            block = library.attention(q[:, :, :L], k[:, :, : 26 + L], v[:, :, : 26 + L], 0.2, None, True)
            assert [raw(block[:, :, r : r + 1]) == raw(steps[r]) for r in range(L)] == [True] * L
    want = exact(q, k, v, 0.2, np.tril(np.ones((11, 37), bool), 26))
    assert np.abs(as_float64(block) - want).max() < TOLERANCE[dtype] * np.abs(want).max()


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", (1, 3))
def test_rows_that_share_keys_see_their_own(library: Any, heads: int, dtype: mx.Dtype, kernels: str) -> None:
    """More rows than read keys together, the first of which see none of the last sixteens of keys."""
    assert library.use_kernels(kernels)
    L, T = 45, 51
    q, k, v = made(L, T, 32, dtype, heads=2 * heads)
    block = library.attention(q, k, v, 0.2, None, True)
    for r in range(L):
        seen = T - L + r + 1
        alone = library.attention(q[:, :, r : r + 1], k[:, :, :seen], v[:, :, :seen], 0.2)
        assert raw(block[:, :, r : r + 1]) == raw(alone)


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hidden_keys_leave_no_trace(library: Any, dtype: mx.Dtype, kernels: str) -> None:
    assert library.use_kernels(kernels)
    q, k, v = made(7, 33, 32, dtype)
    window, T, L = 13, 33, 7
    seen = np.array([[T - L + r - window < t <= T - L + r for t in range(T)] for r in range(L)])
    blind = [mx.where(mx.array(~seen.any(0))[:, None], mx.array(float("nan"), dtype), a) for a in (k, v)]
    additive = mx.where(mx.array(seen), 0.0, -mx.inf)
    outputs = [
        library.attention(q, k, v, 0.2, mx.array(seen)),
        library.attention(q, *blind, 0.2, mx.array(seen)),
        library.attention(q, k, v, 0.2, mx.broadcast_to(mx.array(seen), (2, 6, L, T))),
        library.attention(q, k, v, 0.2, additive),
    ]
    for r in range(L):
        first, last = int(seen[r].argmax()), T - L + r + 1
        alone = library.attention(q[:, :, r : r + 1], k[:, :, first:last], v[:, :, first:last], 0.2)
        assert [raw(y[:, :, r : r + 1]) == raw(alone) for y in outputs] == [True] * 4


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("asked", DTYPES, ids=str)
def test_queries_and_keys_may_differ_in_type(library: Any, asked: mx.Dtype, stored: mx.Dtype, kernels: str) -> None:
    assert library.use_kernels(kernels)
    q, k, v = made(9, 50, 40, mx.float32)
    q, k, v = q.astype(asked), k.astype(stored), v.astype(stored)
    got, want = library.attention(q, k, v, -0.3, None, True), exact(q, k, v, -0.3, np.tril(np.ones((9, 50), bool), 41))
    assert got.dtype == asked
    assert np.abs(as_float64(got) - want).max() < TOLERANCE[asked] * np.abs(want).max()


@pytest.mark.parametrize("kernels", SETS)
def test_keys_of_a_block_do_not_meet(library: Any, kernels: str) -> None:
    assert library.use_kernels(kernels)
    q, k, v = made(8, 48, 64, mx.bfloat16)
    want = library.attention(q, k, v, 0.125, None, True)
    odd = mx.arange(48)[:, None] == 47  # which only the last row sees
    for value in (float("inf"), float("nan"), 1e-39):
        got = library.attention(q, *(mx.where(odd, mx.array(value, mx.bfloat16), a) for a in (k, v)), 0.125, None, True)
        assert raw(got[:, :, :7]) == raw(want[:, :, :7]) and raw(got[:, :, 7:]) != raw(want[:, :, 7:])
        assert mx.isnan(got[:, :, 7:]).any().item() == (value != 1e-39)


def test_masks_that_add_are_added(library: Any) -> None:
    q, k, v = made(3, 10, 16, mx.float32)
    for mask in (mx.random.normal((3, 10)), mx.random.normal((2, 1, 1, 10)), mx.random.normal((6, 3, 1))):
        for dtype in DTYPES:
            theirs = attention_reference(q, k, v, 0.5, mask.astype(dtype).astype(mx.float32))
            assert mx.allclose(library.attention(q, k, v, 0.5, mask.astype(dtype)), theirs, atol=1e-5).item()


def test_rows_that_see_nothing_are_as_in_mlx(library: Any) -> None:
    q, k, v = made(2, 5, 8, mx.float32)
    flags = mx.array([[True] * 5, [False] * 5])
    ours, theirs = library.attention(q, k, v, 1.0, flags), attention_reference(q, k, v, 1.0, flags)
    assert mx.allclose(ours, theirs, atol=1e-5).item()
    nothing = mx.where(flags, 0.0, -mx.inf)
    assert mx.isnan(library.attention(q, k, v, 1.0, nothing)[:, :, 1]).all().item()


def test_large_scores_nan_and_infinity(library: Any) -> None:
    q, k, v = made(2, 40, 16, mx.float32)
    assert mx.allclose(library.attention(q, k, v, 90.0), attention_reference(q, k, v, 90.0), atol=1e-5).item()
    q[0, 0, 0, 3] = float("nan")
    y = library.attention(q, k, v, 1.0)
    assert mx.isnan(y[0, 0, 0]).all().item() and mx.isfinite(y[0, 0, 1]).all().item() and mx.isfinite(y[1]).all().item()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_strides_and_nothing(library: Any, dtype: mx.Dtype) -> None:
    big = mx.random.normal((2, 9, 4, 32), key=mx.random.key(1)).astype(dtype)
    views = [big.swapaxes(1, 2)[..., :16], big.swapaxes(1, 2)[..., ::2], mx.swapaxes(big[..., :9, :], 1, 2)[:, :, 1:]]
    q = mx.random.normal((2, 9, 4, 16)).astype(dtype).swapaxes(1, 2)[:, :, 2:5]
    for view in views[:2]:
        tidy = [mx.array(np.array(a.astype(mx.float32))).astype(dtype) for a in (q, view)]
        assert raw(library.attention(q, view, view, 0.3)) == raw(library.attention(tidy[0], tidy[1], tidy[1], 0.3))
    assert library.attention(q[:, :, :0], views[0], views[0], 0.3).shape == (2, 4, 0, 16)


@pytest.mark.parametrize(
    "message, arguments",
    [
        ("found 3, 4 and 4 axes, expected four each", lambda q, k, v: (q[0], k, v)),
        ("keys and values: found", lambda q, k, v: (q, k[:, :, :4], v)),
        ("keys and values: found", lambda q, k, v: (q[:, :5], k, v)),
        ("expected float32, float16 or bfloat16, keys and values alike", lambda q, k, v: (q, k, v.astype(mx.float16))),
    ],
)
def test_what_does_not_fit_is_refused(library: Any, message: str, arguments: Any) -> None:
    with pytest.raises(ValueError, match=message):
        library.attention(*arguments(*made(3, 9, 8, mx.float32)), 1.0)


def test_a_mask_of_another_shape_is_refused(library: Any) -> None:
    with pytest.raises(ValueError, match=r"mask: found shape \(1,1,3,8\), expected one that broadcasts to \(2,6,3,9\)"):
        library.attention(*made(3, 9, 8, mx.float32), 1.0, mx.ones((3, 8)))


# -- layers of mlx-lm ----------------------------------------------------------------------------------------

ARGS = ModelArgs("llama", 48, 1, 80, 4, 1e-5, 131, head_dim=16, num_key_value_heads=2)


def test_an_attention_layer_runs_its_own_code_on_the_kernel() -> None:
    layer = Attention(ARGS)
    x = mx.random.normal((2, 5, 48))
    before = layer(x, "causal")
    assert swap(layer) is not layer
    model = {"attn": Attention(ARGS)}
    model["attn"].update(layer.parameters())
    new = attention.swap_attention(model["attn"])
    assert isinstance(new, Attention) and type(new).__name__ == "RowAttention" and new.q_proj is model["attn"].q_proj
    assert type(attention.swap_attention(Attention(ARGS))) is type(new)
    assert mx.allclose(new(x, "causal"), before, atol=1e-5).item()
    assert Attention.__call__.__globals__["scaled_dot_product_attention"] is not attention.attend
    assert attention.swap_attention(new.q_proj) is None and attention.swap_attention(new) is None


def test_sinks_and_unknown_packings_stay_with_mlx_lm() -> None:
    q, k, v = made(3, 10, 64, mx.float32)

    class Cache:
        bits, group_size = 6, 32

    packed = [mx.quantize(a, 32, 6) for a in (k, v)]
    again = q + 0  # mlx-lm scales the queries it is given in place
    want = quantized_scaled_dot_product_attention(again, *packed, scale=0.1, mask=None, group_size=32, bits=6)
    assert raw(attention.attend(q + 0, *packed, Cache(), 0.1, None)) == raw(want)
    sinks = mx.zeros((6,))
    want = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.1, mask=None, sinks=sinks)
    assert raw(attention.attend(q, k, v, None, 0.1, None, sinks)) == raw(want)
