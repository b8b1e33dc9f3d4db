"""Drafting with MiMo's MTP layer, one row of its cache per committed position.

Invariant between rounds: row b's cache holds `held[b]` rows, all made from hidden states of the target. A
propose feeds the committed positions since then, whose hidden states core kept for it (`lane.fresh`): the
last of them pairs with the anchor and its output guesses the first draft. Further drafts grow the cache from
guesses; they are taken back before propose returns, so nothing has to be rolled back after the verify.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_spec import Capabilities, Draft, Drafter, DrafterCard, DraftState, Lane, LoadError, ModelRef, Target
from mlx_spec.state import KVState, Mark, StateGroup, start_step

from .head import MimoHead, load_head
from .target import TAP, MimoTarget


@dataclass(slots=True)
class HeadRow:
    """Host facts of one request: `held` committed positions are in its cache."""

    held: int = 0


class MimoDrafter(Drafter):
    """The MTP layer bound to a target. Weights only; caches and counts are in the request's DraftState."""

    taps = (TAP,)
    capabilities = Capabilities(history="all")

    def __init__(self, card: DrafterCard, model: MimoHead, target: Target):
        self.card, self.model, self.target = card, model, target

    @classmethod
    def load(cls, ref: ModelRef, card: DrafterCard, target: Target) -> MimoDrafter:
        """Load the head in `ref`. Raises LoadError when it, or `target`, is of another kind."""
        if not isinstance(target, MimoTarget):
            raise LoadError(
                f"MiMo head {ref.name}",
                found=f"a target of model_type {target.model_type!r}",
                expected="a MiMo target, whose hidden states the head reads",
                next_step="Pair it with the MiMo model it belongs to",
                code="MM01",
            )
        drafter = cls(card, load_head(ref), target)
        drafter.ref = ref
        return drafter

    def make_state(self) -> DraftState:
        """An empty cache for one row."""
        return DraftState(StateGroup([KVState()]), rows=[HeadRow()])

    def prime(self, state: DraftState, tokens: mx.array, taps: dict[str, mx.array], start: int) -> None:
        """Feed a prefill chunk: tokens (1, S), hidden states (1, S, D) from position `start` on.

        The chunk's last hidden state waits for the token after it: carried to the next chunk or, after the
        last one, kept by core for the first propose.
        """
        hidden = taps[TAP]
        if start:
            pairs, ids = mx.concatenate([state.carry["hidden"][:, None], hidden[:, :-1]], axis=1), tokens
        else:
            pairs, ids = hidden[:, :-1], tokens[:, 1:]
        state.carry["hidden"] = hidden[:, -1]
        if ids.shape[1]:
            self._run(pairs, ids, _caches(state))
            state.rows[0].held += ids.shape[1]

    def propose(self, lane: Lane, budget: Sequence[int]) -> Draft:
        """Draft up to budget[b] tokens per row, one pass of the layer each; rows without history get none."""
        state = _state_of(lane)
        caches, rows = _caches(state), state.rows
        hidden, known = lane.fresh_rows(TAP, [row.held for row in rows])
        # known falls short of what is missing when the row was prefilled without drafting: it rides along
        whole = [k if k == n - row.held else 0 for k, n, row in zip(known, lane.lengths, rows, strict=True)]
        counts = [k if n else 0 for k, n in zip(budget, whole, strict=True)]
        if hidden is None or not any(whole):
            return Draft(mx.zeros((lane.size, 0), dtype=mx.int32), [0] * lane.size)
        out = self._catch_up(lane, caches, hidden, whole)
        try:
            return self._draft(lane, caches, out, counts)
        finally:
            caches.rewind(Mark(tuple(row.held for row in rows)), [0] * lane.size)

    # -- passes of the layer -------------------------------------------------------------------------------

    def _catch_up(self, lane: Lane, caches: StateGroup, hidden: mx.array, counts: Sequence[int]) -> mx.array:
        """Feed the next counts[b] committed positions of every row; output (B, D) of each row's last one."""
        rows, width = _state_of(lane).rows, max(counts)
        ids = []
        for row, tokens, n in zip(rows, lane.tokens, counts, strict=True):
            ids.append(tokens[row.held + 1 : row.held + 1 + n] + [0] * (width - n))
        mark = caches.mark()
        out = self._run(hidden[:, :width], mx.array(ids, dtype=mx.int32), caches)
        caches.rewind(mark, counts)  # padding of shorter rows
        for row, n in zip(rows, counts, strict=True):
            row.held += n
        return out[mx.arange(lane.size), mx.array([max(n, 1) - 1 for n in counts])]

    def _draft(self, lane: Lane, caches: StateGroup, out: mx.array, counts: Sequence[int]) -> Draft:
        """Draw max(counts) tokens, starting from the output (B, D) at each row's anchor."""
        tokens: list[mx.array] = []
        laws: list[mx.array | None] = []
        for step in range(max(counts)):
            if step:
                out = self._run(out[:, None], tokens[-1][:, None], caches)[:, 0]
            token, law = lane.draw(self.target.head(out), step)
            start_step([token], tokens[-1:], caches.nbytes)  # the device works while the next pass is being built
            tokens.append(token)
            laws.append(law)
        if not tokens:
            return Draft(mx.zeros((lane.size, 0), dtype=mx.int32), list(counts))
        probs = [law for law in laws if law is not None]
        return Draft(mx.stack(tokens, axis=1), list(counts), mx.stack(probs, axis=1) if probs else None)

    def _run(self, hidden: mx.array, ids: mx.array, caches: StateGroup) -> mx.array:
        """Append rows made of hidden (B, S, D) and the ids (B, S) after them; output (B, S, D)."""
        embedded = self.target.embed(ids)
        starts = [n == 0 for n in caches.lengths]
        if any(starts):  # row 0 was trained without its token
            first = mx.array(starts)[:, None] & (mx.arange(ids.shape[1]) == 0)
            embedded = mx.where(first[..., None], 0, embedded)
        return self.model(hidden, embedded, caches[0]).astype(self.target.dtype)


def _state_of(lane: Lane) -> DraftState:
    if lane.draft_state is None:
        raise RuntimeError("MiMo drafter on a lane without drafter state")
    return lane.draft_state


def _caches(state: DraftState) -> StateGroup:
    if state.states is None:
        raise RuntimeError("MiMo drafter with a state that holds no cache")
    return state.states
