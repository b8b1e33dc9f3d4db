"""Short columns of bfloat16, a column to a lane: one chain per result, the same in recipes, where they lie ready."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from cpu_layers import as_float64, raw

from mlx_spec_cpu.native import library as load
from mlx_spec_cpu.recipe import Recipe

SETS = load().kernel_names().split(",")
IN_LANES = [kernels for kernels in SETS if kernels == "avx512bf16"]


def columns(N: int, K: int, seed: int = 0) -> mx.array:
    return (mx.random.normal((N, K), key=mx.random.key(seed)) * 0.3).astype(mx.bfloat16)


def recipe_of(weight: mx.array, bias: mx.array | None) -> Any:
    recipe = Recipe()
    recipe.output(recipe.linear(recipe.input(weight.shape[1]), weight=weight, bias=bias))
    return recipe.build(mx.bfloat16)


@pytest.mark.parametrize("kernels", IN_LANES)
@pytest.mark.parametrize("K", [64, 512])
def test_a_result_is_one_chain_from_the_first_element_to_the_last(library: Any, kernels: str, K: int) -> None:
    """Two large elements cancel before small ones come; added up lane by lane, those would be lost."""
    assert library.use_kernels(kernels)
    row = mx.ones((9, K), mx.bfloat16)
    row[:, 0], row[:, 2], row[:, 1], row[:, 3] = 2.0**30, -(2.0**30), 0, 0
    weight = mx.ones((40, K), mx.bfloat16)
    assert library.linear(row.astype(mx.bfloat16), weight).tolist() == [[float(K - 4)] * 40] * 9


@pytest.mark.parametrize("K", [1, 2, 3, 16, 17, 31, 33, 64, 193, 256, 511, 512, 513])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kernels", SETS)
def test_recipes_and_single_layers_give_the_same_bytes(library: Any, kernels: str, K: int, biased: bool) -> None:
    assert library.use_kernels(kernels)
    for N in (1, 15, 16, 33, 192, 200):
        weight, x = columns(N, K), columns(19, K, seed=1)
        bias = columns(N, 1, seed=2)[:, 0] if biased else None
        program = recipe_of(weight, bias)
        exact = as_float64(x) @ as_float64(weight).T + (as_float64(bias) if bias is not None else 0)
        for threads in (1, 3):
            library.set_threads(threads)
            alone = [raw(library.linear(x[r : r + 1], weight, bias=bias)) for r in range(19)]
            for rows in (*range(1, 11), 16, 19):
                single, joined = library.linear(x[:rows], weight, bias=bias), program(x[None, :rows])[0][0]
                assert [raw(single[r : r + 1]) for r in range(rows)] == alone[:rows]
                assert raw(joined) == raw(single)
        assert abs(as_float64(single) - exact).max() < 5e-3 * abs(exact).max()


def test_a_recipe_built_for_other_kernels_runs(library: Any) -> None:
    """Its columns lie in lanes for the kernels it was built with, or do not."""
    weight, x = columns(50, 96), columns(5, 96, seed=1)
    for built in SETS:
        assert library.use_kernels(built)
        program = recipe_of(weight, None)
        for used in SETS:
            assert library.use_kernels(used)
            assert raw(program(x[None])[0][0]) == raw(library.linear(x, weight))
