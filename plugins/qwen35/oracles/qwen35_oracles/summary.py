"""An answer of a few hundred bytes: enough of the arrays to catch any difference in the maths."""

from __future__ import annotations

from typing import Any

import numpy as np

TOLERANCE = {"logits": 2e-3, "hidden": 2e-3, "residual": 1e-2}
"""Largest difference of a value; float32 sums in another order reach some 1e-4 on random weights, and the
residual stream is several times as large as what is normed."""
SHOWN = 6
"""Values kept per vector: of the last position, evenly spread."""


def summary(run: dict[str, Any]) -> dict[str, Any]:
    """Greedy ids of every position, and some values of the last one: logits, hidden, each layer's residual."""
    return {
        "greedy": np.argmax(run["logits"], axis=-1).tolist(),
        "logits": spread(run["logits"][-1]),
        "hidden": spread(run["hidden"][-1]),
        "residual": spread(run["residual"][-1].T.reshape(-1)),
    }


def spread(row: np.ndarray) -> list[float]:
    """SHOWN values of a vector, from its first to its last."""
    index = np.linspace(0, len(row) - 1, SHOWN).astype(int)
    return [round(float(row[i]), 5) for i in index]


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What differs between two summaries, in words; empty when they agree."""
    found = [f"greedy {one['greedy']} and {other['greedy']}"] if one["greedy"] != other["greedy"] else []
    for key, limit in TOLERANCE.items():
        gap = float(np.abs(np.array(one[key]) - np.array(other[key])).max())
        if gap > limit:
            found.append(f"{key} by {gap:.2e}")
    return found
