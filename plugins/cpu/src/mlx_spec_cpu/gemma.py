"""Decoder layers of mlx-lm's Gemma 3 and Gemma 4 that run as one operation.

Norms stand before and after both halves of a layer. Gemma 4 adds layers that read the keys and values of an earlier
one, inputs of each layer's own, values that are the keys, and a factor at the end. Layers with experts stay as they
are. What was said of `layers` holds here too.
"""

# mypy: disable-error-code="misc, no-any-return"
# mlx.nn is untyped to mypy: its classes and calls are Any.

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma3_text, gemma4_text

from mlx_spec.state import KVState, WindowState

from .activation import RowGemma3MLP, acting
from .attention import attend, attending
from .blueprint import Blueprint, Built, UncoveredError, built_of, width
from .twins import twin


class Stored:
    """Keys and values of a layer where they are stored, for layers that read them; unpacks to arrays.

    Attributes:
        keys, values: storage (1, Hkv, capacity, D), read from physical row `low` up to `end`.
        window: keys a row sees, 0 for all.
    """

    def __init__(self, keys: mx.array, values: mx.array, low: int, end: int, window: int):
        self.keys, self.values, self.low, self.end, self.window = keys, values, low, end, window

    def __iter__(self) -> Iterator[mx.array]:
        return iter([self.keys[:, :, self.low : self.end], self.values[:, :, self.low : self.end]])


class Layer:
    """What one decoder layer computes, as blueprints.

    Args:
        block: a decoder layer of mlx-lm's Gemma 3 or 4.
    """

    def __init__(self, block: Any):
        self.block, self.attention = block, block.self_attn
        self.heads, self.key_heads = self.attention.n_heads, self.attention.n_kv_heads
        self.scale = self.attention.scale
        self.gated = block.get("per_layer_input_gate") is not None

    def whole(self, b: Blueprint, window: int) -> None:
        """x, per-layer input -> what the layer gives; attends over a state's storage."""
        x, side = self._inputs(b)
        q, k, v = self._rows(b, b.normed(x, self.block.input_layernorm))
        self._finish(b, x, b.attend(q, k, v, self.heads, self.key_heads, self.scale, window), side)

    def reader(self, b: Blueprint, window: int) -> None:
        """The same over lent storage."""
        x, side = self._inputs(b)
        queries = self._queries(b, b.normed(x, self.block.input_layernorm))
        self._finish(b, x, b.look(0, queries, self.heads, self.key_heads, self.scale, window), side)

    def before(self, b: Blueprint) -> None:
        """x -> queries, keys and values (B, heads, L, D)."""
        x = b.input(width(self.attention.q_proj))
        made = self._rows(b, b.normed(x, self.block.input_layernorm))
        for result, heads in zip(made, (self.heads, self.key_heads, self.key_heads), strict=True):
            b.output(result, heads)

    def asking(self, b: Blueprint) -> None:
        """x -> queries."""
        x = b.input(width(self.attention.q_proj))
        b.output(self._queries(b, b.normed(x, self.block.input_layernorm)), self.heads)

    def after(self, b: Blueprint) -> None:
        """x, per-layer input, what the attention gave -> what the layer gives."""
        x, side = self._inputs(b)
        self._finish(b, x, b.input(width(self.attention.o_proj), self.heads), side)

    def _inputs(self, b: Blueprint) -> tuple[int, int]:
        x = b.input(width(self.attention.q_proj))
        return x, b.input(width(self.block.per_layer_projection)) if self.gated else -1

    def _queries(self, b: Blueprint, normed: int) -> int:
        made = b.normed(b.apply(normed, self.attention.q_proj), self.attention.q_norm)
        return b.turn(made, self.heads, self.attention.rope)

    def _rows(self, b: Blueprint, normed: int) -> tuple[int, int, int]:
        a = self.attention
        q, k = b.apply(normed, a.q_proj), b.apply(normed, a.k_proj)
        v = k if "v_proj" not in a else b.apply(normed, a.v_proj)
        q, k, size = b.normed(q, a.q_norm), b.normed(k, a.k_norm), a.head_dim
        v = b.normed(v, a.v_norm, size) if "v_norm" in a else v
        return b.turn(q, self.heads, a.rope), b.turn(k, self.key_heads, a.rope), v

    def _finish(self, b: Blueprint, x: int, attended: int, side: int) -> None:
        block, mlp = self.block, self.block.mlp
        merged = b.apply(attended, self.attention.o_proj)
        h = b.combine("add", x, b.normed(merged, block.post_attention_layernorm))
        normed = b.normed(h, block.pre_feedforward_layernorm)
        gate, up = b.apply(normed, mlp.gate_proj), b.apply(normed, mlp.up_proj)
        down = b.apply(b.combine("gelu", gate, up), mlp.down_proj)
        h = b.combine("add", h, b.normed(down, block.post_feedforward_layernorm))
        if self.gated:
            own = b.apply(b.combine("gelu", b.apply(h, block.per_layer_input_gate), side), block.per_layer_projection)
            h = b.combine("add", h, b.normed(own, block.post_per_layer_input_norm))
        b.output(b.weighted(h, block.layer_scalar) if block.get("layer_scalar") is not None else h)


def run_layer(
    block: Any, x: mx.array, mask: Any, cache: Any, side: mx.array | None, shared: Any, offset: Any
) -> tuple[mx.array, Any, Any] | None:
    """What mlx-lm's Gemma 4 layer gives: x (B, L, D) -> (B, L, D), its K/V, the offset of row 0.

    None when the layer's own code has to run.
    """
    if x.ndim != 3 or (side is None) == ("per_layer_input_gate" in block and block.per_layer_input_gate is not None):
        return None
    if side is not None and side.dtype != x.dtype:
        return None
    held = built_of(block, x.dtype)
    given = [x] if side is None else [x, side]
    if shared is not None:
        return _read(held, block, given, mask, cache, shared, offset)
    return _own(held, block, given, mask, cache)


