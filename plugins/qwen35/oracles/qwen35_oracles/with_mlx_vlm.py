"""Tiny cases through mlx-vlm: its own loader and language model. Needs mlx-vlm 0.7.10."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.utils import load_model

VERSIONS = {"mlx-vlm": version("mlx-vlm"), "mlx": mx.__version__}


class Oracle:
    """One checkpoint, loaded."""

    def __init__(self, path: Path):
        self.model = load_model(path)
        self.language: Any = self.model.language_model

    def run(self, ids: list[int]) -> dict[str, Any]:
        """logits (n, V), hidden (n, H) after the final norm, residual (n, layers, H)."""
        layers = list(range(len(self.language.model.layers)))
        cache = self.language.make_cache()
        out = self.language(mx.array([ids]), cache=cache, capture_layer_ids=layers)
        after = mx.stack(list(out.hidden_states), axis=2)
        hidden = self.language.model.norm(after[:, :, -1])
        return {
            "logits": np.array(out.logits[0].astype(mx.float32)),
            "hidden": np.array(hidden[0].astype(mx.float32)),
            "residual": np.array(after[0].astype(mx.float32)),
        }
