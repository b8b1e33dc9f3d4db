"""Figures of speculative rounds, from which drafts match a text."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor


def rounds(matched: Tensor, first: int) -> list[int]:
    """Accepted drafts of every round of one row [Q, drafts]; `first` is the first anchor."""
    accepted, anchor = [], first
    while anchor < len(matched):
        a = int(matched[anchor].long().cumprod(0).sum())
        accepted.append(a)
        anchor += a + 1
    return accepted


def figures_of(matched: Tensor, first: int) -> dict[str, Any]:
    """Acceptance per draft position and committed tokens per round; matched is bool [B, Q, drafts]."""
    drafts = matched.shape[-1]
    runs = np.asarray([a for row in matched for a in rounds(row, first)])
    reached = [(runs >= j).sum() for j in range(drafts + 1)]
    return {
        "rounds": len(runs),
        "accepted_given_reached": [round(float(reached[j + 1] / max(1, reached[j])), 4) for j in range(drafts)],
        "accepted_at_position": [round(float(reached[j + 1] / len(runs)), 4) for j in range(drafts)],
        "tokens_per_round": round(float(runs.mean() + 1), 4),
    }