def _own(held: Built, block: Any, given: list[mx.array], mask: Any, cache: Any) -> tuple[mx.array, Any, Any] | None:
    """A layer with keys and values of its own."""
    x, count = given[0], given[0].shape[1]
    window = cache.window if isinstance(cache, WindowState) else 0
    room = cache.room(count) if isinstance(cache, KVState) and _in_order(mask, count, window) else None
    offset = 0 if cache is None else cache.offset
    if room is not None and room.keys.dtype == x.dtype:
        whole = held.run("whole", lambda b: Layer(block).whole(b, window))
        if whole is None:
            return None
        y, keys, values = whole(
            *given, offset=offset, keys=room.keys, values=room.values, low=room.low, start=room.start
        )
        cache.fill(keys, values, count)
        return y, Stored(keys, values, room.low, room.start + count, window), offset
    layer = Layer(block)
    before, after = held.run("before", layer.before), held.run("after", layer.after)
    if before is None or after is None:
        return None
    queries, keys, values = before(x, offset=_int32(offset))
    kv = (keys, values) if cache is None else cache.update_and_fetch(keys, values)
    (y,) = after(*given, attend(queries, kv[0], kv[1], cache, layer.scale, mask))
    return y, kv, offset


def _read(
    held: Built, block: Any, given: list[mx.array], mask: Any, cache: Any, shared: Any, offset: Any
) -> tuple[mx.array, Any, Any] | None:
    """A layer that reads the keys and values of another."""
    x = given[0]
    if isinstance(shared, Stored) and isinstance(offset, int) and _in_order(mask, x.shape[1], shared.window):
        reader = held.run(f"reader {shared.window}", lambda b: Layer(block).reader(b, shared.window))
        if reader is None:
            return None
        (y,) = reader(*given, offset=offset, lent=[(shared.keys, shared.values, shared.low, shared.end)])
        return y, shared, offset
    layer = Layer(block)
    asking, after = held.run("asking", layer.asking), held.run("after", layer.after)
    if asking is None or after is None:
        return None
    keys, values = shared
    (queries,) = asking(x, offset=_int32(offset))
    (y,) = after(*given, attend(queries, keys, values, cache, layer.scale, mask))
    return y, shared, offset


def _in_order(mask: Any, count: int, window: int) -> bool:
    """Whether a mask hides what comes after a row, and what its window has left behind, and nothing else.

    A state with a window makes a mask (L, T) for one row of a batch when it has to; others are of another making.
    """
    if isinstance(mask, mx.array):
        return window > 0 and mask.ndim == 2 and mask.shape[0] == count
    return bool(mask == "causal" or (mask is None and count == 1))


def _int32(offset: int | mx.array) -> int | mx.array:
    return offset.astype(mx.int32) if isinstance(offset, mx.array) else offset


def swap_gemma(module: nn.Module) -> nn.Module | None:
    """A decoder layer of Gemma 3 or 4 as one operation; None unless its parts are the library's."""
    kind = layer_kinds().get(type(module))
    return twin(module, kind) if kind is not None and covered(module) else None


def covered(block: Any) -> bool:
    """Whether every part is the library's own."""
    family = gemma4_text if isinstance(block, gemma4_text.DecoderLayer) else gemma3_text
    mlps = (RowGemma3MLP,) if family is gemma3_text else (gemma4_text.MLP, acting(gemma4_text.MLP))
    if type(block.self_attn) is not attending(family.Attention) or type(block.mlp) not in mlps or "experts" in block:
        return False
    layer, probe = Layer(block), Blueprint(mx.float32)
    try:
        layer.whole(probe, 0) if getattr(block.self_attn, "has_kv", True) else layer.reader(probe, 0)
    except UncoveredError:
        return False  # it stays as it is
    return True


@cache
def layer_kinds() -> dict[type, Any]:
    """mlx-lm's decoder layers -> their subclasses here."""
    return {gemma4_text.DecoderLayer: _gemma4(), gemma3_text.TransformerBlock: _gemma3()}


def _gemma4() -> type:
    kind: Any = gemma4_text.DecoderLayer

    def call(
        self: Any,
        x: mx.array,
        mask: Any = None,
        cache: Any = None,
        per_layer_input: mx.array | None = None,
        shared_kv: Any = None,
        offset: Any = None,
    ) -> Any:
        """x (B, L, D) -> (B, L, D), the K/V it attended to, the offset of its first row."""
        found = run_layer(self, x, mask, cache, per_layer_input, shared_kv, offset)
        return kind.__call__(self, x, mask, cache, per_layer_input, shared_kv, offset) if found is None else found

    return type("RowDecoderLayer", (kind,), {"__call__": call, "__doc__": kind.__doc__, "__module__": __name__})


def _gemma3() -> type:
    kind: Any = gemma3_text.TransformerBlock

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """x (B, L, D) -> (B, L, D)."""
        # in float16 a sum may not pass its largest value, which its own code sees to
        found = None if x.dtype == mx.float16 else run_layer(self, x, mask, cache, None, None, None)
        return kind.__call__(self, x, mask, cache) if found is None else found[0]

    return type("RowGemma3Block", (kind,), {"__call__": call, "__doc__": kind.__doc__, "__module__": __name__})
