"""The plugin's DFlash drafter on tiny pairs, asked what an oracle is asked; and those pairs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.draft_state import DraftState
from mlx_spec.lane import Lane
from mlx_spec.settings import reset_settings
from mlx_spec.types import ModelRef, TapBlock
from mlx_spec_qwen35.dflash import DFlashDrafter
from mlx_spec_qwen35.dflash_config import dflash_card
from mlx_spec_qwen35.target import Qwen35Target
from mlx_spec_qwen35.tiny import write_tiny

from .dflash_reference import Array, DFlash, tensors
from .summary import spread

BLOCK = 6
TOLERANCE = 2e-3
"""Largest difference of a logit: float32 sums in another order, through the target and the drafter."""
WINDOW = 8
"""Sliding window of the tiny drafters."""
ROUNDS = 3
KEPT = (2, 3, 2)
"""Rows that each round commits; never one: mlx-vlm then fills a window as a ring and masks it in order of time."""
LENGTHS = (2, WINDOW, WINDOW + 1, 23)
"""Tokens per prompt, anchor last: below the window, at it, past it, well past it."""


@dataclass(frozen=True)
class Case:
    """One pair: how its drafter is made and which oracles read it as we do."""

    name: str
    seed: int
    options: Mapping[str, Any] = field(hash=False)
    oracles: Sequence[str] = field(default=())

    @property
    def width(self) -> int:
        """L of the blocks that are compared, within what the drafter declares."""
        return 5 if self.options["drafter"] == "dflash2" else BLOCK

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write the pair; returns (target, drafter)."""
        target, drafter = write_tiny(folder / self.name, self.seed, block_size=BLOCK, **self.options)
        if drafter is None:
            raise ValueError(f"case {self.name} writes no drafter")
        return target, drafter


FIRST, SECOND = {"drafter": "dflash"}, {"drafter": "dflash2"}
CASES = (
    Case("full", 31, FIRST, ("mlx_vlm",)),
    Case("tied", 32, {**FIRST, "variant": "tied"}, ("mlx_vlm",)),
    Case("sliding", 33, {**FIRST, "sliding": True}),  # read otherwise by mlx-vlm: no mask
    Case("sliding-causal", 34, {**FIRST, "sliding": True, "causal": True}, ("mlx_vlm",)),
    Case("sliding-both-ways", 35, {**FIRST, "sliding": True, "causal": False}),
    Case("causal", 36, {**FIRST, "causal": True}, ("mlx_vlm",)),
    Case("second", 37, SECOND, ("mlx_vlm",)),
    Case("second-sliding", 38, {**SECOND, "sliding": True}),
)


def prompt(case: Case, length: int) -> list[int]:
    """`length` seeded ids, the anchor last."""
    rng = np.random.default_rng([case.seed, length])
    return [int(t) for t in rng.integers(6, 300, length)]


def open_ref(path: Path) -> ModelRef:
    """A directory with its config.json."""
    return ModelRef(path.name, path, json.loads((path / "config.json").read_text()))


@contextmanager
def unpacked() -> Iterator[None]:
    """Drafters loaded inside keep their matrices as they are stored."""
    before = os.environ.get("MLX_SPEC_QUANTIZE_DRAFTER")
    os.environ["MLX_SPEC_QUANTIZE_DRAFTER"] = "0"
    reset_settings()
    try:
        yield
    finally:
        os.environ.pop("MLX_SPEC_QUANTIZE_DRAFTER")
        if before is not None:
            os.environ["MLX_SPEC_QUANTIZE_DRAFTER"] = before
        reset_settings()


class Ours:
    """One pair, loaded, its drafter unpacked; `reference` is the same drafter in float64."""

    def __init__(self, target: Path, drafter: Path):
        ref = open_ref(target)
        self.target = Qwen35Target.load(ref, ref.config)
        ref = open_ref(drafter)
        card = dflash_card(ref)
        if card is None:
            raise ValueError(f"{drafter} holds no DFlash drafter")
        with unpacked():
            self.drafter = DFlashDrafter.load(ref, card, self.target)
        table, output = tables(target)
        self.reference = DFlash(drafter, table, output)

    def start(self, ids: Sequence[int], chunk: int = 7) -> tuple[Lane, Array]:
        """A lane of one row after a prefill in chunks, and its features (n, ids * H)."""
        states, context = self.target.make_states(), self.drafter.make_state()
        features = np.zeros((0, len(self.drafter.taps) * self.target.hidden_size))
        for at in range(0, len(ids) - 1, chunk):
            tokens = mx.array([list(ids[at : min(at + chunk, len(ids) - 1)])], dtype=mx.int32)
            taps = self.target.prefill(tokens, states, self.drafter.taps)
            self.drafter.prime(context, tokens, taps, at)
            features = np.concatenate([features, self.features(taps)[0]])
        return lane_of(self, [(list(ids), states, context)]), features

    def run(self, ids: Sequence[int], L: int) -> list[dict[str, Any]]:
        """`ROUNDS` blocks, each after KEPT more committed tokens: drafted tokens, and logits of the masks (L - 1, V).

        The logits are those before a selector, as an oracle without one hands them out.
        """
        lane, _ = self.start(ids, chunk=len(ids))
        answers = []
        for turn in range(ROUNDS):
            with recorded(self.drafter) as rows:
                drafts, _ = propose(lane, [L - 1])
            answers.append({"draft": drafts[0], "logits": np.array(rows[0][0].astype(mx.float32))})
            lane.fresh = []
            new = round_ids(ids, turn, KEPT[turn])
            verify(self, lane, [[lane.tokens[0][-1], *new[:-1]]], [len(new)], [new])
        return answers

    def features(self, taps: Mapping[str, mx.array]) -> Array:
        """The taps side by side, (B, S, ids * H)."""
        parts = [np.array(taps[name].astype(mx.float32)) for name in self.drafter.taps]
        out: Array = np.concatenate(parts, axis=-1).astype(np.float64)
        return out


