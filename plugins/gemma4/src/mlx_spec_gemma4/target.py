"""The Gemma 4 text stack as a Target, over mlx-lm's own module tree.

Same modules in the same order as mlx-lm 0.32.2 `models/gemma4_text.py`, so that B = 1, L = 1 with dense
K/V gives the same bytes. Three things differ, each because a round needs it:

- the hidden state is kept before and after the final norm (taps);
- K/V-shared layers know when the K/V they read are quantised (mlx-lm hands them no cache to tell);
- blocks of up to `BLOCK_ROWS` rows gather their experts unsorted, as single rows do.
"""

# mypy: disable-error-code="misc, no-any-return"
# mlx.nn is untyped to mypy: its classes and calls are Any.

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask

from mlx_spec.checkpoint import check_finite, load_mlx_lm
from mlx_spec.linear import hold_transposes
from mlx_spec.models import Target
from mlx_spec.softcap import SoftCap
from mlx_spec.types import Capabilities, ModelRef, Verification

from .config import SLIDING, TextConfig, media_ids, refuse_media, target_config
from .weights import target_classes

if TYPE_CHECKING:
    from mlx_spec.state import State, StateGroup

log = logging.getLogger("mlx_spec_gemma4")

BLOCK_ROWS = 16
"""Widest L that is treated as a block to verify; longer calls are prefill and may sort their experts."""


class Gemma4Target(Target):
    """A Gemma 4 language model: sliding and full layers, shared K/V, per-layer inputs, experts.

    Attributes:
        text: the validated text configuration.
        sources: layer type -> index of the last layer, and of its state, that owns K/V of that type.
        media: placeholder id -> "image", "audio" or "video".
        dropped: checkpoint tensors that the text path does not use.
    """

    capabilities = Capabilities(window=True)
    tap_names = ("hidden", "hidden_pre")

    def __init__(self, ref: ModelRef, model: nn.Module, text: TextConfig):
        self.ref = ref
        self.model = model
        self.text = text
        self.model_type = ref.model_type
        self.vocab_size = text.vocab_size
        self.hidden_size = text.hidden_size
        self.context = text.max_position_embeddings
        self.sources = text.sources
        self.media = media_ids(ref.config)
        self.dropped: tuple[str, ...] = tuple(getattr(model, "_dropped", ()))
        self._stack = getattr(model, "language_model", model)
        if self._stack.final_logit_softcapping is not None:  # inside the model, where kernels are put
            self._stack.soft_cap = SoftCap(self._stack.final_logit_softcapping)
        table = self._core.embed_tokens
        self.dtype = table.scales.dtype if hasattr(table, "scales") else table.weight.dtype

    @classmethod
    def load(cls, ref: ModelRef, config: Mapping[str, object]) -> Gemma4Target:
        """Load from a checkpoint directory. Raises LoadError naming what is wrong."""
        text = target_config(config, ref.path)
        model, _ = load_mlx_lm(ref, get_model_classes=target_classes(text, wrapped="text_config" in config))
        target = cls(ref, model, text)
        check_finite(dict(tree_flatten(model.parameters())), f"weights of {ref.name}")
        hold_transposes(model)
        target._core._inputs = TextInputs(target._core)  # an underscore: what it holds is not counted again
        if target.dropped:
            log.info("%s: text only, %d tensors unused: %s", ref.name, len(target.dropped), _heads(target.dropped))
        return target

    @property
    def _core(self) -> Any:
        return self._stack.model

    # -- Target ----------------------------------------------------------------------------------------

    def make_states(self, kv_bits: int | None = None, kv_group_size: int = 64) -> StateGroup:
        """Empty states, one per layer that owns K/V; windows stay dense under `kv_bits`."""
        from mlx_spec.state import from_mlx_lm

        return from_mlx_lm(self.model, kv_bits, kv_group_size)

    def forward(self, tokens: mx.array, states: StateGroup, taps: Sequence[str] = ()) -> Verification:
        """tokens (B, L) int32 -> logits (B, L, V); taps "hidden" (post-norm) and "hidden_pre" (B, L, D)."""
        pre = run_layers(self._core, tokens, states)
        post = self._core.norm(pre)
        seen = {"hidden": post, "hidden_pre": pre}
        return Verification(self.head(post), {name: seen[name] for name in taps})

    def prefill(
        self, tokens: mx.array, states: StateGroup, taps: Sequence[str] = (), last: bool = False
    ) -> dict[str, mx.array]:
        """As `Target.prefill`; with `last`, the K/V-shared layers see the last position alone."""
        pre = run_layers(self._core, tokens, states, last)
        seen = {"hidden": self._core.norm(pre), "hidden_pre": pre}
        return {name: seen[name] for name in taps}

    @property
    def table(self) -> tuple[nn.Module, float]:
        """The embedding, and the factor of its rows."""
        return self._core.embed_tokens, self._core.embed_scale

    def embed(self, tokens: mx.array) -> mx.array:
        """tokens (...,) -> (..., D), times sqrt(D)."""
        return self._core.embed_tokens(tokens) * self._core.embed_scale

    def head(self, hidden: mx.array) -> mx.array:
        """Post-norm hidden (..., D) -> soft-capped logits (..., V)."""
        stack = self._stack
        logits = stack.model.embed_tokens.as_linear(hidden) if stack.tie_word_embeddings else stack.lm_head(hidden)
        return logits if stack.final_logit_softcapping is None else stack.soft_cap(logits)

    def check_prompt(self, tokens: Sequence[int]) -> None:
        """Refuse prompts that stand for other media: this path has no tower to fill the placeholders in."""
        refuse_media(self.media, tokens)


