"""The Qwen 3.5 text stack as a Target, over mlx-lm's own module tree.

Same modules in the same order as mlx-lm 0.32.2 `models/qwen3_5.py`, so that B = 1, L = 1 with dense K/V gives
the same bytes. Three things differ, each because a round needs it:

- a linear layer leaves a tape of its steps, and runs them one after the other whatever L is;
- the residual stream after every layer can be seen (taps);
- blocks of up to `BLOCK_ROWS` rows gather their experts unsorted, as single rows do.
"""

# mypy: disable-error-code="misc, no-any-return"
# mlx.nn is untyped to mypy: its classes and calls are Any.

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.gated_delta import compute_g, normalize_qk

from mlx_spec.gated_delta import GatedDelta
from mlx_spec.generic_target import GenericTarget
from mlx_spec.state import DeltaState, KVState, QuantisedKVState, StateGroup
from mlx_spec.state.delta import Steps
from mlx_spec.types import Capabilities, ModelRef, Verification

from .config import media_ids, refuse_media, target_config
from .weights import target_classes

if TYPE_CHECKING:
    from mlx_spec.state import State

log = logging.getLogger("mlx_spec_qwen35")

BLOCK_ROWS = 16
"""Widest L that is treated as a block to verify; longer calls are prefill and may sort their experts."""
LAYERS_TOGETHER = 8
"""Layers of a block that start together when kernels have made them few operations."""
NORM_EPS = 1e-6
"""Added to the sum of squares of a query or key before its root, whatever its width."""


class Qwen35Target(GenericTarget):
    """A Qwen 3.5 language model: gated-delta layers, full attention every few of them, experts or not.

    Taps: "hidden" (B, L, D), post-norm, and "residual.<i>" (B, L, D), the output of layer i before any norm.

    Attributes:
        text: the validated text configuration.
        media: placeholder id -> "image" or "video".
        dropped: checkpoint tensors that the text path does not use.
    """

    capabilities = Capabilities(recurrent=True, conv=True)

    def __init__(self, ref: ModelRef, config: Mapping[str, Any], model: Any):
        self.text = target_config(config, ref.path)
        self.media = media_ids(config)
        self.dropped: tuple[str, ...] = tuple(getattr(model, "_dropped", ()))
        super().__init__(ref, config, model)

    @classmethod
    def load(
        cls,
        ref: ModelRef,
        config: Mapping[str, object] | None = None,
        get_model_classes: Callable[..., tuple[type, type]] | None = None,
    ) -> Self:
        """Load from a checkpoint directory. Raises LoadError naming what is wrong."""
        text = target_config(ref.config if config is None else config, ref.path)
        target = super().load(ref, config, get_model_classes or target_classes(text))
        if target.dropped:
            log.info("%s: text only, %d tensors unused: %s", ref.name, len(target.dropped), _heads(target.dropped))
        return target

    # -- Target ----------------------------------------------------------------------------------------

    def make_states(self, kv_bits: int | None = None, kv_group_size: int = 64) -> StateGroup:
        """Empty states, one per layer; `kv_bits` quantises the K/V of full-attention layers."""

        def state(layer: Any) -> State:
            if layer.is_linear:
                return DeltaState()
            return KVState() if kv_bits is None else QuantisedKVState(kv_bits, kv_group_size)

        return StateGroup(state(layer) for layer in self._trunk.layers)

    def forward(self, tokens: mx.array, states: StateGroup, taps: Sequence[str] = ()) -> Verification:
        """tokens (B, L) int32 -> logits (B, L, V); any of `tap_names`, (B, L, D) each."""
        self._check_taps(taps)
        outputs = list(self._layers(tokens, states, tape=True))
        hidden = self._trunk.norm(outputs[-1])
        return Verification(self._project(hidden), {name: _tap(name, hidden, outputs) for name in taps})

    def prefill(
        self, tokens: mx.array, states: StateGroup, taps: Sequence[str] = (), last: bool = False
    ) -> dict[str, mx.array]:
        """As `Target.prefill`: no tape, no logits, and the final norm of no more rows than are looked at."""
        self._check_taps(taps)
        outputs = list(self._layers(tokens, states, tape=False))
        if last:
            outputs = [output[:, -1:] for output in outputs]
        hidden = self._trunk.norm(outputs[-1])
        return {name: _tap(name, hidden, outputs) for name in taps}

    @property
    def tap_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """ "hidden", and "residual.<i>" for every layer."""
        return ("hidden", *(f"residual.{i}" for i in range(self.text.num_hidden_layers)))

    def embed(self, tokens: mx.array) -> mx.array:
        """tokens (...,) -> (..., D), as they are in the table."""
        return self._trunk.embed_tokens(tokens)

    def head(self, hidden: mx.array) -> mx.array:
        """Post-norm hidden (..., D) -> logits (..., V)."""
        return self._project(hidden)

    def check_prompt(self, tokens: Sequence[int]) -> None:
        """Refuse prompts that stand for images or video: this path has no tower to fill the placeholders in."""
        refuse_media(self.media, tokens)

    # -- structure -------------------------------------------------------------------------------------

    @property
    def _trunk(self) -> Any:
        return self.model.language_model.model

    def _project(self, hidden: mx.array) -> mx.array:
        stack = self.model.language_model
        return stack.model.embed_tokens.as_linear(hidden) if self.text.tie_word_embeddings else stack.lm_head(hidden)

    def _logits_width(self) -> tuple[int, Any]:
        table = self._trunk.embed_tokens
        return self.text.vocab_size, table.scales.dtype if hasattr(table, "scales") else table.weight.dtype

    def _check_taps(self, taps: Sequence[str]) -> None:
        unknown = [name for name in taps if name not in self.tap_names]
        if unknown:
            raise self._refuse(f"tap {unknown[0]!r}", f"taps hidden, residual.0 to {self.tap_names[-1]}")

    def _layers(self, tokens: mx.array, states: StateGroup, tape: bool) -> Iterator[mx.array]:
        """tokens (B, L) through the stack; the residual stream (B, L, D) after every layer.

        On the CPU, whose device waits while a graph is being built, layers of a block start before the rest is there.
        Steps of plain decoding do not need that: the next one is built while the last one runs.
        """
        early = tape and 1 < tokens.shape[1] <= BLOCK_ROWS and mx.default_device() == mx.cpu
        together = self._layers_together() if early else 0
        h, mask = self._trunk.embed_tokens(tokens), None
        for i, (layer, state) in enumerate(zip(self._trunk.layers, states, strict=True)):
            x = layer.input_layernorm(h)
            if isinstance(state, DeltaState):
                h = h + linear_attention(layer.linear_attn, x, state, tape)
            else:
                mask = create_attention_mask(h, state) if mask is None else mask
                h = h + layer.self_attn(x, mask, state)
            h = h + feed_forward(layer.mlp, layer.post_attention_layernorm(h))
            if together and i % together == together - 1:
                mx.async_eval(h)
            yield h

    def _layers_together(self) -> int:
        """How many layers start at once: one of plain MLX operations takes longer to build than to start."""
        linear = next((layer.linear_attn for layer in self._trunk.layers if layer.is_linear), None)
        return 1 if linear is None or type(linear.gated_delta) is GatedDelta else LAYERS_TOGETHER


