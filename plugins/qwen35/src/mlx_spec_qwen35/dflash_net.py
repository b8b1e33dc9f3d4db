"""The DFlash network: one pass over [anchor, mask, mask, ...] guesses the token at every mask.

    context  = hidden_norm(fc([residual.i of the target, for the listed layers]))      one row per committed position
    h        = target.embed([anchor, mask * (L - 1)])
    layer    : x = input_layernorm(h);  queries from x;  keys and values from the context rows and from x
               h = h + o_proj(attention(x));  h = h + mlp(post_attention_layernorm(h))
    row j    : target.head(norm(h))[j] guesses the token at the anchor's position + j, with no shift

How it differs from a plain block: context rows skip the layers' input norms, so each layer's K/V of a position
are made once; nothing of a block is kept; in full-attention layers the rows of a block see each other in both
directions; sliding layers, unless the file says otherwise, see earlier rows only and look back `sliding_window`
positions per row. Keys, queries and context stand at absolute positions, whole heads are rotated.
Sources: z-lab `dflash/model_mlx.py`, mlx-vlm 0.7.10 `drafters/qwen3_dflash/dflash.py`. They read sliding
layers differently; which reading is taken moves acceptance only.
"""

# mypy: disable-error-code="misc, no-any-return"
# mlx.nn is untyped to mypy: its classes and calls are Any.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.qwen3 import MLP
from mlx_lm.models.rope_utils import initialize_rope

from mlx_spec.state import KVState, StateGroup, WindowState

from .dflash_config import DFlashConfig

if TYPE_CHECKING:
    from mlx_spec.state import State

Sublayer = Callable[[mx.array], mx.array]
MAX_BLOCK = 64
"""Rows a window can take back: core's widest block, and the longest piece of context read at once by unequal rows."""


class BlockAttention(nn.Module):
    """Attention of a block over the context and itself; the context's K/V lie in a state."""

    def __init__(self, config: DFlashConfig, layer: int):
        super().__init__()
        h, D = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.width = config.num_attention_heads, config.num_key_value_heads, D
        self.window, self.causal = config.window(layer), config.is_causal(layer)
        self.q_proj = nn.Linear(h, self.heads * D, bias=False)
        self.k_proj = nn.Linear(h, self.kv_heads * D, bias=False)
        self.v_proj = nn.Linear(h, self.kv_heads * D, bias=False)
        self.o_proj = nn.Linear(self.heads * D, h, bias=False)
        self.q_norm = nn.RMSNorm(D, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(D, eps=config.rms_norm_eps)
        self.rope = initialize_rope(
            D,
            base=config.rope_theta,
            traditional=not config.rope_is_neox_style,
            scaling_config=config.rope_scaling,
            max_position_embeddings=config.max_position_embeddings,
        )

    def make_state(self) -> State:
        """An empty context of one row."""
        return KVState() if self.window is None else WindowState(self.window, MAX_BLOCK)

    def append(self, x: mx.array, state: State) -> tuple[mx.array, mx.array]:
        """Put K/V of x (B, S, h) behind each row's own in `state`; returns what attention may read then."""
        keys = self.rope(self.k_norm(self._split(self.k_proj(x), self.kv_heads)), offset=state.offset)
        return state.update_and_fetch(keys, self._split(self.v_proj(x), self.kv_heads))

    def __call__(self, x: mx.array, state: State, mask: Any) -> mx.array:
        """x (B, L, h), a block behind the context in `state`, where it stays until it is taken back."""
        queries = self.rope(self.q_norm(self._split(self.q_proj(x), self.heads)), offset=state.offset)
        keys, values = self.append(x, state)
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.width**-0.5, mask=mask)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1))

    def _split(self, x: mx.array, heads: int) -> mx.array:
        """(B, S, heads * D) -> (B, heads, S, D)."""
        return x.reshape(*x.shape[:2], heads, self.width).transpose(0, 2, 1, 3)


class DFlashLayer(nn.Module):
    """Attention and MLP around a residual; `_around` is where DFlash2 puts its convolutions."""

    def __init__(self, config: DFlashConfig, layer: int):
        super().__init__()
        self.self_attn = BlockAttention(config, layer)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, h: mx.array, state: State, mask: Any) -> mx.array:
        """h (B, L, h) -> (B, L, h)."""

        def attend(x: mx.array) -> mx.array:
            return self.self_attn(x, state, mask)

        h = h + self._around("attention_conv", attend, self.input_layernorm(h))
        return h + self._around("mlp_conv", self.mlp, self.post_attention_layernorm(h))

    def _around(self, name: str, inner: Sublayer, x: mx.array) -> mx.array:
        return inner(x)


class DFlashNet(nn.Module):
    """The whole drafter, named as published checkpoints are; embedding and head are the target's."""

    def __init__(self, config: DFlashConfig, layer: Callable[[DFlashConfig, int], DFlashLayer] = DFlashLayer):
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.target_layer_ids) * h, h, bias=False)
        self.hidden_norm = nn.RMSNorm(h, eps=eps)
        self.layers = [layer(config, i) for i in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(h, eps=eps)

    def make_states(self) -> StateGroup:
        """An empty context of one row, one state per layer."""
        return StateGroup(layer.self_attn.make_state() for layer in self.layers)

    def extend(self, features: mx.array, states: StateGroup) -> None:
        """Lengthen every row's context by features (B, S, ids * H), the listed layers' outputs side by side."""
        context = self.hidden_norm(self.fc(features))
        for layer, state in zip(self.layers, states, strict=True):
            layer.self_attn.append(context, state)

    def __call__(self, embedded: mx.array, states: StateGroup, widths: Sequence[int]) -> mx.array:
        """A block at each row's end of context: embedded (B, L, h) -> normed rows 1.. (B, L - 1, h).

        widths: rows of the block that belong to each row (B,), 1 to L; those behind are padding that no other
        row sees. The states hold the block afterwards: take it back.
        """
        h, masks = embedded, dict[tuple[int | None, bool], Any]()
        for layer, state in zip(self.layers, states, strict=True):
            attention = layer.self_attn
            kind = (attention.window, attention.causal)
            if kind not in masks:
                masks[kind] = block_mask(state, h.shape[1], widths, attention.causal)
            h = layer(h, state, masks[kind])
        return self.norm(h)[:, 1:]


def block_mask(state: State, L: int, widths: Sequence[int], causal: bool) -> Any:
    """Mask of a block of L rows behind `state`: None, "causal" or bool, broadcastable to (B, 1, L, T).

    With `causal` a row sees what is not after it; otherwise also the rest of its block, up to widths[b].
    """
    if causal:
        return state.make_mask(L)
    windowed = isinstance(state, WindowState)
    even = all(width == L for width in widths)
    if not windowed and even and all(n == state.lengths[0] for n in state.lengths):
        return None
    seen = state.make_mask(L, return_array=True)  # (L, T) or (B, 1, L, T), later rows hidden
    if not windowed:  # what the last own row sees is all there is, and earlier ones see no less of it
        rows = mx.broadcast_to(seen, (len(widths), 1, *seen.shape[-2:]))
        return rows[mx.arange(len(widths)), :, mx.array(list(widths)) - 1][:, :, None]
    own = mx.array(list(widths))[:, None, None, None] > mx.arange(L)[:, None]
    # A key is seen from a row that it is after if a later row of the same block sees it: those in between do too.
    later = mx.cummax((seen & own).astype(mx.int8), axis=-2, reverse=True).astype(mx.bool_)
    return later | seen
