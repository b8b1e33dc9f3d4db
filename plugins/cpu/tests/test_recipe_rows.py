"""Operations in a row run row by row, on one thread or several: the bytes of every one of them alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from cpu_layers import raw

from mlx_spec_cpu.recipe import Recipe

HEADS, WIDTH = 3, 96
DTYPES = [mx.float32, mx.bfloat16, mx.float16]


def normal(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def wavelengths(i: int) -> mx.array:
    return 1 / (30.0 + 7 * i) ** (mx.arange(0, 32, 2) / 32)


Op = tuple[str, tuple[Any, ...], dict[str, Any]]  # of a recipe, less the result it reads


def chain(dtype: mx.Dtype) -> list[Op]:
    """What reads the result before it; more rotations of different angles than are kept."""
    ops: list[Op] = [("norm", (normal(WIDTH, seed=1, dtype=dtype), 1e-6, WIDTH), {})]
    for i in range(6):
        ops.append(("rotate", (HEADS, 32, False, 1.0, wavelengths(i)), {}))
    ops.append(("linear", (), {"weight": normal(16, WIDTH, seed=2, dtype=dtype)}))
    ops.append(("linear", (), {"weight": normal(WIDTH, 16, seed=3, dtype=dtype)}))
    ops.append(("norm", (None, 1e-6, WIDTH // HEADS), {}))
    ops.append(("scale", (normal(WIDTH, seed=4, dtype=dtype),), {}))
    ops.append(("linear", (), {"weight": normal(2 * WIDTH, WIDTH, seed=5, dtype=dtype)}))  # none of every row's own
    return ops


def written(ops: list[Op], dtype: mx.Dtype, ids: bool) -> Any:
    recipe = Recipe()
    of = recipe.embed(recipe.ids(), weight=normal(50, WIDTH, seed=6, dtype=dtype)) if ids else recipe.input(WIDTH)
    for name, args, given in ops:
        of = getattr(recipe, name)(of, *args, **given)
    last = recipe.combine("add", recipe.combine("gelu", of, of), of)
    recipe.output(recipe.join(last, of))
    return recipe.build(dtype)


def one_by_one(ops: list[Op], x: mx.array, offset: int) -> mx.array:
    """The same, an operation to a recipe."""
    for name, args, given in [*ops, ("gelu", (), {})]:
        recipe = Recipe()
        of = recipe.input(x.shape[-1])
        if name == "gelu":
            recipe.output(recipe.join(recipe.combine("add", recipe.combine("gelu", of, of), of), of))
        else:
            recipe.output(getattr(recipe, name)(of, *args, **given))
        (x,) = recipe.build(x.dtype)(x, offset=offset)
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_together_have_the_bytes_of_each_operation_on_each_row(library: Any, dtype: mx.Dtype) -> None:
    ops, table = chain(dtype), normal(50, WIDTH, seed=6, dtype=dtype)
    program = written(ops, dtype, ids=True)
    ids = mx.array([[(7 * i) % 50 for i in range(70)]], mx.int32)
    alone = [raw(one_by_one(ops, table[ids[:, i : i + 1]], 5 + i)) for i in range(70)]
    for threads in (1, 2, 5):
        library.set_threads(threads)
        for rows in (*range(1, 20), 33, 70):
            (y,) = program(ids[:, :rows], offset=5)
            assert [raw(y[:, r : r + 1]) for r in range(rows)] == alone[:rows], f"{rows} rows, {threads} threads"


@pytest.mark.parametrize("rows", [1, 2])
def test_few_wide_rows_are_divided_among_threads(library: Any, rows: int) -> None:
    """Fewer rows than threads: their elements and heads are shared instead."""
    width = 9000
    recipe = Recipe()
    of = recipe.norm(recipe.input(width), None, 1e-6, width // 60)
    recipe.output(recipe.norm(recipe.combine("gelu", of, of), None, 1e-6, width))
    program = recipe.build(mx.bfloat16)
    x = normal(1, rows, width, dtype=mx.bfloat16)
    library.set_threads(1)
    (expected,) = program(x)
    library.set_threads(4)
    assert raw(program(x)[0]) == raw(expected)
