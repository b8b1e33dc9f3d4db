"""Rope scaling of a GGUF file, in the words of mlx-lm's config.json."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .blocks import TYPES, Floats
from .container import Gguf, Tensor
from .metadata import Metadata
from .refusals import cannot

LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192  # every llama3 model published with a table of factors
CLOSE = 1e-4  # relative; the table is float32 arithmetic of the same formula


def rope_scaling(file: Gguf, own: Metadata, theta: float, head: int, table: Tensor | None) -> dict[str, Any] | None:
    """None, linear scaling from the metadata, or llama3 scaling from a table of factors; else LoadError.

    table: head // 2 divisors of the rotary frequencies, what llama.cpp's converter makes of "llama3" settings.
    """
    kind = own.text("rope.scaling.type", "none")
    if table is not None and kind in ("none", "llama3"):
        return _llama3(file, own, theta, head, table)
    if kind == "linear" and table is None:
        return {"rope_type": "linear", "factor": own.real("rope.scaling.factor")}
    if kind == "none":
        return None
    raise cannot(file.path, f"rope scaling {kind!r}", "none, linear, or the factors of llama3")


def _llama3(file: Gguf, own: Metadata, theta: float, head: int, table: Tensor) -> dict[str, Any]:
    """Settings whose factors are those of the table; the largest factor is the one of the long waves."""
    factors = _floats(file, table)
    original = own.size("rope.scaling.original_context_length", ORIGINAL)
    factor = float(factors.max())
    usable = factors.shape == (head // 2,) and 1 <= factor < math.inf
    if not usable or not _same(factors, llama3_factors(theta, head, factor, original)):
        raise cannot(
            file.path,
            f"a table of rope factors from {factors.min():.4g} to {factors.max():.4g}",
            f"the factors of llama3 (low {LOW:g}, high {HIGH:g}, original context {original})",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": original,
    }


def llama3_factors(theta: float, head: int, factor: float, original: int) -> Floats:
    """Divisors (head // 2,) of the rotary frequencies.

    1 for short waves, `factor` for long ones, smooth between. Formula: mlx-lm's Llama3RoPE, written as a divisor.
    """
    waves = 2 * math.pi * theta ** (np.arange(0, head, 2) / head)
    part = np.clip((original / waves - LOW) / (HIGH - LOW), 0, 1)
    return (1 / ((1 - part) / factor + part)).astype(np.float32)


def _same(a: Floats, b: Floats) -> bool:
    return bool(np.allclose(a, b, rtol=CLOSE, atol=0))


def _floats(file: Gguf, tensor: Tensor) -> Floats:
    """A small tensor of floats, read whole."""
    kind = TYPES[tensor.type]
    if kind.weights != 1 or tensor.size > 1 << 16:
        raise cannot(
            file.path, f"{tensor.name} of type {kind.name} and {tensor.size} values", "a short table of floats"
        )
    with file.path.open("rb") as stream:
        stream.seek(tensor.start)
        data = np.frombuffer(stream.read(tensor.size * kind.nbytes), np.uint8)
    values: Floats = kind.decode(data.reshape(-1, kind.nbytes)).ravel()
    return values
