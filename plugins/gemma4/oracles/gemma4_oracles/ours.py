"""The plugin on one pair, asked the same question as an oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.lane import Lane
from mlx_spec.types import ModelRef, TapBlock
from mlx_spec_gemma4.config import assistant_card
from mlx_spec_gemma4.drafter import Gemma4Drafter
from mlx_spec_gemma4.target import Gemma4Target

from .cases import STEPS


def open_ref(path: Path) -> ModelRef:
    """A directory with its config.json."""
    return ModelRef(path.name, path, json.loads((path / "config.json").read_text()))


class Ours:
    """One pair, loaded."""

    def __init__(self, target: Path, drafter: Path):
        ref = open_ref(target)
        self.target = Gemma4Target.load(ref, ref.config)
        ref = open_ref(drafter)
        self.drafter = Gemma4Drafter.load(ref, assistant_card(ref), self.target)

    def run(self, ids: list[int]) -> dict[str, Any]:
        """logits (n, V), hidden (n, H), draft tokens and draft logits (STEPS, V) of `ids`, the anchor last."""
        lane, seen = lane_of(self.target, self.drafter, [ids])
        tokens, rows = greedy_draft(lane, [STEPS])
        return {
            "logits": np.array(seen[0].logits[0].astype(mx.float32)),
            "hidden": np.array(seen[0].taps["hidden"][0].astype(mx.float32)),
            "draft": tokens[0],
            "draft_logits": rows[:, 0],
        }


def lane_of(
    target: Gemma4Target, drafter: Gemma4Drafter, prompts: list[list[int]], **kv: Any
) -> tuple[Lane, list[Any]]:
    """A lane standing after each prompt's last but one token, and what each prefill gave."""
    seen, groups = [], []
    for ids in prompts:
        states = target.make_states(**kv)
        seen.append(target.forward(mx.array([ids[:-1]], dtype=mx.int32), states, ("hidden",)))
        groups.append(states)
    states = groups[0] if len(groups) == 1 else type(groups[0]).merge(groups)
    lane = Lane(target, drafter, states, drafter.make_state())
    lane.tokens = [list(ids) for ids in prompts]
    lane.anchors = mx.array([ids[-1] for ids in prompts], dtype=mx.int32)
    last = mx.concatenate([s.taps["hidden"][:, -1:] for s in seen])
    lane.fresh = [TapBlock({"hidden": last}, [1] * len(prompts))]
    return lane, seen


def greedy_draft(lane: Lane, budget: list[int]) -> tuple[list[list[int]], np.ndarray]:
    """Draft tokens (B, K) as lists, and the logits they were taken from (K, B, V)."""
    rows: list[mx.array] = []

    def draw(logits: mx.array, step: int) -> tuple[mx.array, None]:
        if step != len(rows):
            raise AssertionError(f"step {step} drawn after {len(rows)} draws")
        rows.append(logits)
        return mx.argmax(logits, axis=-1).astype(mx.int32), None

    lane.bind_draw(draw)
    try:
        draft = lane.drafter.propose(lane, budget)
    finally:
        lane.bind_draw(None)
    tokens: list[list[int]] = draft.tokens.tolist()
    return tokens, np.stack([np.array(r.astype(mx.float32)) for r in rows]) if rows else np.zeros((0, 0, 0))
