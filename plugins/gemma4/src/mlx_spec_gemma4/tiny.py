"""Tiny random Gemma 4 checkpoints on disk, in the layout real ones have; unequal sizes.

    write_tiny("out", "E")      ->  out/target and out/drafter

Variants: E (E2B/E4B: shared K/V, per-layer inputs), D31 (31B/12B: V from K in full layers), MOE (26B),
UNI (12B unified) and UNITEXT (the same as a text-only directory), VLM (E inside a wrapper, beside a vision
tower), BUNDLED (VLM that also carries assistant tensors, which mlx-lm refuses and this plugin drops).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mlx_spec.errors import UsageError
from mlx_spec.testing import check_options

from .config import DEFAULT_ROPE
from .tiny_files import write_checkpoint
from .tiny_tokenizer import SPECIALS, write_tokenizer

OPTIONS = ("variant", "ordered", "tied", "quantise", "dtype", "vocab_size", "vocab_size_per_layer_input")
"""What may be set besides the keys of a text configuration."""

S, F = "sliding_attention", "full_attention"

_COMMON: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": None,
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
    "rms_norm_eps": 1e-6,
    "sliding_window": 8,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "use_bidirectional_attention": None,
}
_E: Mapping[str, Any] = {
    "num_hidden_layers": 8,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 8,
    "use_double_wide_mlp": True,
    "layer_types": [S, S, F, S, F, S, S, F],
}
_D31: Mapping[str, Any] = {
    "num_hidden_layers": 6,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "layer_types": [S, S, S, S, S, F],
}
_MOE: Mapping[str, Any] = {
    **_D31,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
_UNI: Mapping[str, Any] = {**_D31, "use_bidirectional_attention": "vision"}


@dataclass(frozen=True, slots=True)
class Variant:
    """One shape: its text configuration and how the directory presents it."""

    text: Mapping[str, Any]
    model_type: str  # of the directory; "..._text" is flat, others wrap a text_config
    media: bool = False
    bundled: bool = False
    assistant: Mapping[str, Any] = field(default_factory=dict)


_KEQV: Mapping[str, Any] = {"num_global_key_value_heads": 1, "attention_k_eq_v": True}
VARIANTS: Mapping[str, Variant] = {
    "E": Variant(_E, "gemma4_text"),
    "D31": Variant(_D31, "gemma4", assistant=_KEQV),
    "MOE": Variant(_MOE, "gemma4", assistant=_KEQV),
    "UNI": Variant(_UNI, "gemma4_unified", assistant=_KEQV),
    "UNITEXT": Variant(_UNI, "gemma4_unified_text", assistant=_KEQV),
    "VLM": Variant(_E, "gemma4", media=True),
    "BUNDLED": Variant(_E, "gemma4", media=True, bundled=True),
}


def write_tiny(
    out: str | Path,
    variant: str = "E",
    seed: int = 0,
    *,
    ordered: bool = False,
    tied: bool = True,
    quantise: int | None = None,
    dtype: str = "float32",
    vocab_size: int = 320,
    **text: Any,
) -> tuple[Path, Path]:
    """Write a target and an assistant for it; returns (out/target, out/drafter).

    Args:
        variant: "E": per-layer inputs, shared K/V; "D31": dense, keys as values; "MOE": D31 with experts; "UNI",
            "UNITEXT": unified, wrapped and flat; "VLM": E with a vision entry; "BUNDLED": VLM with a head tensor.
        ordered, tied: head of the assistant: centroid-routed, own table or separate matrix.
        quantise: 4 or 8 bits for every matrix wide enough, in both; None for plain weights.
        dtype: "float32", "bfloat16" or "float16".
        vocab_size: V, a multiple of 16; 260 or more holds every byte.
        text: keys of the target's text configuration to override.
    """
    if variant not in VARIANTS or vocab_size % 16:
        strange = variant not in VARIANTS
        raise UsageError(
            "tiny Gemma 4 checkpoint",
            found=f"variant {variant!r}" if strange else f"vocab_size {vocab_size}",
            expected=f"one of {', '.join(VARIANTS)}" if strange else "a multiple of 16",
            next_step="Choose one of these" if strange else "Round it",
            code="GM06",
        )
    shape = VARIANTS[variant]
    check_options(text, {*_COMMON, *shape.text, *OPTIONS})
    rng = np.random.default_rng(seed)
    config = {**_COMMON, **shape.text, "vocab_size": vocab_size, "vocab_size_per_layer_input": vocab_size, **text}
    config["rope_parameters"] = {kind: dict(rope) for kind, rope in DEFAULT_ROPE.items()}
    whole, head = _target_config(config, shape), _assistant_config(config, shape, ordered=ordered, tied=tied)
    out = Path(out)
    target = write_checkpoint(out / "target", whole, _target_tensors(rng, config, shape), dtype, quantise)
    drafter = write_checkpoint(out / "drafter", head, _assistant_tensors(rng, head), dtype, quantise)
    write_tokenizer(target, vocab_size)
    return target, drafter


# -- configurations ------------------------------------------------------------------------------------


def _target_config(text: dict[str, Any], shape: Variant) -> dict[str, Any]:
    if shape.model_type.endswith("_text"):
        return {"architectures": ["Gemma4ForCausalLM"], "model_type": shape.model_type, **text}
    config: dict[str, Any] = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": shape.model_type,
        "text_config": {"model_type": f"{shape.model_type}_text", **text},
        "vision_config": None,
        "audio_config": None,
        "eos_token_id": [text["eos_token_id"]],
        "vocab_size": text["vocab_size"],  # mlx-lm reads it here
        "tie_word_embeddings": text["tie_word_embeddings"],
        **{f"{kind}_token_id": SPECIALS.index(f"<{kind}>") for kind in ("image", "audio", "video")},
    }
    if shape.media:
        config["vision_config"] = {"model_type": "gemma4_vision", "hidden_size": 24}
    return config


def _assistant_config(target: Mapping[str, Any], shape: Variant, *, ordered: bool, tied: bool) -> dict[str, Any]:
    family = "gemma4_unified" if shape.model_type.startswith("gemma4_unified") else "gemma4"
    same = ("vocab_size", "sliding_window", "rope_parameters", "max_position_embeddings", "head_dim", "global_head_dim")
    text = {
        **_COMMON,
        "model_type": f"{family}_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "layer_types": [S, S, S, F],
        "vocab_size_per_layer_input": 0,
        "final_logit_softcapping": None,
        "tie_word_embeddings": tied,
        **shape.assistant,
        **{key: target[key] for key in same},
    }
    return {
        "architectures": [f"{'Gemma4Unified' if family == 'gemma4_unified' else 'Gemma4'}AssistantForCausalLM"],
        "model_type": f"{family}_assistant",
        "backbone_hidden_size": target["hidden_size"],
        "use_ordered_embeddings": ordered,
        "num_centroids": 16,
        "centroid_intermediate_top_k": 4,
        "block_size": 4,
        "tie_word_embeddings": tied,
        "text_config": text,
    }


# -- tensors -------------------------------------------------------------------------------------------


class _Random:
    """Draws named tensors so that activations keep a sensible size through the stack."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng

    def norm(self, *shape: int) -> np.ndarray:
        """A norm weight or a scale, near 1."""
        values: np.ndarray = 1 + 0.2 * self.rng.standard_normal(shape)
        return values

    def matrix(self, *shape: int) -> np.ndarray:
        """A projection (..., out, in)."""
        values: np.ndarray = self.rng.standard_normal(shape) * 1.6 / np.sqrt(shape[-1])
        return values

    def table(self, rows: int, width: int) -> np.ndarray:
        """An embedding."""
        values: np.ndarray = self.rng.standard_normal((rows, width)) / np.sqrt(width)
        return values


