"""Drafting with DFlash: a context of committed positions, and one pass over a block per propose.

Invariant between rounds: row b's context in `DraftState.states` holds one K/V row per committed position it has
seen, all made from the target's own layer outputs. A propose appends the positions committed since then, which core
kept for it (`lane.fresh`), runs the block behind them and takes the block back: rejected rows never get in, so there
is nothing to roll back after the verify.

The block's rows do not see each other's tokens. Each token is drawn from its own row's law (DFlash2: from its law
given the token drawn before it), with `lane.draw`, so the reported law is the one drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_spec.draft_state import DraftState
from mlx_spec.errors import LoadError
from mlx_spec.lane import Lane
from mlx_spec.models import Drafter, Target
from mlx_spec.state import StateGroup
from mlx_spec.types import Capabilities, Draft, DrafterCard, ModelRef

from .dflash2 import DFlash2Net
from .dflash_config import DFlashConfig, dflash_config
from .dflash_net import MAX_BLOCK, DFlashNet
from .dflash_weights import load_net
from .target import Qwen35Target

Scores = Callable[[int, mx.array], mx.array]
"""(row of the block from 0, token before it (B,)) -> raw scores (B, V)."""


class DFlashDrafter(Drafter):
    """A DFlash or DFlash2 network bound to a target. Weights only: a context belongs to its request."""

    capabilities = Capabilities(history="all")

    def __init__(self, card: DrafterCard, model: DFlashNet, config: DFlashConfig, target: Target):
        self.card, self.model, self.config, self.target = card, model, config, target
        self.taps = tuple(f"residual.{layer}" for layer in config.target_layer_ids)

    @classmethod
    def load(cls, ref: ModelRef, card: DrafterCard, target: Target) -> DFlashDrafter:
        """Load the drafter in `ref`. Raises LoadError when it, or `target`, is of another kind."""
        if not isinstance(target, Qwen35Target):
            raise LoadError(
                f"DFlash drafter {ref.name}",
                found=f"a target of model_type {target.model_type!r}",
                expected="a Qwen 3.5 target, whose layers the drafter reads",
                next_step="Pair it with the model it was trained for",
                code="QW56",
            )
        config = dflash_config(ref.config, ref.path)
        drafter = cls(card, load_net(ref.path, config, target.dtype), config, target)
        drafter.ref = ref
        return drafter

    def make_state(self) -> DraftState:
        """An empty context of one row."""
        return DraftState(self.model.make_states())

    def prime(self, state: DraftState, tokens: mx.array, taps: dict[str, mx.array], start: int) -> None:
        """Lengthen the context by a prefill chunk: taps "residual.<i>" (1, S, H)."""
        self.model.extend(self._features(taps), _context(state))

    def propose(self, lane: Lane, budget: Sequence[int]) -> Draft:
        """Draft up to budget[b] tokens per row in one pass; none for rows with a position it never saw."""
        states = _context(lane.draft_state)
        whole = self._catch_up(lane, states)
        counts = [k if complete else 0 for k, complete in zip(budget, whole, strict=True)]
        if lane.anchors is None or not any(counts):
            return Draft(mx.zeros((lane.size, 0), dtype=mx.int32), [0] * lane.size)
        mark = states.mark()
        try:
            hidden = self._block(lane, lane.anchors, states, counts)
        finally:
            states.rewind(mark, [0] * lane.size)
        return self._draw(lane, lane.anchors, hidden, counts)

    # -- the context -----------------------------------------------------------------------------------------

    def _features(self, taps: dict[str, mx.array]) -> mx.array:
        """Outputs of the listed layers side by side: (B, S, ids * H)."""
        return mx.concatenate([taps[name] for name in self.taps], axis=-1)

    def _catch_up(self, lane: Lane, states: StateGroup) -> list[bool]:
        """Append what was committed since the last propose; per row, whether that was all of it."""
        held = states.lengths
        missing = [n - have for n, have in zip(lane.lengths, held, strict=True)]
        features, known = self._fresh(lane, held, missing)
        whole = [k == m for k, m in zip(known, missing, strict=True)]
        counts = [k if complete else 0 for k, complete in zip(known, whole, strict=True)]
        if features is not None and any(counts):
            self._append(features, counts, states)
        return whole

    def _fresh(self, lane: Lane, held: Sequence[int], missing: list[int]) -> tuple[mx.array | None, list[int]]:
        """Features (B, A, ids * H) of the newest positions, and how many of each row's were kept for it (B,)."""
        if len(lane.fresh) == 1 and lane.fresh[0].keep == missing:  # a round after a round: rows as they were verified
            return self._features(lane.fresh[0].taps), missing
        taps: dict[str, mx.array] = {}
        known = [0] * lane.size
        for name in self.taps:
            value, known = lane.fresh_rows(name, held)
            if value is None:
                return None, known
            taps[name] = value
        return self._features(taps), known

    def _append(self, features: mx.array, counts: Sequence[int], states: StateGroup) -> None:
        """Append the first counts[b] rows of features (B, A, ids * H) to each row's context."""
        for start in range(0, max(counts), MAX_BLOCK):
            kept = [min(max(n - start, 0), MAX_BLOCK) for n in counts]
            mark = states.mark()
            self.model.extend(features[:, start : start + max(kept)], states)
            states.rewind(mark, kept)

    # -- the block -------------------------------------------------------------------------------------------

    def _block(self, lane: Lane, anchors: mx.array, states: StateGroup, counts: Sequence[int]) -> mx.array:
        """Run [anchor, mask, ...] behind every row's context: normed hidden rows of the masks (B, K, h)."""
        K = max(counts)
        masks = mx.full((lane.size, K), self.config.mask_token_id, dtype=mx.int32)
        embedded = lane.target.embed(mx.concatenate([anchors[:, None], masks], axis=1))
        if self.config.input_embedding_scale != 1.0:
            embedded = embedded * self.config.input_embedding_scale
        return self.model(embedded, states, [n + 1 for n in counts])

    def _draw(self, lane: Lane, anchors: mx.array, hidden: mx.array, counts: Sequence[int]) -> Draft:
        """Draw a token per row of hidden (B, K, h), in order."""
        score = self._scores(lane.target, hidden)
        token, tokens, laws = anchors, list[mx.array](), list[mx.array]()
        for step in range(hidden.shape[1]):
            token, law = lane.draw(score(step, token), step)
            tokens.append(token)
            if law is not None:
                laws.append(law)
        return Draft(mx.stack(tokens, axis=1), list(counts), mx.stack(laws, axis=1) if laws else None)

    def _scores(self, target: Target, hidden: mx.array) -> Scores:
        """What each row is drawn from: its own logits, or (DFlash2) those of its candidates."""
        logits, model = self._logits(target, hidden), self.model
        if not isinstance(model, DFlash2Net):
            return lambda step, previous: logits[:, step]
        return lambda step, previous: model.candidate_selector(hidden[:, step], logits[:, step], previous)

    def _logits(self, target: Target, hidden: mx.array) -> mx.array:
        """(B, K, h) -> (B, K, V), scaled and capped as config.json says."""
        logits, cap = target.head(hidden), self.config.softcap
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        return logits if cap is None else mx.tanh(logits / cap) * cap


def _context(state: DraftState | None) -> StateGroup:
    if state is None or state.states is None:
        raise RuntimeError("DFlash drafter on a lane without a context")
    return state.states
