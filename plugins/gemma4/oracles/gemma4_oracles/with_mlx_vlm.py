"""Tiny cases through mlx-vlm: its language model and its own assistant loader. Needs mlx-vlm 0.7.10."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.models.gemma4.config import TextConfig
from mlx_vlm.models.gemma4.language import LanguageModel
from mlx_vlm.speculative.drafters import load_drafter

from mlx_spec.types import ModelRef
from mlx_spec_gemma4.target import Gemma4Target

from .cases import STEPS

VERSIONS = {"mlx-vlm": version("mlx-vlm"), "mlx": mx.__version__}
POSITION_SHIFT = -1
"""Its rounds put every draft at the last committed position, n - 1."""


class Oracle:
    """One pair, loaded."""

    def __init__(self, target: Path, drafter: Path):
        config = json.loads((target / "config.json").read_text())
        text = config.get("text_config", config)
        self.model = LanguageModel(TextConfig.from_dict(text))
        self._fill(Gemma4Target.load(ModelRef(target.name, target, config), config), config)
        self.drafter = load_drafter(str(drafter), kind="mtp")[0]
        self.drafter.bind(self.model)

    def _fill(self, ours: Gemma4Target, config: dict[str, Any]) -> None:
        """Give mlx-vlm's modules our loaded weights; both use the same names."""
        import mlx.nn as nn

        stack = getattr(ours.model, "language_model", ours.model)
        weights = dict(tree_flatten(stack.parameters()))
        if "quantization" in config:
            modules = dict(stack.named_modules())
            nn.quantize(
                self.model,
                class_predicate=lambda path, _: (
                    {"group_size": modules[path].group_size, "bits": modules[path].bits}
                    if f"{path}.scales" in weights
                    else False
                ),
            )
        self.model.load_weights(list(weights.items()))

    def run(self, ids: list[int]) -> dict[str, Any]:
        """logits (n, V), hidden (n, H) after the final norm, draft tokens and draft logits (STEPS, V)."""
        n = len(ids) - 1
        cache = self.model.make_cache()
        out = self.model(mx.array([ids[:-1]]), cache=cache, return_hidden=True, return_shared_kv=True)
        hidden = self.model.model.norm(out.hidden_states[-1])
        tokens, rows = self._draft(ids[-1], hidden[:, -1:], out.shared_kv_states, n)
        return {
            "logits": np.array(out.logits[0]),
            "hidden": np.array(hidden[0]),
            "draft": tokens,
            "draft_logits": np.array(mx.concatenate(rows)),
        }

    def _draft(self, anchor: int, hidden: mx.array, shared: Any, n: int) -> tuple[list[int], list[mx.array]]:
        rows: list[mx.array] = []

        def sampler(logits: mx.array) -> mx.array:
            rows.append(logits[:, -1])
            return mx.argmax(logits, axis=-1)

        self.drafter.set_shared_kv(shared, n, position=n + POSITION_SHIFT)
        tokens = self.drafter.draft_block(anchor, hidden, None, STEPS + 1, sampler)
        return tokens[0].tolist(), rows
