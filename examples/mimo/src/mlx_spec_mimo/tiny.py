"""Tiny random MiMo checkpoints on disk, laid out as published: target and head in one directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.mimo import Model, ModelArgs

from mlx_spec.testing import check_options, write_byte_tokenizer, write_weights

from .head import MimoHead
from .validate import PREFIX

CONFIG: Mapping[str, Any] = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 640000,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
PARTS = 2  # files
MIX = 0.2
"""How much of a layer's work reaches its output: nothing is a table of which token follows which."""


def write_tiny(
    out: str | Path, seed: int = 0, *, head: bool = True, bits: int | None = None, **config: Any
) -> tuple[Path, Path]:
    """Write out/target; returns it twice, as the directory is its own drafter.

    Args:
        head: False leaves the MTP layer out, as a conversion by mlx-lm does.
        bits: 4 or 8 for matrices packed in groups of 32, None for float32.
        config: keys of config.json to override.
    """
    check_options(config, {*CONFIG, "head", "bits"})
    values = {**CONFIG, **config}
    path = Path(out) / "target"
    path.mkdir(parents=True, exist_ok=True)
    weights = dict(_weights(values, seed, head, bits))
    if bits is not None:
        values["quantization"] = {"group_size": 32, "bits": bits}
    (path / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    write_weights(path, weights, shards=PARTS, layout="pt")
    write_byte_tokenizer(path, values["vocab_size"])
    return path, path


def _weights(config: Mapping[str, Any], seed: int, head: bool, bits: int | None) -> Iterator[tuple[str, mx.array]]:
    """Seeded tensors; the head agrees with the target now and then: drafts are accepted and rejected."""
    args = ModelArgs.from_dict(dict(config))
    modules: dict[str, nn.Module] = {"": Model(args), **({PREFIX: MimoHead(args)} if head else {})}
    key = mx.random.key(seed)
    for prefix, module in modules.items():
        for name, value in tree_flatten(module.parameters()):
            key, used = mx.random.split(key)
            value = _tensor(name, mx.random.normal(value.shape, key=used))
            if bits is None or value.ndim < 2:
                yield prefix + name, value
                continue
            packed = zip(("weight", "scales", "biases"), mx.quantize(value, group_size=32, bits=bits), strict=True)
            yield from ((f"{prefix}{name.removesuffix('weight')}{part}", array) for part, array in packed)


def _tensor(name: str, noise: mx.array) -> mx.array:
    """Norms and embedding rows near 1; layers add less, so both sides mostly follow the last token."""
    if noise.ndim == 1:
        return 0.1 * noise + name.endswith("norm.weight")
    if name.endswith("embed_tokens.weight"):
        return noise
    value = noise / noise.shape[-1] ** 0.5
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return MIX * value
    if name == "input_proj.weight":
        D = noise.shape[0]
        return MIX * value + mx.concatenate([mx.zeros((D, D)), mx.eye(D)], axis=1)
    return value
