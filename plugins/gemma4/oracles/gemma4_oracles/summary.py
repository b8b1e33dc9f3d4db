"""An answer of a few hundred bytes: enough of the arrays to catch any difference in the maths."""

from __future__ import annotations

from typing import Any

import numpy as np

TOLERANCE = 2e-3
"""Largest difference of a logit or hidden value; f32 sums in another order reach about 1e-3 on random weights."""
SHOWN = 6
"""Values kept per vector: of the last position, evenly spread."""


def summary(run: dict[str, Any]) -> dict[str, Any]:
    """Greedy ids of every position and draft, and some values of the last position and of every draft step."""
    return {
        "greedy": np.argmax(run["logits"], axis=-1).tolist(),
        "draft": list(run["draft"]),
        "logits": _spread(run["logits"][-1]),
        "hidden": _spread(run["hidden"][-1]),
        "draft_logits": [_largest(row) for row in run["draft_logits"]],
    }


def _spread(row: np.ndarray) -> list[float]:
    index = np.linspace(0, len(row) - 1, SHOWN).astype(int)
    return [round(float(row[i]), 5) for i in index]


def _largest(row: np.ndarray) -> list[float]:
    # the largest ones exist under every head, whatever stands for "impossible"
    return [round(float(v), 5) for v in np.sort(row)[::-1][:SHOWN]]


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What differs between two summaries, in words; empty when they agree."""
    found = [f"{key} {one[key]} and {other[key]}" for key in ("greedy", "draft") if one[key] != other[key]]
    for key in ("logits", "hidden", "draft_logits"):
        gap = float(np.abs(np.array(one[key]) - np.array(other[key])).max())
        if gap > TOLERANCE:
            found.append(f"{key} by {gap:.2e}")
    return found
