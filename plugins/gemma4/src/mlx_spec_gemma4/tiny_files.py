"""Writing a tiny checkpoint: dtype, optional quantisation, shards, index and JSON files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.testing import write_weights

GROUP = 32
"""Quantisation group; matrices whose width is no multiple of it stay as they are."""
ROUTER = {"group_size": 64, "bits": 8}
"""How routers are stored whatever the rest is, as mlx-lm converts them."""


def write_checkpoint(
    path: Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, np.ndarray]],
    dtype: str,
    quantise: int | None,
    shards: int = 2,
) -> Path:
    """Write config.json, generation_config.json, shards and their index into `path`; returns it."""
    arrays = {name: _array(value, dtype) for name, value in tensors}
    out: dict[str, Any] = {**config, "dtype": dtype, "transformers_version": "5.24.0"}
    if quantise is not None:
        arrays, table = quantised(dict(_mlx_names(arrays)), quantise)
        out["quantization"] = out["quantization_config"] = table
    path.mkdir(parents=True, exist_ok=True)
    text = config.get("text_config", config)
    ends = {key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(path / "config.json", out)
    _write_json(path / "generation_config.json", {**ends, "do_sample": False})
    write_weights(path, arrays, shards, layout="pt" if quantise is None else "mlx")
    return path


def quantised(arrays: Mapping[str, mx.array], bits: int) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Every matrix wide enough as weight, scales and biases; and the `quantization` entry describing them."""
    table: dict[str, Any] = {"group_size": GROUP, "bits": bits, "mode": "affine"}
    out: dict[str, mx.array] = {}
    for name, value in arrays.items():
        path = name.removesuffix(".weight")
        how = ROUTER if path.endswith("router.proj") else {"group_size": GROUP, "bits": bits}
        if value.ndim < 2 or value.shape[-1] % how["group_size"]:
            out[name] = value
            continue
        parts = mx.quantize(value, group_size=how["group_size"], bits=how["bits"])
        out |= {f"{path}.{part}": array for part, array in zip(("weight", "scales", "biases"), parts, strict=True)}
        if how is ROUTER:
            table[path] = ROUTER
    return out, table


def _array(value: np.ndarray, dtype: str) -> mx.array:
    if value.dtype.kind == "i":
        return mx.array(value, dtype=mx.int64)
    return mx.array(value.astype(np.float32)).astype(getattr(mx, dtype))


def _mlx_names(arrays: Mapping[str, mx.array]) -> Iterable[tuple[str, mx.array]]:
    """Names and layout of a converted checkpoint: those of mlx-lm's modules."""
    for name, value in arrays.items():
        name = name.replace("model.language_model.", "language_model.model.", 1)
        if name.endswith(".experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj") + "switch_glu"
            gate, up = mx.split(value, 2, axis=-2)
            yield f"{base}.gate_proj.weight", gate
            yield f"{base}.up_proj.weight", up
        elif name.endswith(".experts.down_proj"):
            yield name.removesuffix("down_proj") + "switch_glu.down_proj.weight", value
        else:
            yield name, value


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
