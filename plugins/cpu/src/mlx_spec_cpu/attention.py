"""mlx-lm's attention function on the kernel, for the layers that call it."""

# mypy: disable-error-code="misc, no-any-return"
# mlx.nn is untyped to mypy: its classes and calls are Any.

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

from .native import library
from .twins import FLOATS, GROUPS, caller, calling

KV_BITS = (4, 8)


def attend(
    queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None = None
) -> mx.array:
    """As mlx-lm's function, which sinks go to: (B, H, L, D) over plain or packed K/V -> (B, H, L, Dv)."""
    masked, packed = isinstance(mask, mx.array), not isinstance(keys, mx.array)
    stored = (keys[1], values[1]) if packed else (keys, values)
    alike = all(part.dtype in FLOATS and (packed or part.dtype == queries.dtype) for part in stored)
    known = not packed or (cache.bits in KV_BITS and cache.group_size in GROUPS["affine"])
    if sinks is not None or not (alike and known) or queries.dtype not in FLOATS or (masked and not _added(mask)):
        return base.scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
    hidden = (mask if masked else None, mask == "causal")
    if packed:
        return library().packed_attention(queries, keys, values, scale, cache.group_size, cache.bits, *hidden)
    return library().attention(queries, keys, values, scale, *hidden)


def _added(mask: mx.array) -> bool:
    return mask.dtype in (mx.bool_, *FLOATS)


MEANINGS = (("scaled_dot_product_attention", base.scaled_dot_product_attention, attend),)


def swap_attention(module: nn.Module) -> nn.Module | None:
    """A layer whose code calls mlx-lm's attention function, as one that calls `attend`; None for others."""
    return caller(module, MEANINGS)


def attending(kind: Any) -> type | None:
    """The subclass of an attention layer that runs the same code and means `attend` by the name."""
    return calling(kind, MEANINGS)
