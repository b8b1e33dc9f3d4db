"""Tiny random Qwen 3.5 checkpoints on disk, in the layouts real ones have; unequal sizes.

    write_tiny("out", variant="moe", raw=True)      ->  out/target

Variants: dense, tied (no output head of its own), moe. With `wrapper` the text stack sits in a text_config
beside a vision tower; `raw` is the published layout, without it that of a conversion for MLX.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.errors import UsageError
from mlx_spec.testing import check_options, write_byte_tokenizer, write_weights

from .tiny_dflash import drafter_config, drafter_tensors
from .tiny_tensors import Random, agreeing, head_tensors, text_tensors
from .weights import SHIFTED, converted

SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>", "<image>", "<video>")
"""Special tokens in id order, from 0."""
GROUP = 32
"""Quantisation group; matrices whose width is no multiple of it stay as they are."""
ROUTER = {"group_size": 64, "bits": 8}
"""How routers are stored whatever the rest is, as mlx-lm converts them."""
TEXT: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS: Mapping[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
VARIANTS: Mapping[str, Mapping[str, Any]] = {"dense": {}, "tied": {"tie_word_embeddings": True}, "moe": EXPERTS}
VISION: Mapping[str, Any] = {
    "depth": 1,
    "hidden_size": 24,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "in_channels": 3,
    "deepstack_visual_indexes": [],
}
PROMISE = "mtp_num_hidden_layers"
DRAFTERS = ("none", "own", "mtp", "dflash", "dflash2")


def write_tiny(
    out: str | Path,
    seed: int = 0,
    *,
    variant: str = "dense",
    wrapper: bool = False,
    drafter: str = "none",
    bits: int | None = None,
    raw: bool = False,
    dtype: str = "float32",
    block_size: int = 4,
    agree: bool = False,
    sliding: bool = False,
    causal: bool | None = None,
    **config: Any,
) -> tuple[Path, Path | None]:
    """Write out/target and, if asked for, a drafter; returns both, the drafter None or out/target itself.

    Args:
        variant, wrapper: "dense", "tied" (no output head) or "moe"; True: a text_config beside a vision tower.
        drafter: "none"; "own": an MTP head in the target's files; "mtp", "dflash", "dflash2": one in out/drafter.
        bits: 4 or 8 for every matrix wide enough, in groups of 32; not together with `raw`.
        raw: the published layout: norms as deltas, convolutions (C, 1, K), experts fused, wrapped names.
        dtype: "float32", "bfloat16" or "float16"; A_log stays float32.
        block_size: what the drafter in out/drafter declares.
        agree: layers add little to the token's embedding and the head passes it on, so that some drafts are accepted.
        sliding, causal: of DFlash drafters: a sliding first layer; what dflash_config says of its blocks.
        config: keys of the text configuration to override; the head declared is the one there is, unless given here.
    """
    if variant not in VARIANTS or drafter not in DRAFTERS or (bits is not None and raw):
        raise UsageError(
            "tiny Qwen 3.5 checkpoint",
            found=f"variant {variant!r}, drafter {drafter!r}, bits {bits} with raw {raw}",
            expected=f"variant {' | '.join(VARIANTS)}, drafter {' | '.join(DRAFTERS)}, and bits without raw",
            next_step="Choose from these",
            code="QW04",
        )
    own = ("variant", "wrapper", "drafter", "bits", "raw", "dtype", "block_size", "agree", "sliding", "causal")
    check_options(config, {*TEXT, *EXPERTS, *own})
    text: dict[str, Any] = {**TEXT, **VARIANTS[variant], **config}
    draw = Random(np.random.default_rng(seed))
    form = agreeing if agree else iter
    bare = _arrays(form(text_tensors(draw, text)), dtype)
    head = _arrays(form(head_tensors(draw, text)), dtype) if drafter in ("own", "mtp") else {}
    tensors = _named(bare, wrapper, raw) | ({} if drafter != "own" else _own(head, raw))
    if wrapper:
        name = "model.visual" if raw else "vision_tower"
        tensors[f"{name}.patch_embed.proj.weight"] = mx.array(draw.matrix(24, 12).astype(np.float32))
    whole = _config(text if drafter == "own" or PROMISE in config else {**text, PROMISE: 0}, variant, wrapper)
    target = _write(Path(out) / "target", whole, tensors, bits, dtype, 2, "pt" if raw else "mlx")
    write_byte_tokenizer(target, text["vocab_size"], SPECIALS)
    if drafter in ("dflash", "dflash2"):
        block = drafter_config(text, drafter == "dflash2", block_size, sliding, causal)
        arrays = _arrays(drafter_tensors(draw, block), dtype)
        return target, _write(Path(out) / "drafter", block, arrays, bits, dtype, 1, "pt")
    if drafter != "mtp":
        return target, target if drafter == "own" else None
    card = {"model_type": "qwen3_5_mtp", "block_size": block_size, "text_config": _text_config(text, variant)}
    card["tie_word_embeddings"] = text["tie_word_embeddings"]
    return target, _write(Path(out) / "drafter", card, _stacked(head), bits, dtype, 1, "mlx")


# -- configurations ------------------------------------------------------------------------------------


def _family(variant: str) -> str:
    return "qwen3_5_moe" if variant == "moe" else "qwen3_5"


def _text_config(text: Mapping[str, Any], variant: str) -> dict[str, Any]:
    return {"model_type": f"{_family(variant)}_text", **text}


def _config(text: Mapping[str, Any], variant: str, wrapper: bool) -> dict[str, Any]:
    name = "Qwen3_5Moe" if variant == "moe" else "Qwen3_5"
    if not wrapper:
        return {"architectures": [f"{name}ForCausalLM"], **_text_config(text, variant)}
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": _family(variant),
        "text_config": _text_config(text, variant),
        "vision_config": {"model_type": _family(variant), **VISION},
        "image_token_id": SPECIALS.index("<image>"),
        "video_token_id": SPECIALS.index("<video>"),
        "tie_word_embeddings": text["tie_word_embeddings"],
        "vocab_size": text["vocab_size"],
    }


# -- tensors -------------------------------------------------------------------------------------------


def _arrays(tensors: Iterator[tuple[str, np.ndarray]], dtype: str) -> dict[str, mx.array]:
    def array(name: str, value: np.ndarray) -> mx.array:
        single = mx.array(value.astype(np.float32))
        return single if name.endswith("A_log") else single.astype(getattr(mx, dtype))

    return {name: array(name, value) for name, value in tensors}


def _named(bare: Mapping[str, mx.array], wrapper: bool, raw: bool) -> dict[str, mx.array]:
    """The text stack's tensors under the names, and with the axes and norms, of the layout asked for."""
    trunk = "model.language_model." if raw and wrapper else "model." if raw else "language_model.model."
    arrays = {name: _delta(name, value) for name, value in bare.items()} if raw else _stacked(bare)

    def full(name: str) -> str:
        if name.startswith("lm_head."):
            return name if raw else f"language_model.{name}"
        return trunk + name

    return {full(name): value for name, value in arrays.items()}


