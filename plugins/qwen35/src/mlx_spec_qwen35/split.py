"""A head out of a checkpoint, in the layout of mlx-vlm's `qwen3_5_mtp` drafters.

Names lose `mtp.`, norms stored as deltas get their 1, fused or single experts become stacked ones. Matrices that are
packed stay as they are; floats are packed when asked for, routers to 8 bits as conversions of the targets do.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_spec.conversion.head import write_head
from mlx_spec.errors import LoadError
from mlx_spec.types import ModelRef

from .mtp_config import EXTRA_WIDTH, HeadConfig, head_config
from .mtp_files import EXTERNAL, NORMS, HeadFiles, find_head, norm_form
from .mtp_inventory import check_inventory, head_shapes, packed_modules, parts_of
from .mtp_weights import ROUTER, ROUTERS, read_arrays

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


def split_head(ref: ModelRef, out: Path, options: Mapping[str, object]) -> Path:
    """Write the drafter directory `out`, with the options of `spec_split_drafter`.

    Raises LoadError for a head that is not whole, or is packed already and to be packed.
    """
    files = find_head(ref)
    if files is None:
        raise _refuse(ref, "head", "no head tensors", "a checkpoint that kept its head")
    config = head_config(ref.config, ref.path)
    if config.text.mtp_use_dedicated_embeddings:
        raise _refuse(ref, "mtp_use_dedicated_embeddings", "True", "False: a head that borrows its target's embedding")
    problems = check_inventory(config, files.index, files.depth)
    if problems:
        first = problems[0]
        raise _refuse(ref, f"head, {first.subject}", first.found, first.expected)
    tensors = _floats(ref, files, options)
    settings = _stored_settings(config, files)
    if options.get("q_bits") or options.get("q_mode"):
        if settings:
            raise _refuse(
                ref,
                "head",
                f"a head that is packed already ({_brief(settings)})",
                "a head of floats, to pack it otherwise",
            )
        tensors, settings = _pack(tensors, config, files.depth, options)
    return write_head(out, tensors, _config(config, files, settings, options), options)


def _refuse(ref: ModelRef, what: str, found: str, expected: str) -> LoadError:
    return LoadError(
        f"{what} of {ref.name}",
        found=found,
        expected=expected,
        next_step="Use the original checkpoint, or leave out what is asked for besides",
        code="QW60",
    )


def _floats(ref: ModelRef, files: HeadFiles, options: Mapping[str, object]) -> dict[str, mx.array]:
    """Tensors of the network, lazy: norms as they are used, floats cast where a dtype is asked for."""
    deltas = norm_form(files).form == "deltas"
    dtype = DTYPES.get(str(options.get("dtype")))
    out = {}
    for name, array in read_arrays(ref, files).items():
        floating = mx.issubdtype(array.dtype, mx.floating)
        stored = array.dtype
        if deltas and NORMS.fullmatch(name):
            array = (array.astype(mx.float32) + 1).astype(stored)
        out[name] = array.astype(dtype) if dtype is not None and floating else array
    return out


def _stored_settings(config: HeadConfig, files: HeadFiles) -> dict[str, Any]:
    """How the head is packed in its checkpoint, in the form of config.json; {} for floats."""
    packed = packed_modules(config, files.depth, parts_of(files.index)[0])
    return _settings({name: how.as_dict() for name, how in packed.items()})


def _settings(packed: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The usual setting, and one per module that has another."""
    if not packed:
        return {}
    every = list(packed.values())
    usual = max(every, key=every.count)
    return {**usual, **{name: dict(how) for name, how in packed.items() if how != usual}}


def _brief(settings: Mapping[str, Any]) -> str:
    return f"{settings['bits']} bits in groups of {settings['group_size']}"


def _pack(
    tensors: dict[str, mx.array], config: HeadConfig, depth: int, options: Mapping[str, object]
) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Matrices packed as asked for, lazily, and the settings for config.json."""
    asked: dict[str, Any] = {
        "bits": options["q_bits"], "group_size": options["q_group_size"], "mode": options.get("q_mode") or "affine",
    }  # fmt: skip
    out, packed = dict(tensors), {}
    for name, shape in head_shapes(config.text, depth).items():
        path = name.removesuffix(".weight")
        how: dict[str, Any] = {**ROUTER, "mode": "affine"} if path.endswith(ROUTERS) else asked
        if len(shape) < 2 or shape[-1] % how["group_size"] or not name.endswith(".weight"):
            continue
        made = mx.quantize(out.pop(name), **how)
        out |= {f"{path}.{part}": array for part, array in zip(("weight", "scales", "biases"), made, strict=False)}
        packed[path] = how
    return out, _settings(packed)


def _config(
    config: HeadConfig, files: HeadFiles, settings: Mapping[str, Any], options: Mapping[str, object]
) -> dict[str, Any]:
    """config.json of the drafter."""
    text = {**config.section}
    for key in ("quantization", "quantization_config", "vision_config"):
        text.pop(key, None)
    text["mtp_num_hidden_layers"] = files.depth
    made: dict[str, Any] = {
        "model_type": EXTERNAL,
        "text_config": text,
        "block_size": options.get("block_size") or files.depth + EXTRA_WIDTH,
        "tie_word_embeddings": config.text.tie_word_embeddings,
    }
    return {**made, **({"quantization": settings, "quantization_config": settings} if settings else {})}