Tensors = Iterator[tuple[str, np.ndarray]]


def _target_tensors(rng: np.random.Generator, config: Mapping[str, Any], shape: Variant) -> Tensors:
    draw = _Random(rng)
    H, N, P = config["hidden_size"], config["num_hidden_layers"], config["hidden_size_per_layer_input"]
    root = "model." if shape.model_type.endswith("_text") else "model.language_model."
    yield f"{root}embed_tokens.weight", draw.table(config["vocab_size"], H)
    if P:
        yield f"{root}embed_tokens_per_layer.weight", draw.table(config["vocab_size_per_layer_input"], N * P)
        yield f"{root}per_layer_model_projection.weight", draw.matrix(N * P, H)
        yield f"{root}per_layer_projection_norm.weight", draw.norm(P)
    for i in range(N):
        for name, value in _layer(draw, config, i):
            yield f"{root}layers.{i}.{name}", value
    yield f"{root}norm.weight", draw.norm(H)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", draw.matrix(config["vocab_size"], H)
    if shape.media:
        yield "model.vision_tower.patch_embedder.weight", draw.matrix(24, 12)
        yield "model.embed_vision.embedding_projection.weight", draw.matrix(H, 24)
    if shape.bundled:
        yield "model.language_model.mtp.pre_projection.weight", draw.matrix(32, 2 * H)


