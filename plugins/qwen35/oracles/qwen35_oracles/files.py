"""Tensors of a checkpoint directory in float64, read and unpacked without any library but numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray
KINDS = {"F32": "<f4", "F16": "<f2", "U32": "<u4", "I32": "<i4"}


class Tensors:
    """Tensors by the name they have below the text stack ("layers.0.mlp.up_proj.weight"), as float64."""

    def __init__(self, path: Path, config: dict[str, Any]):
        self.packing = config.get("quantization") or {}
        self.stored: dict[str, Array] = {}
        self.full: dict[str, str] = {}
        for file in sorted(path.glob("*.safetensors")):
            for name, value in read(file).items():
                short = name
                for wrapping in ("model.", "language_model.", "model."):
                    short = short.removeprefix(wrapping)
                self.stored[short], self.full[short] = value, name

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def __getitem__(self, name: str) -> Array:
        base = name.removesuffix(".weight")
        if f"{base}.scales" not in self.stored:
            return self.stored[name].astype(np.float64)
        bits = {**self.packing, **self.packing.get(self.full[name].removesuffix(".weight"), {})}["bits"]
        return unpacked(*(self.stored[f"{base}.{part}"] for part in ("weight", "scales", "biases")), bits)


def read(file: Path) -> dict[str, Array]:
    """Tensors of one safetensors file."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)

    def tensor(entry: dict[str, Any]) -> Array:
        begin, end = entry["data_offsets"]
        return np.frombuffer(data[start + begin : start + end], KINDS[entry["dtype"]]).reshape(entry["shape"])

    return {name: tensor(entry) for name, entry in header.items()}


def unpacked(words: Array, scales: Array, biases: Array, bits: int) -> Array:
    """(..., n * bits / 32) words with a scale and a bias per group -> (..., n)."""
    places = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    codes = (words[..., None] >> places) & np.uint32(2**bits - 1)
    grouped = codes.reshape(*scales.shape, -1).astype(np.float64)
    values: Array = grouped * scales.astype(np.float64)[..., None] + biases.astype(np.float64)[..., None]
    return values.reshape(*words.shape[:-1], -1)
