"""The plugin on one checkpoint, asked the same question as an oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.checkpoint import read_config
from mlx_spec.types import ModelRef
from mlx_spec_qwen35.target import Qwen35Target


def load(path: Path) -> Qwen35Target:
    """The target in a directory."""
    config = read_config(path)
    return Qwen35Target.load(ModelRef(path.name, path, config), config)


class Ours:
    """One checkpoint, loaded."""

    def __init__(self, path: Path):
        self.target = load(path)

    def run(self, ids: list[int]) -> dict[str, Any]:
        """logits (n, V), hidden (n, H) and residual (n, layers, H) of `ids`."""
        target = self.target
        seen = target.forward(mx.array([ids], dtype=mx.int32), target.make_states(), target.tap_names)
        layers = [seen.taps[name] for name in target.tap_names if name.startswith("residual.")]
        return {
            "logits": as_numpy(seen.logits[0]),
            "hidden": as_numpy(seen.taps["hidden"][0]),
            "residual": as_numpy(mx.stack(layers, axis=2)[0]),
        }


def as_numpy(x: mx.array) -> np.ndarray:
    """Float32 values."""
    return np.array(x.astype(mx.float32))
