"""What the architectures of GGUF mean for mlx-lm: config.json, and what was changed in the weights.

llama: rows of q and k lie in the order of interleaved rotary pairs; a table of rope factors stands for "llama3"
scaling. gemma3: norm weights have 1 added. Sources: convert_hf_to_gguf.py and src/llama-model.cpp of
ggml-org/llama.cpp; models/llama.py, models/gemma3_text.py and models/rope_utils.py of mlx-lm 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .container import Gguf
from .metadata import Metadata
from .parts import HEAD, ROPE_FACTORS, Part, Sizes, check_tensors, read_parts, read_sizes
from .refusals import architecture, cannot
from .rope import rope_scaling


@dataclass(frozen=True, slots=True)
class Model:
    """config.json without quantisation and token ids, and the parameters in file order."""

    config: dict[str, Any]
    parts: list[Part]


@dataclass(frozen=True, slots=True)
class _Family:
    """One architecture: norms of a layer, keys of config.json, and what differs in its weights."""

    norms: Mapping[str, str]
    config: Callable[[Gguf, Metadata, Sizes], dict[str, Any]]
    interleaved: bool = False
    shift: float = 0.0
    biases: bool = False


def read_model(file: Gguf) -> Model:
    """What a file holds: every tensor known, none missing, shapes as the sizes say.

    Raises LoadError for whatever the checkpoint could not express.
    """
    metadata = Metadata(file.path, file.metadata)
    name = metadata.text("general.architecture")
    family = FAMILIES.get(name)
    if family is None:
        raise architecture(file.path, name, FAMILIES)
    check_tensors(file)
    if metadata.get("split.count", 1) != 1:
        parts = metadata.get("split.count")
        raise cannot(file.path, f"one of {parts} parts", "a whole model", "Join them with llama-gguf-split --merge")
    own = metadata.under(f"{name}.")
    sizes = read_sizes(file, own)
    found = read_parts(
        file, sizes, family.norms, interleaved=family.interleaved, shift=family.shift, biases=family.biases
    )
    config = _common(file, own, sizes) | family.config(file, own, sizes)
    return Model(config | (_bias_keys(found) if family.biases else {}), found)


def _common(file: Gguf, own: Metadata, sizes: Sizes) -> dict[str, Any]:
    """Keys every family spells alike."""
    return {
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "intermediate_size": sizes.inner,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": own.size("context_length"),
        "rms_norm_eps": own.real("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": HEAD not in file.tensors,
    }


def _bias_keys(parts: Sequence[Part]) -> dict[str, bool]:
    modules = [part.module for part in parts if part.parameter == "bias"]
    return {
        key: any(f".{kind}." in m for m in modules)
        for key, kind in (("attention_bias", "self_attn"), ("mlp_bias", "mlp"))
    }


def _llama(file: Gguf, own: Metadata, sizes: Sizes) -> dict[str, Any]:
    if own.get("attention.sliding_window"):
        raise cannot(file.path, "a sliding window", "full attention: llama.cpp has no window for this architecture")
    theta = own.real("rope.freq_base", 10000.0)
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": theta,
        "rope_scaling": rope_scaling(file, own, theta, sizes.head, file.tensors.get(ROPE_FACTORS)),
    }


def _gemma3(file: Gguf, own: Metadata, sizes: Sizes) -> dict[str, Any]:
    theta = own.real("rope.freq_base", 1_000_000.0)
    # llama.cpp knows the 27B model by its 62 layers; there alone queries are scaled by the width of a share of D
    scalar = sizes.hidden / sizes.heads if sizes.layers == 62 else sizes.head
    if "attention.scale" in own:
        scalar = own.real("attention.scale") ** -2
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "rope_theta": theta,
        "rope_local_base_freq": own.real("rope.freq_base_swa", 10000.0),
        "rope_scaling": rope_scaling(file, own, theta, sizes.head, None),
        "sliding_window": own.size("attention.sliding_window"),
        "sliding_window_pattern": own.size("attention.sliding_window_pattern", 6),
        "query_pre_attn_scalar": scalar,
    }


FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(
        {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
        _llama,
        interleaved=True,
        biases=True,
    ),
    "gemma3": _Family(
        {
            "attn_norm": "input_layernorm",
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        _gemma3,
        shift=-1.0,
    ),
}
"""What can be converted, by general.architecture."""
