"""The tiny checkpoints and prompts that every oracle and the plugin's tests agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mlx_spec_qwen35.tiny import write_tiny


@dataclass(frozen=True)
class Case:
    """One checkpoint: its seed, the options it is written with, and who can read it."""

    name: str
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)
    oracles: Sequence[str] = ("mlx_vlm", "transformers")

    def write(self, folder: Path) -> Path:
        """Write it; returns the target's directory."""
        return write_tiny(folder / self.name, self.seed, **self.options)[0]


ONE_KEY_HEAD = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
}
CASES = (
    Case("dense", 31, {"raw": True}),
    Case("tied", 32, {"variant": "tied", "raw": True}),
    Case("moe", 33, {"variant": "moe", "raw": True}),
    Case("own-head", 34, {"raw": True, "drafter": "own"}),
    Case("one-key-head", 35, {"raw": True, "full_attention_interval": 2, "num_hidden_layers": 5, **ONE_KEY_HEAD}),
    Case("converted", 36, oracles=("mlx_vlm",)),  # transformers reads the published layout
    Case("moe-converted", 37, {"variant": "moe"}, oracles=("mlx_vlm",)),
    Case("dense-4bit", 38, {"bits": 4}, oracles=("mlx_vlm",)),  # nor any MLX quantisation
    Case("moe-8bit", 39, {"variant": "moe", "bits": 8}, oracles=("mlx_vlm",)),
    Case("moe-unnormalised", 40, {"variant": "moe", "raw": True, "norm_topk_prob": False}, oracles=()),
)
LENGTHS = (1, 4, 21, 70)
"""Positions per prompt: one, the convolution's width, and both sides of the 64 that torch takes at a time."""


def prompt(case: Case, length: int) -> list[int]:
    """`length` ids, seeded by the case."""
    rng = np.random.default_rng([case.seed, length])
    return [int(t) for t in rng.integers(7, 263, length)]
