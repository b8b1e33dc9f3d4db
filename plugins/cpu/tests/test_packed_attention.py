"""Attention over packed K/V: the rows of a block are its steps, whatever is hidden; close to float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cpu_layers import as_float64, raw
from mlx_lm.models.base import quantized_scaled_dot_product_attention
from mlx_lm.models.llama import Attention, ModelArgs
from test_attention import DTYPES, SETS, TOLERANCE, exact, made

from mlx_spec import Kernel
from mlx_spec.state import QuantisedKVState, QuantisedWindowState
from mlx_spec.testing import KernelContract
from mlx_spec_cpu import attention, swap
from mlx_spec_cpu.operations import build_packed_attention, packed_attention_reference

Packed = tuple[mx.array, mx.array, mx.array]
KINDS = [(bits, group) for bits in (4, 8) for group in (32, 64, 128)]


def packed(a: mx.array, bits: int, group: int) -> Packed:
    words, scales, biases = mx.quantize(a, group, bits)
    return words, scales, biases


def part(p: Packed, first: int, last: int) -> Packed:
    words, scales, biases = (a[:, :, first:last] for a in p)
    return words, scales, biases


def unpacked(p: Packed, bits: int, group: int) -> mx.array:
    return mx.dequantize(p[0], p[1].astype(mx.float32), p[2].astype(mx.float32), group, bits)


class TestContract(KernelContract):
    rows_axis = 2

    @pytest.fixture
    def kernel(self) -> Kernel:
        return Kernel("packed-attention", ("cpu",), "1e-5", build_packed_attention, packed_attention_reference)

    @pytest.fixture
    def arguments(self) -> Callable[[int, int], Any]:
        def make(rows: int, seed: int) -> list[Any]:
            q, k, v = made(rows, 21 + seed % 3, 96, mx.float32, Dv=64)
            return [q, packed(k, 4, 32), packed(v, 4, 32), 0.1, 32, 4]

        return make


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "group"), KINDS)
def test_a_causal_block_is_its_steps(library: Any, bits: int, group: int, dtype: mx.Dtype, kernels: str) -> None:
    assert library.use_kernels(kernels)
    q, k, v = made(11, 37, 128 + group, dtype, Dv=group * 3) if group < 128 else made(11, 37, 128, dtype, Dv=256)
    keys, values = packed(k, bits, group), packed(v, bits, group)
    run = library.packed_attention
    steps = [
        run(q[:, :, r : r + 1], part(keys, 0, 27 + r), part(values, 0, 27 + r), 0.1, group, bits) for r in range(11)
    ]
    for threads in (1, 3):
        library.set_threads(threads)
        for L in (1, 2, 3, 5, 8, 11):
            seen = part(keys, 0, 26 + L), part(values, 0, 26 + L)
            block = run(q[:, :, :L], *seen, 0.1, group, bits, None, True)
            assert [raw(block[:, :, r : r + 1]) == raw(steps[r]) for r in range(L)] == [True] * L
    held = [unpacked(p, bits, group) for p in (keys, values)]
    want = exact(q, *held, 0.1, np.tril(np.ones((11, 37), bool), 26))
    assert np.abs(as_float64(block) - want).max() < TOLERANCE[dtype] * np.abs(want).max()


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize(("bits", "group"), KINDS)
def test_hidden_keys_leave_no_trace(library: Any, bits: int, group: int, kernels: str) -> None:
    assert library.use_kernels(kernels)
    T, L, window = 33, 7, 13
    q, k, v = made(L, T, 128, mx.bfloat16)
    seen = np.array([[T - L + r - window < t <= T - L + r for t in range(T)] for r in range(L)])
    keys, values = packed(k, bits, group), packed(v, bits, group)
    gone = mx.array(~seen.any(0))[:, None]
    blind = [(p[0], mx.where(gone, mx.array(float("nan"), p[1].dtype), p[1]), p[2]) for p in (keys, values)]
    outputs = [
        library.packed_attention(q, keys, values, 0.2, group, bits, mx.array(seen)),
        library.packed_attention(q, *blind, 0.2, group, bits, mx.array(seen)),
    ]
    for r in range(L):
        first, last = int(seen[r].argmax()), T - L + r + 1
        alone = library.packed_attention(
            q[:, :, r : r + 1], part(keys, first, last), part(values, first, last), 0.2, group, bits
        )
        assert [raw(y[:, :, r : r + 1]) == raw(alone) for y in outputs] == [True] * 2


def test_strides_and_nothing(library: Any) -> None:
    q, k, v = made(3, 40, 64, mx.float16)
    keys, values = packed(k, 8, 32), packed(v, 8, 32)
    apart = [tuple(mx.repeat(a, 2, axis=2)[:, :, ::2] for a in p) for p in (keys, values)]
    loose = [(p[0], mx.contiguous(p[1].swapaxes(2, 3)).swapaxes(2, 3), p[2]) for p in (keys, values)]
    want = library.packed_attention(q, keys, values, 0.3, 32, 8)
    for given in (apart, loose):
        assert raw(library.packed_attention(q, *given, 0.3, 32, 8)) == raw(want)
    assert library.packed_attention(q[:, :, :0], keys, values, 0.3, 32, 8).shape == (2, 6, 0, 64)


@pytest.mark.parametrize(
    "message, change",
    [
        ("found 6 bits in groups of 32, expected 4 or 8 bits", {"bits": 6}),
        ("found 8 bits in groups of 16, expected 4 or 8 bits", {"group_size": 16}),
        ("packed keys: found .*, expected four axes each, a scale and a bias for every group", {"group_size": 64}),
        ("packed values: found .*, expected uint32", {"values": lambda p: (p[0].astype(mx.int32), *p[1:])}),
        ("packed keys: found .*float32 and float16", {"keys": lambda p: (*p[:2], p[2].astype(mx.float16))}),
        ("keys and values: found", {"keys": lambda p: tuple(a[:, :, :4] for a in p)}),
    ],
)
def test_what_does_not_fit_is_refused(library: Any, message: str, change: dict[str, Any]) -> None:
    q, k, v = made(3, 9, 64, mx.float32)
    given: dict[str, Any] = {"keys": packed(k, 8, 32), "values": packed(v, 8, 32), "group_size": 32, "bits": 8}
    given |= {name: value(given[name]) if callable(value) else value for name, value in change.items()}
    with pytest.raises(ValueError, match=message):
        library.packed_attention(q, scale=1.0, **given)


# -- states of core and layers of mlx-lm ---------------------------------------------------------------------

ARGS = ModelArgs("llama", 48, 1, 80, 4, 1e-5, 131, head_dim=32, num_key_value_heads=2)


def states(bits: int, batch: int) -> list[Any]:
    return [QuantisedKVState(bits, 32, batch), QuantisedWindowState(12, bits, 32, batch=batch)]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", [0, 1], ids=["full", "window"])
def test_a_layer_over_a_quantised_state_gives_steps_in_blocks(kind: int, bits: int) -> None:
    layer = swap(Attention(ARGS))
    x = mx.random.normal((1, 40, 48), key=mx.random.key(3))
    alone, block = states(bits, 1)[kind], states(bits, 1)[kind]
    rows = [layer(x[:, t : t + 1], alone.make_mask(1), alone) for t in range(40)]
    at = 0
    for L in (9, 1, 5, 2, 8, 3, 12):
        y = layer(x[:, at : at + L], block.make_mask(L), block)
        assert [raw(y[:, r : r + 1]) == raw(rows[at + r]) for r in range(L)] == [True] * L
        at += L


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", [0, 1], ids=["full", "window"])
def test_rows_of_different_length_share_a_block(kind: int, bits: int) -> None:
    layer = swap(Attention(ARGS))
    x = mx.random.normal((2, 24, 48), key=mx.random.key(4))
    alone = [states(bits, 1)[kind] for _ in range(2)]
    for b, n in enumerate((17, 4)):
        layer(x[b : b + 1, :n], alone[b].make_mask(n), alone[b])
    both = type(alone[0]).merge(alone)
    assert both.lengths == (17, 4)
    y = layer(x[:, -5:], both.make_mask(5), both)
    for b in range(2):
        want = layer(x[b : b + 1, -5:], alone[b].make_mask(5), alone[b])
        assert raw(y[b : b + 1]) == raw(want)


@pytest.mark.parametrize("bits", [4, 8])
def test_it_is_what_mlx_lm_computes(bits: int) -> None:
    q, k, v = made(4, 30, 64, mx.float32)

    class Cache:
        group_size = 32

        def __init__(self) -> None:
            self.bits = bits

    given = packed(k, bits, 32), packed(v, bits, 32)
    for mask in (None, "causal", mx.arange(30) > 3):
        want = quantized_scaled_dot_product_attention(q + 0, *given, 0.1, mask, 32, bits)
        assert mx.allclose(attention.attend(q, *given, Cache(), 0.1, mask), want, atol=1e-5).item()
