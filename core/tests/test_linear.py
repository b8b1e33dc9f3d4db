"""Linear layers with their transposed weight at hand."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from pairs import tiny_target

from mlx_spec.linear import HeldLinear, hold_transposes


class Adapted(nn.Linear):
    """A layer of somebody else's kind."""


class Block(nn.Module):
    def __init__(self, bias: bool):
        super().__init__()
        self.rows = [nn.Linear(48, 80, bias=bias), nn.Linear(80, 24, bias=bias)]
        self.packed = nn.QuantizedLinear(64, 32)
        self.adapted = Adapted(8, 8)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_results_keep_their_bytes(dtype, bias):
    plain, held = Block(bias), Block(bias)
    plain.set_dtype(dtype)
    held.update(plain.parameters())
    hold_transposes(held)
    assert [type(layer) for layer in held.rows] == [HeldLinear, HeldLinear]
    assert type(held.packed) is nn.QuantizedLinear and type(held.adapted) is Adapted
    names = [name for name, _ in tree_flatten(held.parameters())]
    assert sorted(names) == sorted(name for name, _ in tree_flatten(plain.parameters()))
    for rows in (1, 5):
        x = mx.random.normal((2, rows, 48)).astype(dtype)
        wanted, found = (block.rows[1](block.rows[0](x)) for block in (plain, held))
        assert bytes(memoryview(found.view(mx.uint8))) == bytes(memoryview(wanted.view(mx.uint8)))


def test_a_replaced_weight_is_followed():
    layer = HeldLinear.of(nn.Linear(6, 4, bias=False))
    x = mx.random.normal((3, 6))
    layer.weight = mx.ones((4, 6))
    assert mx.array_equal(layer(x), x @ mx.ones((6, 4)))


def test_loaded_targets_hold_theirs():
    layers = [m for m in tiny_target("llama").model.modules() if isinstance(m, nn.Linear)]
    assert layers and all(type(layer) is HeldLinear for layer in layers)
