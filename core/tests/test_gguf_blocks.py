"""Tensor types of GGUF against scalar dequantisation, and their packing against MLX's own."""

from __future__ import annotations

import ggufs
import mlx.core as mx
import numpy as np
import pytest

from mlx_spec.gguf.blocks import OTHERS, TYPES, Affine, pack, type_name

BY_NAME = {kind.name: kind for kind in TYPES.values()}
PACKED = [name for name, kind in BY_NAME.items() if kind.bits]


def blocks(name: str, count: int = 7) -> bytes:
    return ggufs.random_blocks(name, (count, BY_NAME[name].weights), seed=11)


def decoded(name: str, data: bytes):
    return BY_NAME[name].decode(np.frombuffer(data, np.uint8).reshape(-1, BY_NAME[name].nbytes))


def test_sizes_are_those_of_the_tests_own_table():
    for number, kind in TYPES.items():
        assert ggufs.TYPES[kind.name] == (number, kind.weights, kind.nbytes)
    assert not TYPES.keys() & OTHERS.keys()
    assert (type_name(12), type_name(11), type_name(77)) == ("Q4_K", "Q3_K", "type 77")


@pytest.mark.parametrize("name", PACKED)
def test_codes_scale_and_bias_are_the_files(name):
    data = blocks(name)
    groups = decoded(name, data)
    assert isinstance(groups, Affine) and groups.codes.dtype == np.uint8 and groups.codes.shape[1] == 32
    assert groups.codes.max() < 2 ** BY_NAME[name].bits
    exact = groups.codes * groups.scales.astype(np.float64)[:, None] + groups.biases.astype(np.float64)[:, None]
    assert np.array_equal(exact.ravel(), ggufs.dequantise(name, data))


@pytest.mark.parametrize("name", sorted(BY_NAME.keys() - {*PACKED}))
def test_floats_are_the_files(name):
    data = blocks(name)
    values = decoded(name, data)
    assert values.dtype == np.float32
    assert np.array_equal(values.ravel(), ggufs.dequantise(name, data).astype(np.float32))


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_packing_is_mlx(bits):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 96), dtype=np.uint8)
    scales, biases = mx.ones((3, 3)), mx.zeros((3, 3))
    back = mx.dequantize(mx.array(pack(codes, bits)), scales, biases, group_size=32, bits=bits)
    assert np.array_equal(np.array(back), codes)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_mlx_reads_the_same_from_the_file(name, tmp_path):
    shape = (5, 96)
    made = ggufs.Made(
        {"general.architecture": "llama"}, {"t.weight": (shape, name, ggufs.random_blocks(name, shape, 5))}
    )
    theirs = mx.load(str(made.write(tmp_path / "m.gguf")))
    groups = decoded(name, made.tensors["t.weight"][2])
    bits = BY_NAME[name].bits
    assert np.array_equal(np.array(theirs["t.weight"]), pack(groups.codes.reshape(5, -1), bits))
    assert np.array_equal(np.array(theirs["t.scales"]).astype(np.float32), groups.scales.reshape(5, -1))
    assert np.array_equal(np.array(theirs["t.biases"]).astype(np.float32), groups.biases.reshape(5, -1))
