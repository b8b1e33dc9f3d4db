"""Tiny random DFlash drafters for a tiny target: configuration and tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .dflash_config import FIRST, FULL, SECOND, SECOND_CAP, SLIDING, dflash_config, spread
from .dflash_validate import shapes
from .tiny_tensors import Random, Tensors

LAYERS, TAPS = 2, 3
WINDOW = 8
CONFIG: Mapping[str, Any] = {
    "model_type": "qwen3",
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "layer_types": [FULL] * LAYERS,
}
SECOND_SECTION: Mapping[str, Any] = {
    "conv_kernel_size": 3,
    "conv_group_size": 16,
    "selector_rank": 12,
    "selector_top_k": 6,
    "runtime_block_size": SECOND_CAP,
    "output_multiplier": 0.5,
    "input_embedding_scale": 1.25,
    "final_logit_softcapping": 30.0,
}


def drafter_config(
    text: Mapping[str, Any], second: bool, block_size: int, sliding: bool, causal: bool | None
) -> dict[str, Any]:
    """config.json of a drafter for a target with the text configuration `text`."""
    V, N = text["vocab_size"], text["num_hidden_layers"]
    own: dict[str, Any] = {"mask_token_id": V - 1, "target_layer_ids": _tapped(N)}
    own |= {**SECOND_SECTION, "runtime_block_size": min(SECOND_CAP, block_size)} if second else {}
    own |= {} if causal is None else {"causal": causal}
    config = {
        "architectures": [SECOND if second else FIRST],
        **CONFIG,
        "hidden_size": text["hidden_size"],
        "vocab_size": V,
        "num_target_layers": N,
        "block_size": block_size,
        "dflash_config": own,
    }
    if sliding:
        config |= {"layer_types": [SLIDING, FULL], "sliding_window": WINDOW}
    return config


def _tapped(layers: int) -> list[int]:
    """Layers that are read; a target of few layers is read at its first ones, as far as there are any."""
    usual = spread(TAPS, layers)
    return usual if usual == sorted({*usual}) else list(range(min(TAPS, layers)))


def drafter_tensors(draw: Random, config: Mapping[str, Any]) -> Tensors:
    """Every tensor of the drafter that `config` describes; its norms are stored as they are used."""
    from pathlib import Path

    yield from _drawn(draw, shapes(dflash_config(config, Path())).items())


def _drawn(draw: Random, wanted: Any) -> Iterator[tuple[str, Any]]:
    for name, shape in wanted:
        if len(shape) == 1:
            yield name, draw.norm(shape[0])
        elif name.endswith("codebook.weight"):
            yield name.removesuffix(".weight"), draw.rng.standard_normal(shape)  # as published: a bare tensor
        elif name.endswith("base_kernel"):
            yield name, 0.5 * draw.rng.standard_normal(shape)
        else:
            yield name, draw.matrix(*shape)
