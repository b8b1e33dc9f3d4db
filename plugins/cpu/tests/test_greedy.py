"""The greedy choice: mlx's own ids, and a row chooses the same in a block as alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_spec import Kernel
from mlx_spec.greedy import GreedyChoice
from mlx_spec.kernels import use_kernels
from mlx_spec.settings import reset_settings
from mlx_spec.testing import KernelContract
from mlx_spec_cpu.choice import RowGreedyChoice
from mlx_spec_cpu.native import library as load
from mlx_spec_cpu.operations import build_greedy, greedy_reference

SETS = load().kernel_names().split(",")
DTYPES = [mx.float32, mx.bfloat16, mx.float16]


def logits(rows: int, vocab: int, dtype: mx.Dtype = mx.float32, seed: int = 0, spread: float = 3.0) -> mx.array:
    return (spread * mx.random.normal((rows, vocab), key=mx.random.key(seed))).astype(dtype)


class TestContract(KernelContract):
    @pytest.fixture
    def kernel(self) -> Kernel:
        ids = lambda choose: lambda *given: choose(*given)[0]  # noqa: E731
        return Kernel("greedy", ("cpu",), "bitwise", lambda: ids(build_greedy()), ids(greedy_reference))

    @pytest.fixture
    def arguments(self) -> Callable[[int, int], Any]:
        return lambda rows, seed: [logits(rows, 4099, seed=seed), 4097]


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 512, 4097, 20011])
def test_ids_are_those_of_mlx_alone_and_in_company(library: Any, vocab: int, dtype: mx.Dtype, kernels: str) -> None:
    assert library.use_kernels(kernels)
    for seed in range(4):
        x = logits(9, vocab, dtype, seed, spread=0.5 + seed)
        for limit in {vocab, max(1, vocab - 3), (vocab + 1) // 2}:
            ids, best = greedy_reference(x, limit)
            for threads in (1, 3):
                library.set_threads(threads)
                found = library.greedy(x, limit)
                assert found[0].tolist() == ids.tolist() and found[1].tolist() == best.tolist()
                for row in (0, 8):
                    alone = library.greedy(x[row : row + 1], limit)
                    assert alone[0].item() == ids[row].item() and alone[1].item() == best[row].item()


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_equal_ones_the_first_and_what_rounding_makes_equal(library: Any, dtype: mx.Dtype, kernels: str) -> None:
    assert library.use_kernels(kernels)
    x = np.zeros((3, 9000), dtype=np.float32)
    x[0, [100, 4100, 8999]] = 2.0
    x[1, 8999] = 1.0
    x[2, 5] = -0.0
    assert library.greedy(mx.array(x).astype(dtype), 9000)[0].tolist() == [100, 8999, 0]


@pytest.mark.parametrize("kernels", SETS)
def test_what_the_subtraction_rounds_together_is_equal(library: Any, kernels: str) -> None:
    assert library.use_kernels(kernels)
    steps = np.arange(300, dtype=np.float32) * np.float32(2.0**-12)  # apart in float16; 6 less than them are not
    near = mx.array(steps + np.float32(0.25)).astype(mx.float16)[None]
    found = library.greedy(near, 300)[0].item()
    assert found == greedy_reference(near, 300)[0].item() and found < mx.argmax(near).item()


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_broken_logits_are_told(library: Any, dtype: mx.Dtype, kernels: str) -> None:
    assert library.use_kernels(kernels)
    x = np.array(logits(6, 5000).tolist(), dtype=np.float32)
    x[1, 4500] = math.nan
    x[2, 10] = math.inf
    x[3, :] = -math.inf
    x[4, :4999] = -math.inf
    x[5, 4999] = math.nan
    given = mx.array(x).astype(dtype)
    best = library.greedy(given, 5000)[1].tolist()
    assert [math.isfinite(b) for b in best] == [True, False, False, False, True, False]
    assert library.greedy(given, 5000)[0].tolist()[4] == 4999
    assert math.isfinite(library.greedy(given, 4999)[1].tolist()[5])  # beyond the limit it does not matter


def test_shapes_and_refusals(library: Any) -> None:
    x = logits(12, 33).reshape(3, 4, 33)
    want = mx.argmax(x, axis=-1)
    assert library.greedy(x, 33)[0].tolist() == want.tolist()
    turned = mx.contiguous(x.swapaxes(0, 2)).swapaxes(0, 2)
    assert library.greedy(turned, 33)[0].tolist() == want.tolist()
    assert library.greedy(x[:0], 33)[0].shape == (0, 4)
    for bad, limit in ((x.astype(mx.int32), 33), (x[..., :0], 1), (x, 0), (x, 34), (mx.array(1.0), 1)):
        with pytest.raises(ValueError, match="found"):
            library.greedy(bad, limit)


def test_it_takes_the_place_of_core_s(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library is not None
    monkeypatch.setenv("MLX_SPEC_KERNELS", "on")
    reset_settings()
    holder = nn.Sequential(GreedyChoice())
    use = use_kernels(None, holder)
    assert type(holder.layers[0]) is RowGreedyChoice and "greedy 1" in use.line()
    x = logits(2, 70, mx.bfloat16).reshape(1, 2, 70)
    for limit in (None, 70, 50, 90):
        ids, check = holder.layers[0](x, limit)
        plain = GreedyChoice()(x, limit)
        assert ids.tolist() == plain[0].tolist() and ids.dtype == mx.int32
        assert mx.isfinite(check).tolist() == mx.isfinite(plain[1]).tolist() and check.shape == plain[1].shape
