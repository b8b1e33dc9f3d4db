"""MTP heads through mlx-vlm: its own loader, its priming and its drafting. Needs mlx-vlm 0.7.10.

Its rounds keep the cache rows it made from its own guesses where those were accepted; the plugin makes all rows from
verified states. So every guess is taken back before a round is accepted here, which feeds them anew.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.utils import load_model

from .mtp_cases import ACCEPTED, WIDTH

VERSIONS = {"mlx-vlm": version("mlx-vlm"), "mlx": mx.__version__}


class Oracle:
    """One pair, loaded."""

    def __init__(self, target: Path, head: Path):
        self.language: Any = load_model(target).language_model
        self.drafter: Any = load_drafter(str(head), kind="mtp")[0]

    def hidden(self, ids: list[int]) -> mx.array:
        """States (1, n, H) after the final norm."""
        last = len(self.language.model.layers) - 1
        out = self.language(mx.array([ids]), cache=self.language.make_cache(), capture_layer_ids=[last])
        return self.language.model.norm(out.hidden_states[-1])

    def run(self, ids: list[int], length: int) -> list[tuple[list[int], list[np.ndarray]]]:
        """Drafts and logits (V,) per step, of every scripted round."""
        drafter, hidden, rows = self.drafter, self.hidden(ids), list[np.ndarray]()

        def sampler(logits: mx.array) -> mx.array:
            rows.append(np.array(logits[0, -1].astype(mx.float32)))
            return mx.argmax(logits, axis=-1)

        drafter.reset(self.language)
        drafter.prefill_from_target_hidden(mx.array([ids[:length]]), hidden[:, :length], ids[length], sampler)
        rounds, n = [], length
        for accepted in ACCEPTED:
            draft = drafter.draft_block(ids[n], hidden[:, n - 1 : n], None, WIDTH, sampler)
            rounds.append((draft[0].tolist(), rows[:]))
            rows.clear()
            for cache in drafter._cache:
                cache.trim(drafter._round_appended)
            drafter._next_position -= drafter._round_appended
            drafter._round_appended = 0
            scripted = mx.array([ids[n + 1 : n + WIDTH]])
            new = ids[n + accepted + 1]
            drafter.accept_verified_tokens(hidden[:, n : n + WIDTH], scripted, accepted, [new], sampler)
            n += accepted + 1
        return rounds
