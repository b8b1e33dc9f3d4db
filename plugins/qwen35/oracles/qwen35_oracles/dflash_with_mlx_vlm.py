"""Tiny DFlash pairs through mlx-vlm: its own loader, drafter and cache. Needs mlx-vlm 0.7.10."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.utils import load_model

from .dflash_ours import KEPT, ROUNDS, round_ids

VERSIONS = {"mlx-vlm": version("mlx-vlm"), "mlx": mx.__version__}


class Oracle:
    """One pair, loaded."""

    def __init__(self, target: Path, drafter: Path):
        self.model = load_model(target)
        self.language: Any = self.model.language_model
        self.drafter: Any = load_drafter(str(drafter), kind="dflash")[0]

    def run(self, ids: list[int], L: int) -> list[dict[str, Any]]:
        """Per round, the drafted tokens and the logits of the masks (L - 1, V); see `Ours.run`."""
        layers = list(self.drafter.config.target_layer_ids)
        cache, context = self.language.make_cache(), self.drafter.reset(self.model)
        answers = []
        fresh, anchor = ids[:-1], ids[-1]
        for turn in range(ROUNDS):
            out = self.language(mx.array([fresh]), cache=cache, capture_layer_ids=layers)
            features = mx.concatenate(list(out.hidden_states), axis=-1)
            answers.append(self._draft(anchor, features, context, L))
            fresh = [anchor, *round_ids(ids, turn, KEPT[turn])]
            fresh, anchor = fresh[:-1], fresh[-1]
        return answers

    def _draft(self, anchor: int, features: mx.array, context: Any, L: int) -> dict[str, Any]:
        rows: list[mx.array] = []
        project = self.drafter._logits

        def seen(hidden: mx.array) -> mx.array:
            rows.append(project(hidden))
            return rows[-1]

        self.drafter._logits = seen
        try:
            tokens = self.drafter.draft_block(anchor, features, context, L, lambda x: mx.argmax(x, axis=-1))
        finally:
            del self.drafter._logits
        return {"draft": tokens[0].tolist(), "logits": np.array(rows[0][0].astype(mx.float32))}
