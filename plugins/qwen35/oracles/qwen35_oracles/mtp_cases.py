"""Tiny pairs and scripted rounds that every oracle of the MTP head, and the plugin's tests, agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_spec_qwen35.tiny import write_tiny

WIDTH = 5
"""L of the scripted rounds: four drafts each."""
ACCEPTED = (0, 2, 4, 1, 3)
"""Drafts taken for right in each round; what they are replaced by is scripted."""
LENGTHS = (2, 19)
"""Committed positions before the first round."""
SHOWN = 5
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Case:
    """A target and a head; the head's directory is a wrapper of its own where `own` is set."""

    name: str
    seed: int
    options: Mapping[str, Any]
    own: bool = False

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write both; returns (target, directory of the head)."""
        if not self.own:
            target, head = write_tiny(folder / self.name, self.seed, drafter="mtp", **self.options)
        else:  # the same tensors twice: readers differ in whether they take a wrapper for a target
            target = write_tiny(folder / self.name, self.seed, drafter="own", raw=True, **self.options)[0]
            layout = {"drafter": "own", "raw": True, "wrapper": True}
            head = write_tiny(folder / f"{self.name}-wrapped", self.seed, **layout, **self.options)[0]
        if head is None:
            raise ValueError(f"case {self.name} writes no head")
        return target, head


CASES = (
    Case("external", 51, {}),
    Case("external-tied", 52, {"variant": "tied"}),
    Case("external-moe", 53, {"variant": "moe"}),
    Case("external-4bit", 55, {"bits": 4}),
    Case("published", 56, {}, own=True),
    Case("published-moe", 57, {"variant": "moe"}, own=True),
)


def script(case: Case, length: int) -> list[int]:
    """`length` committed ids, the anchor, and the ids that all rounds will commit."""
    rng = np.random.default_rng([case.seed, length])
    return [int(t) for t in rng.integers(6, 300, length + 1 + sum(ACCEPTED) + len(ACCEPTED))]


def summary(rounds: list[tuple[list[int], list[np.ndarray]]]) -> list[dict[str, Any]]:
    """Per round its drafts and, per step, the largest logits."""
    return [
        {"draft": ids, "logits": [[round(float(v), 5) for v in np.sort(row)[::-1][:SHOWN]] for row in rows]}
        for ids, rows in rounds
    ]


def differences(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[str]:
    """What differs between two summaries, in words; empty when they agree."""
    found = []
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        if a["draft"] != b["draft"]:
            found.append(f"round {i}: drafts {a['draft']} and {b['draft']}")
        gap = float(np.abs(np.array(a["logits"]) - np.array(b["logits"])).max())
        if gap > TOLERANCE:
            found.append(f"round {i}: logits by {gap:.2e}")
    return found
