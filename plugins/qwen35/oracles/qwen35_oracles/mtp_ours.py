"""A target and its MTP head as the plugin loads them, and one propose by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_spec.lane import Lane
from mlx_spec.types import Draft, DrafterCard, ModelRef, TapBlock
from mlx_spec_qwen35.mtp import MtpDrafter, output_matrix
from mlx_spec_qwen35.mtp_config import head_card
from mlx_spec_qwen35.target import Qwen35Target

from .mtp_cases import ACCEPTED, WIDTH
from .mtp_reference import HeadReference


def open_ref(path: Path) -> ModelRef:
    """A directory with its config.json."""
    return ModelRef(path.name, path, json.loads((path / "config.json").read_text()))


class Ours:
    """One pair, loaded. options: drafting options, as `--spec-config` gives them."""

    def __init__(self, target: Path, drafter: Path, **options: Any):
        ref = open_ref(target)
        self.target = Qwen35Target.load(ref, ref.config)
        self.drafter = self.load_head(drafter, **options)

    def load_head(self, path: Path, **options: Any) -> MtpDrafter:
        """The head in `path`, bound to the target."""
        ref = open_ref(path)
        card = head_card(ref)
        if card is None:
            raise ValueError(f"no head in {path}")
        card = DrafterCard(
            card.kind, card.model_type, card.block_size, card.vocab_size, None, {**card.extra, **options}
        )
        return MtpDrafter.load(ref, card, self.target)

    def matrices(self) -> tuple[np.ndarray, np.ndarray]:
        """Embedding and output matrix of the target, (V, H) each, unpacked, float64."""
        table = self.target.model.language_model.model.embed_tokens
        return tuple(_dense(layer) for layer in (table, output_matrix(self.target)))  # type: ignore[return-value]

    def lane(self, tokens: Sequence[int], chunk: int | None = None) -> tuple[Lane, dict[str, np.ndarray]]:
        """A lane that has committed `tokens`, the last one its anchor; and all taps, (n, H) each."""
        states, draft = self.target.make_states(), self.drafter.make_state()
        ids, step = list(tokens[:-1]), chunk or len(tokens)
        names, blocks = self.drafter.taps, []
        for start in range(0, len(ids), step):
            part = mx.array([ids[start : start + step]], dtype=mx.int32)
            blocks.append(self.target.forward(part, states, names).taps)
            self.drafter.prime(draft, part, blocks[-1], start)
        lane = Lane(self.target, self.drafter, states, draft)
        lane.tokens, lane.anchors = [list(tokens)], mx.array(tokens[-1:], dtype=mx.int32)
        lane.fresh = [TapBlock({name: tap[:, -1:] for name, tap in blocks[-1].items()}, [1])]
        seen = {name: mx.concatenate([b[name] for b in blocks], axis=1)[0].astype(mx.float32) for name in names}
        return lane, {name: np.array(tap, dtype=np.float64) for name, tap in seen.items()}

    def draft(self, lane: Lane, budget: Sequence[int]) -> tuple[Draft, list[np.ndarray]]:
        """Greedy drafts of a lane, and the logits (B, V) of each step."""
        rows: list[mx.array] = []

        def draw(logits: mx.array, step: int) -> tuple[mx.array, None]:
            rows.append(logits.astype(mx.float32))
            return mx.argmax(logits, axis=-1).astype(mx.int32), None

        lane.bind_draw(draw)
        try:
            draft = self.drafter.propose(lane, budget)
        finally:
            lane.bind_draw(None)
        return draft, [np.array(row) for row in rows]

    def expected(
        self,
        reference: HeadReference,
        tokens: Sequence[int],
        hidden: np.ndarray,
        count: int,
        ids: int | None = None,
        **how: bool,
    ) -> tuple[list[int], list[np.ndarray], float]:
        """What the reference drafts after `tokens`."""
        return reference.drafts(tokens, hidden, *self.matrices(), count, ids, **how)


def _dense(layer: Any) -> np.ndarray:
    value = layer.weight
    if "scales" in layer:
        value = mx.dequantize(value, layer.scales, layer.biases, layer.group_size, layer.bits)
    return np.array(value.astype(mx.float32), dtype=np.float64)


def scripted_rounds(pair: Ours, ids: list[int], length: int) -> list[tuple[list[int], list[np.ndarray]]]:
    """Drafts and logits (V,) per step, of the scripted rounds of `mtp_cases`, by the plugin."""
    lane, _ = pair.lane(ids[: length + 1])
    states = pair.target.forward(mx.array([ids], dtype=mx.int32), pair.target.make_states(), pair.drafter.taps).taps
    rounds, n = [], length
    for accepted in ACCEPTED:
        draft, rows = pair.draft(lane, [WIDTH - 1])
        rounds.append((draft.tokens[0].tolist(), [row[0] for row in rows]))
        block = {name: tap[:, n : n + WIDTH] for name, tap in states.items()}
        lane.fresh = [TapBlock(block, [accepted + 1])]
        n += accepted + 1
        lane.tokens = [ids[: n + 1]]
    return rounds