def _own(head: Mapping[str, mx.array], raw: bool) -> dict[str, mx.array]:
    """An MTP head as it lies in the target's files: published as deltas, kept by a conversion as it is."""
    arrays = {name: value - 1 if _is_norm(name) else value for name, value in head.items()} if raw else _stacked(head)
    return {f"mtp.{name}": value for name, value in arrays.items()}


def _delta(name: str, value: mx.array) -> mx.array:
    shifted = _is_norm(name) and not name.endswith("linear_attn.norm.weight")
    return value - 1 if shifted else value


def _is_norm(name: str) -> bool:
    """Whether a tensor is one of the norms stored as deltas (in a head, all of them are)."""
    return name.endswith((*(f"{kind}.weight" for kind in SHIFTED), "pre_fc_norm_embedding.weight", "hidden.weight"))


def _stacked(bare: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Published axes -> those of MLX; the values drawn are final, so nothing is added to the norms."""
    swapped = {
        name: value.moveaxis(2, 1) if value.ndim == 3 and "conv1d" in name else value for name, value in bare.items()
    }
    return {name: mx.contiguous(value) for name, value in converted(swapped).items()}


def _write(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, mx.array],
    bits: int | None,
    dtype: str,
    shards: int,
    layout: str,
) -> Path:
    """Write config.json and the files of tensors; returns the folder."""
    out = {**config, "dtype": dtype, "transformers_version": "5.24.0"}
    if bits is not None:
        tensors, table = _quantised(tensors, bits)
        out["quantization"] = out["quantization_config"] = table
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(out, indent=2) + "\n", encoding="utf-8")
    write_weights(path, tensors, shards, layout)
    return path


def _quantised(tensors: Mapping[str, mx.array], bits: int) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Every matrix wide enough as weight, scales and biases; and the `quantization` entry describing them."""
    table: dict[str, Any] = {"group_size": GROUP, "bits": bits, "mode": "affine"}
    out: dict[str, mx.array] = {}
    for name, value in tensors.items():
        path = name.removesuffix(".weight")
        router = path.endswith(("mlp.gate", "shared_expert_gate"))
        how = ROUTER if router else {"group_size": GROUP, "bits": bits}
        kernel = any(part in name for part in ("conv1d", "patch_embed", "base_kernel", "codebook"))
        if value.ndim < 2 or value.shape[-1] % how["group_size"] or kernel:
            out[name] = value
            continue
        parts = mx.quantize(value, group_size=how["group_size"], bits=how["bits"])
        out |= {f"{path}.{part}": array for part, array in zip(("weight", "scales", "biases"), parts, strict=True)}
        if router:
            table[path] = ROUTER
    return out, table
