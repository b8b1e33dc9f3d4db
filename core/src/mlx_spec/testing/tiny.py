"""Tiny random checkpoints in the real layout, by mlx-lm's own model classes; all sizes differ.

`write_llama` and `write_gemma3` are the families core offers to `python -m mlx_spec.testing tiny`; a plugin
offers its own with `register.tiny`. `write_model` writes any model_type that mlx-lm defines.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .tokenizer import write_byte_tokenizer

LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 283,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
SMALL_LLAMA: Mapping[str, Any] = {
    **LLAMA,
    "hidden_size": 40,
    "num_hidden_layers": 2,
    "intermediate_size": 56,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 271,
    "tie_word_embeddings": True,
}
GEMMA3: Mapping[str, Any] = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 40,
    "num_hidden_layers": 5,
    "intermediate_size": 72,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 277,
    "sliding_window": 8,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 2,
    "eos_token_id": [1, 5],
}
SMALL_GEMMA3: Mapping[str, Any] = {
    **GEMMA3,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "intermediate_size": 56,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def write_llama(out: str | Path, seed: int = 0, **options: Any) -> tuple[Path, Path]:
    """A llama target and a smaller llama as its `full-model` drafter; returns (out/target, out/drafter).

    options: keys of the target's config.json to set; vocab_size is cut off at it in the drafter too.
    """
    return _write_pair(Path(out), LLAMA, SMALL_LLAMA, seed, options)


def write_gemma3(out: str | Path, seed: int = 0, **options: Any) -> tuple[Path, Path]:
    """A gemma3 target with sliding windows of 8 and a smaller gemma3 as its `full-model` drafter.

    options: keys of the target's config.json to set; vocab_size is cut off at it in the drafter too.
    """
    return _write_pair(Path(out), GEMMA3, SMALL_GEMMA3, seed, options)


def _write_pair(
    out: Path, target: Mapping[str, Any], drafter: Mapping[str, Any], seed: int, options: Mapping[str, Any]
) -> tuple[Path, Path]:
    check_options(options, target)
    whole = {**target, **options}
    shared = ("vocab_size", "max_position_embeddings", "sliding_window", "bos_token_id", "eos_token_id")
    small = {**drafter, **{key: options[key] for key in shared if key in options}}
    small["vocab_size"] = min(small["vocab_size"], whole["vocab_size"])
    folders = []
    for name, config, salt in (("target", whole, 0), ("drafter", small, 1)):
        path = write_model(out / name, config, seed=2 * seed + salt, shards=2)
        folders.append(write_byte_tokenizer(path, config["vocab_size"]))
    return folders[0], folders[1]


def check_options(options: Iterable[str], known: Iterable[str]) -> None:
    """For writers of tiny checkpoints: UsageError for an option that is none of `known`."""
    known = sorted(known)
    wrong = [key for key in options if key not in known]
    if wrong:
        raise UsageError(
            f"--set {wrong[0]}",
            found="an unknown key",
            expected=f"one of {', '.join(known)}",
            next_step="Correct the key",
            code="U90",
        )


def write_model(path: Path, config: Mapping[str, Any], *, shards: int = 1, seed: int = 3) -> Path:
    """Write config.json and float32 safetensors (`shards` files and an index) to `path`; return it."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    values = dict(config)
    model_class, args_class = _get_classes(values)
    model = model_class(args_class.from_dict(values))
    key = mx.random.key(seed)
    weights: dict[str, mx.array] = {}
    for name, value in tree_flatten(model.parameters()):
        key, used = mx.random.split(key)
        spread = 0.3 if value.ndim > 1 else 0.1
        weights[name] = mx.random.normal(value.shape, key=used) * spread + (value.ndim == 1)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    write_weights(path, weights, shards)
    return path


def write_weights(path: Path, weights: Mapping[str, Any], shards: int = 1, layout: str = "mlx") -> None:
    """Save tensors as model.safetensors, or as numbered shards with model.safetensors.index.json.

    layout: what the files say their names and axes follow: "mlx" for mlx-lm's modules, "pt" as published.
    """
    import mlx.core as mx

    if shards == 1:
        mx.save_safetensors(str(path / "model.safetensors"), dict(weights), metadata={"format": layout})
        return
    names = sorted(weights)
    parts = [names[i::shards] for i in range(shards)]
    weight_map: dict[str, str] = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        mx.save_safetensors(str(path / file), {n: weights[n] for n in part}, metadata={"format": layout})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