class SharedReader:
    """What a K/V-shared layer is given as its cache: appends nothing, tells how the K/V are quantised."""

    def __init__(self, bits: int, group_size: int):
        self.bits = bits
        self.group_size = group_size

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """The shared K/V, unchanged."""
        return keys, values


def run_layers(core: Any, tokens: mx.array, states: Sequence[State], last: bool = False) -> mx.array:
    """tokens (B, L) through all layers of a `Gemma4TextModel`, before the final norm: (B, L, D).

    `states` holds one cache per layer that owns K/V, in layer order; the K/V-shared layers come after them.
    With `last` the result is (B, 1, D): from the last owner on nothing but K/V is made of earlier positions.
    """
    h, per_layer = _inputs(core, tokens)
    masks: dict[str, Any] = {}
    for layer, state in zip(core.layers, states, strict=False):
        if layer.layer_type not in masks:
            window = core.window_size if layer.layer_type == SLIDING else None
            masks[layer.layer_type] = create_attention_mask(h, state, window_size=window)
    shared: dict[int, Sequence[Any]] = {}  # owner -> its K/V and the offset they begin at
    skipped = tokens.shape[1] - 1 if last else 0
    for i, layer in enumerate(core.layers):
        source = core.previous_kvs[i]
        run = _moe_block if layer.enable_moe and tokens.shape[1] <= BLOCK_ROWS else type(layer).__call__
        if source == i:
            own = None if per_layer is None else per_layer[:, :, i, :]
            out, *shared[i] = run(layer, h, masks[layer.layer_type], states[i], per_layer_input=own)
            if not skipped or i < len(states) - 1:
                h = out
                continue
            # `out` is left uncomputed: the layer runs again as a reader of its own K/V
            h, per_layer = h[:, -1:], None if per_layer is None else per_layer[:, -1:]
            masks = {kind: _last_row(mask) for kind, mask in masks.items()}
            shared = {owner: (kv, offset + skipped) for owner, (kv, offset) in shared.items()}
        kv, offset = shared[source]
        own = None if per_layer is None else per_layer[:, :, i, :]
        reader = _reader(states[source])
        h, _, _ = run(layer, h, masks[layer.layer_type], reader, per_layer_input=own, shared_kv=kv, offset=offset)
    return h


def _last_row(mask: Any) -> Any:
    """The mask of the last query: all keys ("causal", None), or the last row of an array (..., L, T)."""
    return mask[..., -1:, :] if isinstance(mask, mx.array) else None