@contextmanager
def recorded(drafter: DFlashDrafter) -> Iterator[list[mx.array]]:
    """What the drafter's `_logits` gives inside."""
    rows: list[mx.array] = []
    inner = drafter._logits

    def seen(target: Any, hidden: mx.array) -> mx.array:
        rows.append(inner(target, hidden))
        return rows[-1]

    drafter._logits = seen  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        del drafter._logits


def round_ids(ids: Sequence[int], turn: int, count: int) -> list[int]:
    """Tokens that round `turn` commits, seeded by the prompt."""
    rng = np.random.default_rng([*ids[-3:], turn])
    return [int(t) for t in rng.integers(6, 300, count)]


def summary(answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per round, the drafted tokens and six logits of every mask."""
    return [{"draft": one["draft"], "logits": [spread(row) for row in one["logits"]]} for one in answers]


def differences(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> list[str]:
    """What differs between two summaries, in words; empty when they agree."""
    found = []
    for turn, (a, b) in enumerate(zip(one, other, strict=True)):
        if a["draft"] != b["draft"]:
            found.append(f"draft {a['draft']} and {b['draft']} in round {turn}")
        gap = float(np.abs(np.array(a["logits"]) - np.array(b["logits"])).max())
        if gap > TOLERANCE:
            found.append(f"logits by {gap:.2e} in round {turn}")
    return found


def tables(target: Path) -> tuple[Array, Array]:
    """The target's embedding and output head."""
    held = {name.split("model.")[-1].removeprefix("language_model."): v for name, v in tensors(target).items()}
    embedding = held["embed_tokens.weight"]
    return embedding, held.get("lm_head.weight", embedding)


def lane_of(ours: Ours, rows: Sequence[tuple[list[int], Any, DraftState]]) -> Lane:
    """A lane of rows (tokens, target states, context)."""
    tokens, states, contexts = zip(*rows, strict=True)
    merged = states[0] if len(rows) == 1 else type(states[0]).merge(states)
    lane = Lane(ours.target, ours.drafter, merged, DraftState.merge(contexts))
    lane.tokens = [list(ids) for ids in tokens]
    lane.anchors = mx.array([ids[-1] for ids in tokens], dtype=mx.int32)
    return lane


def propose(lane: Lane, budget: Sequence[int]) -> tuple[list[list[int]], list[Array]]:
    """Greedy drafts of every row, and the scores (budget[b], V) they were taken from."""
    asked: list[mx.array] = []

    def draw(logits: mx.array, step: int) -> tuple[mx.array, None]:
        if step != len(asked):
            raise AssertionError(f"step {step} drawn after {len(asked)} draws")
        asked.append(logits)
        return mx.argmax(logits, axis=-1).astype(mx.int32), None

    lane.bind_draw(draw)
    try:
        draft = lane.drafter.propose(lane, budget)
    finally:
        lane.bind_draw(None)
    counts = [draft.tokens.shape[1]] * lane.size if draft.counts is None else draft.counts
    ids = [row[:n] for row, n in zip(draft.tokens.tolist(), counts, strict=True)]
    stacked = np.stack([np.array(row.astype(mx.float32)) for row in asked], axis=1)
    return ids, [stacked[b, :n].astype(np.float64) for b, n in enumerate(counts)]


def verify(
    ours: Ours, lane: Lane, block: Sequence[Sequence[int]], keep: Sequence[int], tokens: Sequence[Sequence[int]]
) -> Array:
    """Run `block` (B, L), keep keep[b] rows and commit tokens[b]; features (B, L, ids * H)."""
    mark = lane.states.mark()
    seen = ours.target.forward(mx.array([list(row) for row in block], dtype=mx.int32), lane.states, ours.drafter.taps)
    lane.states.rewind(mark, keep)
    lane.fresh.append(TapBlock(seen.taps, list(keep)))
    for held, new in zip(lane.tokens, tokens, strict=True):
        held.extend(new)
    lane.anchors = mx.array([held[-1] for held in lane.tokens], dtype=mx.int32)
    return ours.features(seen.taps)
