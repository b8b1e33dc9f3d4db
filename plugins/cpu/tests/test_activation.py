"""Activations: close to exact, rounded where mlx rounds, and called by the layers that call mlx-lm's."""

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
from mlx_lm.models import activations, gemma3_text, gemma4_text, llama, qwen3_next
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU

from mlx_spec import Kernel
from mlx_spec.testing import KernelContract
from mlx_spec_cpu import activation, swap
from mlx_spec_cpu.native import library as load
from mlx_spec_cpu.operations import activation_reference, build_activation

SETS = load().kernel_names().split(",")
DTYPES = [mx.float32, mx.bfloat16, mx.float16]
ULP = {mx.float32: 2**-23, mx.bfloat16: 2**-8, mx.float16: 2**-11}
ACTS = ["silu", "gelu-tanh"]


def made(rows: int, D: int, dtype: mx.Dtype, seed: int = 0) -> list[mx.array]:
    keys = mx.random.split(mx.random.key(seed))
    return [(mx.random.normal((rows, D), key=key) * 4).astype(dtype) for key in keys]


def exact(gate: mx.array, x: mx.array, act: str) -> np.ndarray:
    g = as_float64(gate)
    if act == "silu":
        return g / (1 + np.exp(-g)) * as_float64(x)
    return 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * as_float64(x)


class TestContract(KernelContract):
    by_row = (0, 1)

    @pytest.fixture
    def kernel(self) -> Kernel:
        return Kernel("activation", ("cpu",), "1e-5", build_activation, activation_reference)

    @pytest.fixture
    def arguments(self) -> Callable[[int, int], Any]:
        return lambda rows, seed: [*made(rows, 37, mx.float32, seed), ACTS[seed % 2]]


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [1, 15, 33, 5000])
def test_rows_alone_and_together(library: Any, D: int, dtype: mx.Dtype, act: str, kernels: str) -> None:
    assert library.use_kernels(kernels)
    gate, x = made(7, D, dtype)
    y = library.activation(gate, x, act)
    assert y.dtype == dtype
    for threads in (1, 3):
        library.set_threads(threads)
        assert raw(library.activation(gate, x, act)) == raw(y)
        for r in range(7):
            assert raw(library.activation(gate[r], x[r], act)) == raw(y[r])
    want = exact(gate, x, act)
    spread = 0.0
    if dtype == mx.float16:  # as in mlx: the exponential in a sigmoid below 2e-5 is infinite there
        spread = 2e-5 * np.abs(as_float64(gate) * as_float64(x))
    assert (np.abs(as_float64(y) - want) <= (4 * ULP[dtype] + 1e-5) * np.abs(want) + 1e-6 + spread).all()
    precise = library.precise_activation(gate, x, act, mx.zeros((1,)))
    assert precise.dtype == mx.float32 and (np.abs(as_float64(precise) - want) <= 1e-5 * np.abs(want) + 1e-7).all()


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_has_mlx_bytes(library: Any, dtype: mx.Dtype, kernels: str) -> None:
    assert library.use_kernels(kernels)
    gate, x = made(9, 3000, dtype)
    gate[:, :12] = mx.array([0.0, -0.0, 87.9, 88.0, 88.1, -88.0, -88.1, -86.5, 1e30, -1e30, 1e-30, 3.0]).astype(dtype)
    for ours, theirs in (
        (library.activation(gate), nn.silu(gate)),
        (library.activation(gate, x), activations.swiglu(gate, x)),
    ):
        # mlx fuses its multiply-adds, and on a Mac it calls Apple's exponential
        if kernels == "portable" or sys.platform == "darwin":
            assert mx.allclose(ours, theirs, rtol=2 * ULP[dtype], atol=1e-6, equal_nan=True).item()
        else:
            assert mx.array_equal(ours, theirs, equal_nan=True).item()


@pytest.mark.parametrize("act", ACTS)
def test_the_far_ends(library: Any, act: str) -> None:
    x = mx.array([0.0, -0.0, 88.0, -88.0, 1e4, -1e4, 3e38, math.inf, math.nan, 1e-30, -1e-30])
    ours = np.array(library.activation(x, None, act))
    theirs = np.array(activation_reference(x, None, act))
    assert np.array_equal(np.isnan(ours), np.isnan(theirs))
    assert np.allclose(ours, theirs, rtol=1e-5, atol=1e-30, equal_nan=True)