class TextInputs(nn.Module):
    """What a `Gemma4TextModel` begins with: scaled embeddings and the inputs of each layer's own."""

    def __init__(self, core: Any):
        super().__init__()
        self.table, self.scale, self.own = core.embed_tokens, core.embed_scale, bool(core.hidden_size_per_layer_input)
        if self.own:
            self.own_table, self.own_scale = core.embed_tokens_per_layer, core.embed_tokens_per_layer_scale
            self.projection, self.projection_scale = core.per_layer_model_projection, core.per_layer_projection_scale
            self.norm, self.sum_scale = core.per_layer_projection_norm, core.per_layer_input_scale

    def __call__(self, tokens: mx.array) -> tuple[mx.array, ...]:
        """tokens (B, L) -> embeddings (B, L, D) and, where layers have inputs of their own, (B, L, N * P)."""
        h = self.table(tokens) * self.scale
        if not self.own:
            return (h,)
        own = self.own_table(tokens) * self.own_scale
        projected = (self.projection(h) * self.projection_scale).reshape(*tokens.shape, -1, self.norm.weight.size)
        return h, (self.norm(projected).reshape(own.shape) + own) * self.sum_scale

    @property
    def dtype(self) -> mx.Dtype:
        """Of its results."""
        return self.table.scales.dtype if hasattr(self.table, "scales") else self.table.weight.dtype

    def arrange(self, tokens: mx.array) -> tuple[list[mx.array], dict[str, Any]] | None:
        """A call's inputs; None for ids of another dtype."""
        return ([tokens], {}) if tokens.dtype == mx.int32 and tokens.ndim == 2 else None

    def describe(self, b: Any) -> None:
        """The same as `__call__`, written onto a blueprint."""
        ids = b.ids()
        h = b.weighted(b.looked_up(ids, self.table), mx.array([self.scale]))
        b.output(h)
        if self.own:
            own = b.weighted(b.looked_up(ids, self.own_table), mx.array([self.own_scale]))
            projected = b.weighted(b.apply(h, self.projection), mx.array([self.projection_scale]))
            added = b.combine("add", b.normed(projected, self.norm), own)
            b.output(b.weighted(added, mx.array([self.sum_scale])))


def _inputs(core: Any, tokens: mx.array) -> tuple[mx.array, mx.array | None]:
    """Scaled embeddings (B, L, D) and per-layer inputs (B, L, N, P) or None."""
    h, *own = core._inputs(tokens)
    return h, own[0].reshape(*tokens.shape, len(core.layers), -1) if own else None


def _reader(state: Any) -> SharedReader | None:
    bits = getattr(state, "bits", None)
    return None if bits is None else SharedReader(bits, state.group_size)


def _moe_block(
    layer: Any,
    x: mx.array,
    mask: Any,
    cache: Any,
    per_layer_input: mx.array | None,
    shared_kv: Any = None,
    offset: Any = None,
) -> tuple[mx.array, Any, Any]:
    """mlx-lm's decoder layer with experts, except that they are gathered unsorted whatever the row count.

    Sorting picks another kernel once rows * top_k reaches 64, and a row's result must not depend on how
    many other rows are verified with it.
    """
    attended, kv, offset = layer.self_attn(layer.input_layernorm(x), mask, cache, shared_kv=shared_kv, offset=offset)
    h = x + layer.post_attention_layernorm(attended)
    dense = layer.post_feedforward_layernorm_1(layer.mlp(layer.pre_feedforward_layernorm(h)))
    indices, weights = layer.router(h)
    sparse = _experts(layer.experts.switch_glu, layer.pre_feedforward_layernorm_2(h), indices)
    sparse = layer.post_feedforward_layernorm_2((mx.expand_dims(weights, -1) * sparse).sum(-2))
    h = h + layer.post_feedforward_layernorm(dense + sparse)
    if layer.per_layer_input_gate is not None and per_layer_input is not None:
        gate = mx.multiply(nn.gelu_approx(layer.per_layer_input_gate(h)), per_layer_input)
        h = h + layer.post_per_layer_input_norm(layer.per_layer_projection(gate))
    return h * layer.layer_scalar, kv, offset


def _experts(switch: Any, x: mx.array, indices: mx.array) -> mx.array:
    """x (B, L, D), indices (B, L, k) -> each chosen expert's output (B, L, k, D)."""
    x = mx.expand_dims(x, (-2, -3))
    up, gate = switch.up_proj(x, indices), switch.gate_proj(x, indices)
    return switch.down_proj(switch.activation(up, gate), indices).squeeze(-2)


def _heads(names: Sequence[str]) -> str:
    """First name parts, each once: "vision_tower, audio_tower"."""
    parts = (name.removeprefix("model.").removeprefix("language_model.").split(".")[0] for name in names)
    return ", ".join(dict.fromkeys(parts))
