"""Decoder layers of mlx-lm that run as one operation, over storage that their state lends them.

Covered are layers that do what `FAMILIES` says, once their parts run on the library's kernels. States that lend no
storage append by themselves, between two operations. A layer keeps its parts, parameters and names; when one of them
is replaced by something else later, its own code runs.
"""

# mypy: disable-error-code="misc, no-any-return"
# mlx.nn is untyped to mypy: its classes and calls are Any.

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.state import KVState

from .activation import acting
from .attention import attend, attending
from .blueprint import Run, stays, width
from .modules import RowLinear, RowQuantizedLinear, RowRMSNorm, packed
from .native import library
from .recipe import Recipe
from .rope import rotation
from .twins import twin

FAMILIES = ("llama", "qwen2", "qwen3")
"""Modules of mlx-lm whose TransformerBlock is h = x + attention(norm(x)), then h + down(silu(gate) * up) of norm(h)."""


class Held:
    """The operations of a layer for one dtype, and the parts and parameters they were made of."""

    def __init__(self, block: Any, dtype: mx.Dtype):
        self.dtype = dtype
        self.holders = list(block.modules())
        self.parts = [part for holder in self.holders for part in holder.values()]
        self.runs: tuple[Run, Run, Run] | None = None
        # names with an underscore are no parameters: wavelengths, say, which only turn what they are given
        own = [part for holder in self.holders for name, part in holder.items() if not name.startswith("_")]
        if covered(block) and all(stays(part, dtype) for part in own):
            at_once, before, after = whole(block), before_attention(block), after_attention(block)
            self.runs = at_once.build(dtype), before.build(dtype), after.build(dtype)

    def stale(self) -> bool:
        """Whether a part or a parameter is another one now."""
        return not library().hold(self.holders, self.parts)


def run_block(block: Any, x: mx.array, mask: Any, cache: Any) -> mx.array | None:
    """x (B, L, D) -> (B, L, D), attending over `cache`; None when the layer has to run part by part."""
    held = block.__dict__.get("_held")
    if held is None or held.dtype != x.dtype or held.stale():
        held = block.__dict__["_held"] = Held(block, x.dtype)
    if held.runs is None or x.ndim != 3:
        return None
    at_once, before, after = held.runs
    count = x.shape[1]
    causal = (isinstance(mask, str) and mask == "causal") or (mask is None and count == 1)
    room = cache.room(count) if causal and isinstance(cache, KVState) else None
    if room is not None and room.keys.dtype == x.dtype:
        y, keys, values = at_once(
            x, offset=cache.offset, keys=room.keys, values=room.values, low=room.low, start=room.start
        )
        cache.fill(keys, values, count)
        return y
    offset = 0 if cache is None else cache.offset
    queries, keys, values = before(x, offset=offset.astype(mx.int32) if isinstance(offset, mx.array) else offset)
    if cache is not None:
        keys, values = cache.update_and_fetch(keys, values)
    (y,) = after(x, attend(queries, keys, values, cache, block["self_attn"].scale, mask))
    return y


def whole(block: Any) -> Recipe:
    """x -> what the layer gives, attention included."""
    attention, recipe = block.self_attn, Recipe()
    x = recipe.input(width(attention.q_proj))
    queries, keys, values = _before(recipe, x, block)
    attended = recipe.attend(queries, keys, values, attention.n_heads, attention.n_kv_heads, attention.scale)
    recipe.output(_after(recipe, x, attended, block))
    return recipe


def before_attention(block: Any) -> Recipe:
    """x -> queries (B, H, L, D), keys and values (B, Hkv, L, D)."""
    attention, recipe = block.self_attn, Recipe()
    made = _before(recipe, recipe.input(width(attention.q_proj)), block)
    for result, heads in zip(made, (attention.n_heads, attention.n_kv_heads, attention.n_kv_heads), strict=True):
        recipe.output(result, heads)
    return recipe


def after_attention(block: Any) -> Recipe:
    """x, what the attention gave (B, H, L, D) -> what the layer gives."""
    attention, recipe = block.self_attn, Recipe()
    x = recipe.input(width(attention.q_proj))
    recipe.output(_after(recipe, x, recipe.input(width(attention.o_proj), attention.n_heads), block))
    return recipe


def _before(recipe: Recipe, x: int, block: Any) -> list[int]:
    """Queries, keys and values, heads side by side."""
    attention = block.self_attn
    normed = _norm(recipe, x, block.input_layernorm)
    made = [_linear(recipe, normed, attention[name]) for name in ("q_proj", "k_proj", "v_proj")]
    for i, name in enumerate(("q_norm", "k_norm")):
        if name in attention:
            made[i] = _norm(recipe, made[i], attention[name])
    for i, heads in enumerate((attention.n_heads, attention.n_kv_heads)):
        made[i] = recipe.rotate(made[i], heads, *rotation(attention.rope))
    return made


def _after(recipe: Recipe, x: int, attended: int, block: Any) -> int:
    """What the layer gives."""
    mlp = block.mlp
    h = recipe.combine("add", x, _linear(recipe, attended, block.self_attn.o_proj))
    normed = _norm(recipe, h, block.post_attention_layernorm)
    gate, up = _linear(recipe, normed, mlp.gate_proj), _linear(recipe, normed, mlp.up_proj)
    down = _linear(recipe, recipe.combine("silu", gate, up), mlp.down_proj)
    return recipe.combine("add", h, down)


def covered(block: Any) -> bool:
    """Whether every part is the library's own."""
    own: Any = type(block) if type(block) in block_kinds() else type(block).__base__
    family: Any = import_module(own.__module__)
    attention: Any = block.self_attn
    mlp: Any = block.mlp
    kinds = (type(attention), type(mlp))
    known = [(attending(family.Attention), mlp_kind) for mlp_kind in (family.MLP, acting(family.MLP))]
    if kinds not in known or rotation(attention.rope) is None:
        return False
    linear = [attention[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    linear += [mlp[name] for name in ("gate_proj", "up_proj", "down_proj")]
    norms = [block.input_layernorm, block.post_attention_layernorm]
    norms += [attention[name] for name in ("q_norm", "k_norm") if name in attention]
    return all(type(m) in (RowLinear, RowQuantizedLinear) for m in linear) and all(type(m) is RowRMSNorm for m in norms)


def swap_block(module: nn.Module) -> nn.Module | None:
    """A layer of `FAMILIES` as one that runs in one operation; None unless its parts are the library's."""
    kind = block_kinds().get(type(module))
    return twin(module, kind) if kind is not None and covered(module) else None


@cache
def block_kinds() -> dict[type, Any]:
    """mlx-lm's decoder layers -> their subclasses here."""
    return {kind: _subclass(kind) for kind in (import_module(f"mlx_lm.models.{f}").TransformerBlock for f in FAMILIES)}


def _subclass(kind: Any) -> type:
    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """x (B, L, D) -> (B, L, D)."""
        y = run_block(self, x, mask, cache)
        return kind.__call__(self, x, mask, cache) if y is None else y

    return type(f"Row{kind.__name__}", (kind,), {"__call__": call, "__doc__": kind.__doc__, "__module__": __name__})


def _linear(recipe: Recipe, of: int, layer: Any) -> int:
    weights = packed(layer) if "scales" in layer else {"weight": layer["weight"]}
    return recipe.linear(of, bias=layer.get("bias"), **weights)


def _norm(recipe: Recipe, of: int, layer: Any) -> int:
    return recipe.norm(of, layer["weight"], layer.eps, layer["weight"].size)