def test_strides_mixed_dtypes_and_nothing(library: Any) -> None:
    gate, x = made(40, 90, mx.bfloat16)
    for view in (lambda a: a[:, ::2], lambda a: a.T, lambda a: a[3::2, 5:80], lambda a: a[::-1]):
        tidy = [mx.contiguous(view(a)) for a in (gate, x)]
        assert raw(library.activation(view(gate), view(x))) == raw(library.activation(*tidy))
        assert raw(library.activation(view(gate), tidy[1])) == raw(library.activation(*tidy))
    mixed = library.activation(gate, x.astype(mx.float32))
    assert mixed.dtype == mx.float32
    assert library.activation(gate[:0], x[:0]).shape == (0, 90)
    assert library.activation(mx.array(2.0)).shape == ()
    mx.eval(library.activation(gate[:, :0], x[:, :0]))


@pytest.mark.parametrize(
    "message, call",
    [
        ("activation: found relu, expected silu or gelu-tanh", lambda lib: lib.activation(mx.ones((2,)), None, "relu")),
        (
            r"gate and x: found \(2\) and \(3\), expected equal",
            lambda lib: lib.activation(mx.ones((2,)), mx.ones((3,))),
        ),
        ("activations: found int32, expected float32", lambda lib: lib.activation(mx.ones((2,), mx.int32))),
    ],
)
def test_what_does_not_fit_is_refused(library: Any, message: str, call: Any) -> None:
    with pytest.raises(ValueError, match=message):
        call(library)


# -- layers --------------------------------------------------------------------------------------------------

LLAMA = llama.ModelArgs("llama", 48, 1, 80, 4, 1e-5, 131, head_dim=16, num_key_value_heads=2)


def layers() -> dict[str, nn.Module]:
    config = gemma4_text.ModelArgs(hidden_size=48, intermediate_size=80, num_hidden_layers=1, num_kv_shared_layers=0)
    return {
        "llama": llama.MLP(LLAMA),
        "gemma3": gemma3_text.MLP(48, 80),
        "gemma4": gemma4_text.MLP(config),
        "qwen3_next": qwen3_next.Qwen3NextMLP(48, 80),
        "SiLU": nn.SiLU(),
    }


@pytest.mark.parametrize("name", layers())
def test_a_layer_runs_its_own_code_on_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old = layers()[name]
    new = activation.swap_activation(old)
    assert new is not None and type(new).__name__.startswith("Row") and isinstance(new, type(old))
    x = mx.random.normal((2, 5, 48))
    called: list[str] = []
    real = load()

    class Watched:
        def activation(self, *given: Any) -> mx.array:
            called.append("activation")
            return real.activation(*given)

    monkeypatch.setattr(activation, "library", Watched)
    assert mx.allclose(new(x), old(x), atol=1e-5).item() and called == ["activation"]
    assert activation.swap_activation(new) is None


def test_the_gated_norm_and_the_experts() -> None:
    norm = qwen3_next.Qwen3NextRMSNormGated(24)
    new = activation.swap_activation(norm)
    h, z = (mx.random.normal((2, 3, 24), key=mx.random.key(i)).astype(mx.bfloat16) for i in (0, 1))
    assert type(new).__name__ == "RowQwen3NextRMSNormGated" and new(h, z).dtype == mx.bfloat16
    assert mx.allclose(new(h, z), norm(h, z), rtol=1e-2).item()
    experts = swap(SwitchGLU(16, 32, 3))
    assert type(experts.activation).__name__ == "RowSwiGLU" and isinstance(experts.activation, SwiGLU)
    assert activations.swiglu is not activation.swiglu  # nothing of mlx-lm is changed


def test_what_the_kernel_does_not_take_goes_to_mlx_lm() -> None:
    gate, x = mx.ones((2, 4)), mx.ones((4,)) * 3
    assert mx.array_equal(activation.swiglu(gate, x), activations.swiglu(gate, x)).item()
    assert mx.array_equal(activation.geglu(gate, x), gemma4_text.geglu(gate, x)).item()
    assert mx.array_equal(activation.precise_swiglu(x, gate, x), activations.precise_swiglu(x, gate, x)).item()
