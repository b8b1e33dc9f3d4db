"""The tiny checkpoints and prompts that every oracle and the plugin's tests agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mlx_spec_gemma4.tiny import write_tiny

STEPS = 4
"""Draft steps per prompt."""
WINDOW = 8
"""Sliding window of the tiny checkpoints."""


@dataclass(frozen=True)
class Case:
    """One pair of checkpoints: a variant, its seed, the drafter's head and how weights are stored."""

    name: str
    variant: str
    seed: int
    ordered: bool = False
    tied: bool = True
    quantise: int | None = None
    oracles: Sequence[str] = field(default=("mlx_vlm", "transformers"))

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write the pair; returns (target, drafter)."""
        return write_tiny(
            folder / self.name, self.variant, self.seed, ordered=self.ordered, tied=self.tied, quantise=self.quantise
        )


CASES = (
    Case("e", "E", 11),
    Case("e-centroid", "E", 12, ordered=True),
    Case("e-untied", "E", 13, tied=False, oracles=("transformers",)),  # mlx-vlm drafts from the tied table here
    Case("e-4bit", "E", 14, quantise=4, oracles=("mlx_vlm",)),  # transformers reads no MLX quantisation
    Case("d31", "D31", 15),
    Case("d31-8bit", "D31", 16, quantise=8, oracles=("mlx_vlm",)),
    Case("moe", "MOE", 17),
    Case("moe-centroid", "MOE", 18, ordered=True),
    Case("uni", "UNI", 19),
    Case("vlm", "VLM", 20),
)
LENGTHS = (3, WINDOW, WINDOW + 1, 21)
"""Committed positions per prompt: below the window, at it, just past it, well past it."""


def prompt(case: Case, length: int) -> list[int]:
    """`length` committed ids and the anchor, seeded by the case."""
    rng = np.random.default_rng([case.seed, length])
    return [int(t) for t in rng.integers(7, 263, length + 1)]