def linear_attention(net: Any, x: mx.array, state: DeltaState, tape: bool) -> mx.array:
    """A `GatedDeltaNet` of mlx-lm over x (B, L, D), appended to `state`: (B, L, D)."""
    B, L, _ = x.shape
    Hk, Hv, Dk, Dv = net.num_k_heads, net.num_v_heads, net.head_k_dim, net.head_v_dim
    rows, z = net.in_proj_qkv(x), net.in_proj_z(x).reshape(B, L, Hv, Dv)
    b, a = net.in_proj_b(x), net.in_proj_a(x)
    joined = state.joined(rows, net.conv_kernel_size - 1)
    q, k, v = mx.split(net.silu(net.conv1d(joined)), [net.key_dim, 2 * net.key_dim], axis=-1)
    q, k, v = q.reshape(B, L, Hk, Dk), k.reshape(B, L, Hk, Dk), v.reshape(B, L, Hv, Dv)
    q, k = normalize_qk(q, k, inv_scale=Dk**-0.5, eps=NORM_EPS)
    g = compute_g(net.A_log, a, net.dt_bias)
    rule, owed = net.gated_delta, state.owed
    if owed is not None and rule.resumes and tape:
        y, held, delta = rule.resume(owed, q, k, v, g, mx.sigmoid(b))
    else:
        owed = None
        y, held, delta = rule(q, k, v, g, mx.sigmoid(b), state.recurrent((B, Hv, Dv, Dk)))
    state.append(held, Steps(joined, k, g, delta), rule, tape, paid=owed is not None)
    return net.out_proj(net.norm(y, z).reshape(B, L, -1))


def feed_forward(mlp: Any, x: mx.array) -> mx.array:
    """mlx-lm's MLP or expert block, except that a block of rows gathers its experts unsorted.

    Sorting picks another kernel once rows * top_k reaches 64, and a row's result must not depend on how many
    other rows are verified with it.
    """
    if "switch_mlp" not in mlp or x.shape[1] > BLOCK_ROWS:
        return mlp(x)
    gates = mx.softmax(mlp.gate(x), axis=-1, precise=True)
    chosen = mx.argpartition(gates, kth=-mlp.top_k, axis=-1)[..., -mlp.top_k :]
    scores = mx.take_along_axis(gates, chosen, axis=-1)
    if mlp.norm_topk_prob:
        scores = scores / scores.sum(axis=-1, keepdims=True)
    routed = (_experts(mlp.switch_mlp, x, chosen) * scores[..., None]).sum(axis=-2)
    return routed + mx.sigmoid(mlp.shared_expert_gate(x)) * mlp.shared_expert(x)


def _experts(switch: Any, x: mx.array, indices: mx.array) -> mx.array:
    """x (B, L, D), indices (B, L, k) -> each chosen expert's output (B, L, k, D)."""
    x = mx.expand_dims(x, (-2, -3))
    up, gate = switch.up_proj(x, indices), switch.gate_proj(x, indices)
    return switch.down_proj(switch.activation(up, gate), indices).squeeze(-2)


def _tap(name: str, hidden: mx.array, outputs: Sequence[mx.array]) -> mx.array:
    return hidden if name == "hidden" else outputs[int(name.removeprefix("residual."))]


def _heads(names: Sequence[str]) -> str:
    """First name parts, each once: "visual, mtp"."""
    parts = (name.removeprefix("model.").removeprefix("language_model.").split(".")[0] for name in names)
    return ", ".join(dict.fromkeys(parts))