def _layer(draw: _Random, config: Mapping[str, Any], i: int) -> Tensors:
    H, kind = config["hidden_size"], config["layer_types"][i]
    first_shared = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    full, owns = kind == F, i < first_shared
    D = config["global_head_dim"] if full else config["head_dim"]
    same_kv = full and config["attention_k_eq_v"]
    kv_heads = config["num_global_key_value_heads" if same_kv else "num_key_value_heads"]
    Q = config["num_attention_heads"] * D
    yield "input_layernorm.weight", draw.norm(H)
    yield "self_attn.q_proj.weight", draw.matrix(Q, H)
    yield "self_attn.q_norm.weight", draw.norm(D)
    if owns or i == first_shared:  # files also carry K/V of sharing layers, which nobody reads
        yield "self_attn.k_proj.weight", draw.matrix(kv_heads * D, H)
        yield "self_attn.k_norm.weight", draw.norm(D)
        if not same_kv:
            yield "self_attn.v_proj.weight", draw.matrix(kv_heads * D, H)
    yield "self_attn.o_proj.weight", draw.matrix(H, Q)
    yield "post_attention_layernorm.weight", draw.norm(H)
    yield "pre_feedforward_layernorm.weight", draw.norm(H)
    wide = config["intermediate_size"] * (2 if config["use_double_wide_mlp"] and not owns else 1)
    yield from _mlp(draw, H, wide)
    if config["enable_moe_block"]:
        yield from _experts(draw, config)
    yield "post_feedforward_layernorm.weight", draw.norm(H)
    P = config["hidden_size_per_layer_input"]
    if P:
        yield "per_layer_input_gate.weight", draw.matrix(P, H)
        yield "per_layer_projection.weight", draw.matrix(H, P)
        yield "post_per_layer_input_norm.weight", draw.norm(H)
    yield "layer_scalar", draw.norm(1)


def _mlp(draw: _Random, width: int, inner: int) -> Tensors:
    yield "mlp.gate_proj.weight", draw.matrix(inner, width)
    yield "mlp.up_proj.weight", draw.matrix(inner, width)
    yield "mlp.down_proj.weight", draw.matrix(width, inner)


def _experts(draw: _Random, config: Mapping[str, Any]) -> Tensors:
    H, E, M = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    yield "router.proj.weight", draw.matrix(E, H)
    yield "router.scale", draw.norm(H)
    yield "router.per_expert_scale", draw.norm(E)
    yield "experts.gate_up_proj", draw.matrix(E, 2 * M, H)
    yield "experts.down_proj", draw.matrix(E, H, M)
    for name in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
        yield f"{name}.weight", draw.norm(H)


def _assistant_tensors(rng: np.random.Generator, config: Mapping[str, Any]) -> Tensors:
    draw, text, H = _Random(rng), config["text_config"], config["backbone_hidden_size"]
    h, V = text["hidden_size"], text["vocab_size"]
    yield "model.embed_tokens.weight", draw.table(V, h)
    for i, kind in enumerate(text["layer_types"]):
        layer = f"model.layers.{i}"
        D = text["global_head_dim"] if kind == F else text["head_dim"]
        Q = text["num_attention_heads"] * D
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield f"{layer}.{norm}_layernorm.weight", draw.norm(h)
        yield f"{layer}.self_attn.q_proj.weight", draw.matrix(Q, h)
        yield f"{layer}.self_attn.q_norm.weight", draw.norm(D)
        yield f"{layer}.self_attn.o_proj.weight", draw.matrix(h, Q)
        for name, value in _mlp(draw, h, text["intermediate_size"]):
            yield f"{layer}.{name}", value
        yield f"{layer}.layer_scalar", draw.norm(1)
    yield "model.norm.weight", draw.norm(h)
    yield "pre_projection.weight", draw.matrix(h, 2 * H)
    yield "post_projection.weight", draw.matrix(H, h)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", draw.matrix(V, h)
    if config["use_ordered_embeddings"]:
        yield "masked_embedding.centroids.weight", draw.matrix(config["num_centroids"], h)
        yield "masked_embedding.token_ordering", rng.permutation(V)
