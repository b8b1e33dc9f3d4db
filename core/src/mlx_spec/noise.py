"""Counter-based noise: every number is a pure function of (seed, position, stream).

`position` is the absolute index, in prompt + reply, of the token being drawn. No generator state exists, so
nothing depends on batch, width, order of rows or on what was drawn before. Streams never share a key:

    token      Gumbel; the same for target and drafter, which is what makes `coupled` agree
    draft      Gumbel; a drafter's own draw under `rejection`
    accept     uniform; the accept test under `rejection`
    residual   Gumbel; the target's own token under `rejection`, keyed by the first position of its round

Keys are 64-bit, made on the host with the SplitMix64 finaliser (Steele, Lea, Flood 2014): a bijection, so
two keys of one seed never meet; the numbers come from MLX's Threefry bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import mlx.core as mx

Stream = Literal["token", "draft", "accept", "residual"]
_STREAMS: dict[str, int] = {"token": 0, "draft": 1, "accept": 2, "residual": 3}
_MASK = 2**64 - 1
_TINY = 2.0**-33  # stands in for a uniform of exactly 0; keeps the largest Gumbel finite (22.9)


def _mix(value: int) -> int:
    """Scramble a 64-bit integer, one to one."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


@lru_cache(maxsize=1024)
def _seed_base(seed: int) -> int:
    """All 64 bits of a seed; a negative seed counts as its two's complement."""
    return _mix((seed & _MASK) ^ 0x9E3779B97F4A7C15)


def key64(seed: int, position: int, stream: Stream) -> int:
    """The 64-bit key; distinct for distinct (position, stream) of one seed while position < 2**62."""
    return _mix((_seed_base(seed) + 4 * position + _STREAMS[stream] + 1) & _MASK)


def gumbel(seeds: Sequence[int], positions: Sequence[Sequence[int]], stream: Stream, vocab_size: int) -> mx.array:
    """Standard Gumbel noise (B, L, V) float32, always finite.

    Args:
        seeds: one per row (B,).
        positions: host integers (B, L), L the same for every row.
    """
    rows, width = len(positions), len(positions[0])
    if not rows * width:
        return mx.zeros((rows, width, vocab_size))
    words = []
    for seed, row in zip(seeds, positions, strict=True):
        for position in row:
            key = key64(seed, position, stream)
            words.append((key >> 32, key & 0xFFFFFFFF))
    return _gumbel(mx.array(words, dtype=mx.uint32), vocab_size).reshape(rows, width, vocab_size)


def _gumbel(keys: mx.array, vocab_size: int) -> mx.array:
    """keys (N, 2) uint32 -> (N, V); small uniforms carry 32 bits: the tail that decides is fine."""
    uniforms = mx.vmap(lambda key: mx.random.uniform(shape=(vocab_size,), key=key))(keys)
    return -mx.log(-mx.log1p(-mx.maximum(uniforms, _TINY)))


def uniform(seeds: Sequence[int], positions: Sequence[Sequence[int]], stream: Stream = "accept") -> mx.array:
    """Uniforms (B, K) float32 strictly between 0 and 1: u <= 0 never holds and u <= 1 always does."""
    # 23 bits and a half are exact in float32
    rows = [
        [((key64(seed, position, stream) >> 41) + 0.5) * 2.0**-23 for position in row]
        for seed, row in zip(seeds, positions, strict=True)
    ]
    return mx.array(rows, dtype=mx.float32)
