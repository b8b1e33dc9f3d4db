"""Tensor types of GGUF, and how they fit MLX's affine layout of 32 weights to a group.

A weight there is code * scale + bias. A GGUF row is a run of blocks. Types whose scale and minimum belong to 32
weights (or to 32 of a block of 256) are the same numbers in MLX, differently packed: their codes are moved, nothing is
quantised again. Q6_K has a scale per 16 weights, which MLX has not: it becomes floats. Block layouts: ggml-common.h and
ggml-quants.c of ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
LOW, FOUR = np.uint8(15), np.uint8(4)
GROUP = 32
"""Weights that share a scale and a bias in what is written."""


class Affine(NamedTuple):
    """Groups of 32 weights, code * scale + bias: codes (G, 32) uint8, scales and biases (G,) float32."""

    codes: Bytes
    scales: Floats
    biases: Floats


@dataclass(frozen=True, slots=True)
class TensorType:
    """One type that can be converted.

    Attributes:
        weights, nbytes: of one block.
        bits: of the MLX layout; 0 when the weights are written as floats.
        decode: blocks (N, nbytes) uint8 -> Affine, or floats (N, weights) float32 when bits is 0.
    """

    name: str
    weights: int
    nbytes: int
    bits: int
    decode: Callable[[Bytes], Any]


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of every block, as float32 (N,)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")[:, 0].astype(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    """(..., k) bytes -> (..., 2 * k) codes: the low halves of a run of bytes come before the high ones."""
    return np.concatenate([data & LOW, data >> FOUR], axis=-1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """Bit i of the 32-bit word at byte `at`, shifted to be the fifth bit of weight i: (N, 32)."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << FOUR


# -- 32 weights to a block -----------------------------------------------------------------------------------


def _q4_0(blocks: Bytes) -> Affine:
    """d * (code - 8): d float16, 16 bytes of codes."""
    d = _half(blocks, 0)
    return Affine(_nibbles(blocks[:, 2:]), d, -8 * d)


def _q4_1(blocks: Bytes) -> Affine:
    """d * code + m: d and m float16, 16 bytes of codes."""
    return Affine(_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> Affine:
    """d * (code - 16): d float16, 4 bytes of fifth bits, 16 bytes of low bits."""
    d = _half(blocks, 0)
    return Affine(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2), d, -16 * d)


def _q5_1(blocks: Bytes) -> Affine:
    """d * code + m: d and m float16, 4 bytes of fifth bits, 16 bytes of low bits."""
    return Affine(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> Affine:
    """d * code: d float16, 32 signed codes, of which 128 more are unsigned ones."""
    d = _half(blocks, 0)
    return Affine(blocks[:, 2:] ^ np.uint8(128), d, -128 * d)


# -- 256 weights to a block ----------------------------------------------------------------------------------


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum of the 8 groups of a block, (N, 8) each: d and dmin float16, 6 bits per group."""
    low, high, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, rest & 15 | low >> 6 << 4], axis=1)
    minima = np.concatenate([high & 63, rest >> 4 | high >> 6 << 4], axis=1)
    return _half(blocks, 0)[:, None] * scales, _half(blocks, 2)[:, None] * minima


def _q4_k(blocks: Bytes) -> Affine:
    """Scale * code - minimum: d, dmin, 12 bytes of scales, 128 bytes of codes, 64 weights to 32 bytes."""
    scales, minima = _k_scales(blocks)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return Affine(codes.reshape(-1, GROUP), scales.ravel(), -minima.ravel())


def _q5_k(blocks: Bytes) -> Affine:
    """As Q4_K, and 32 bytes before the codes whose bit g is the fifth bit of the weights of group g."""
    scales, minima = _k_scales(blocks)
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, GROUP)
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    return Affine((codes | fifth << FOUR).reshape(-1, GROUP), scales.ravel(), -minima.ravel())


def _q6_k(blocks: Bytes) -> Floats:
    """d * scale * (code - 32), (N, 256): 128 bytes of low bits, 64 of high ones, 16 signed scales, d.

    Weight w of a half block of 128 has its low bits in byte w % 64, the upper half when w >= 64, and its high
    bits in byte w % 32, at place w // 32.
    """
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    codes = (low | high.reshape(-1, 2, 128) << 4).astype(np.int8) - 32
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32) * _half(blocks, 208)[:, None]
    return (codes.reshape(-1, 16, 16) * scales[:, :, None]).reshape(-1, 256)


# -- floats --------------------------------------------------------------------------------------------------


def _f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f4").astype(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    """The upper half of a float32."""
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4, 0, _f32),
    1: TensorType("F16", 1, 2, 0, _f16),
    2: TensorType("Q4_0", 32, 18, 4, _q4_0),
    3: TensorType("Q4_1", 32, 20, 4, _q4_1),
    6: TensorType("Q5_0", 32, 22, 5, _q5_0),
    7: TensorType("Q5_1", 32, 24, 5, _q5_1),
    8: TensorType("Q8_0", 32, 34, 8, _q8_0),
    12: TensorType("Q4_K", 256, 144, 4, _q4_k),
    13: TensorType("Q5_K", 256, 176, 5, _q5_k),
    14: TensorType("Q6_K", 256, 210, 0, _q6_k),
    30: TensorType("BF16", 1, 2, 0, _bf16),
}
"""What can be converted, by ggml type number."""

OTHERS = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Names of the types that cannot."""


def type_name(number: int) -> str:
    """What a ggml type number is called."""
    return TYPES[number].name if number in TYPES else OTHERS.get(number, f"type {number}")


def pack(codes: Bytes, bits: int) -> npt.NDArray[np.uint32]:
    """Codes (..., 32 * k) of 4, 5 or 8 bits -> (..., bits * k) uint32: code i begins at bit i * bits."""
    if bits == 8:
        packed = codes
    elif bits == 4:
        packed = codes[..., 0::2] | codes[..., 1::2] << FOUR
    else:
        eights = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint64) << np.arange(
            0, 8 * bits, bits, dtype=np.uint64
        )
        words = np.bitwise_or.reduce(eights, axis=-1)  # bits * 8 of 64 bits are used
        packed = words[..., None].view(np.uint8)[..., :bits].reshape(*codes.shape[:-1], -1)
    return np.ascontiguousarray(packed).view("<u4")
