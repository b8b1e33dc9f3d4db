"""The built-in drafter `full-model`: any small causal LM whose vocabulary fits the target's.

Invariant between rounds: row b's state holds the first `held[b]` committed tokens, and at most some drafted
ones behind them that the next propose takes back. A propose first feeds every committed token the state has
not seen (one, the anchor; two after a full accept; more after plain steps), then one token per draft.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .draft_state import DraftState
from .models import Drafter, Target
from .state.base import Mark
from .types import Capabilities, Draft, DrafterCard

if TYPE_CHECKING:
    import mlx.core as mx

    from .lane import Lane
    from .state import StateGroup

log = logging.getLogger("mlx_spec.round")
KIND = "full-model"
CHUNK = 512  # catch-up tokens per forward while every row has that many to feed
RAGGED_CHUNK = 32  # the same when rows differ: padding is rewound, which a window allows for 64 rows


class ModelRow:
    """Host facts of one request.

    Attributes:
        held: leading committed tokens its state holds.
        full: True once the reply outgrew the drafter's context; its state is then empty for good.
    """

    def __init__(self) -> None:
        self.held = 0
        self.full = False


class FullModelDrafter(Drafter):
    """Drafts with a whole model of its own, one forward per token.

    Args:
        model: a loaded target that plays the drafter.
        card: what its directory declares.
    """

    def __init__(self, model: Target, card: DrafterCard | None = None):
        self.lm = model
        self.ref = model.ref
        self.model = model.model
        self.card = card or DrafterCard(kind=KIND, model_type=model.model_type, vocab_size=model.vocab_size)
        self.capabilities = Capabilities(batch=model.capabilities.batch, history="none")
        self._noted = False

    def make_state(self) -> DraftState:
        """Empty caches for one row."""
        return DraftState(self.lm.make_states(), rows=[ModelRow()])

    def prime(self, state: DraftState, tokens: mx.array, taps: dict[str, mx.array], start: int) -> None:
        """Feed one prefill chunk, cut as the target's prefill is."""
        import mlx.core as mx

        row: ModelRow = state.rows[0]
        if state.states is None or row.full or row.held != start:
            return  # a gap is closed by the catch-up of the first propose
        end = start + tokens.shape[1]
        if end >= self.lm.context:
            self._retire(state, [0])
            return
        self.lm.forward(self._ids(tokens), state.states)
        row.held = end
        mx.async_eval(state.states.arrays())  # a long prompt must not pile up as one graph

    def propose(self, lane: Lane, budget: Sequence[int]) -> Draft:
        """Draft up to budget[b] tokens per row; rows past the drafter's context get none."""
        import mlx.core as mx

        from .state.steps import start_step, steps_in_turn

        state = _state_of(lane)
        counts = self._counts(lane, state, budget)
        width = max(counts)
        if width == 0:
            return Draft(mx.zeros((lane.size, 0), dtype=mx.int32), counts)
        logits = self._catch_up(lane, state)
        drawn: list[mx.array] = []
        laws: list[mx.array | None] = []
        held = _caches(state).nbytes
        for step in range(width):
            if step:
                logits = self.lm.forward(drawn[-1][:, None], _caches(state)).logits[:, -1]
            token, law = lane.draw(logits, step)
            if steps_in_turn(held):
                start_step([token], drawn[-1:], held)
            drawn.append(token)
            laws.append(law)
        probs = [law for law in laws if law is not None]
        return Draft(mx.stack(drawn, axis=1), counts, mx.stack(probs, axis=1) if len(probs) == width else None)

    def rollback(self, lane: Lane, keep: Sequence[int]) -> None:
        """Keep the drafts that were accepted, as far as they were fed (the last one never is)."""
        state = _state_of(lane)
        if state.states is None:
            return
        for row, length, kept in zip(state.rows, _caches(state).lengths, keep, strict=True):
            row.held = min(length, row.held + max(kept, 1) - 1)
        self._tidy(state)

    def explain(self, state: DraftState) -> list[str]:
        """Per row, why nothing is drafted for it; "" when something is."""
        reason = f"the reply is longer than the drafter's context of {self.lm.context}: plain decoding"
        return [reason if row.full else "" for row in state.rows]

    # -- context ----------------------------------------------------------------------------------------

    def _counts(self, lane: Lane, state: DraftState, budget: Sequence[int]) -> list[int]:
        """Drafts per row that fit in the drafter's context; rows that ran out of it are retired."""
        rooms = [self.lm.context - len(tokens) + 1 for tokens in lane.tokens]
        out = [b for b, row in enumerate(state.rows) if not row.full and rooms[b] <= 0]
        if out:
            self._retire(state, out)
        return [0 if row.full else max(0, min(k, room)) for row, k, room in zip(state.rows, budget, rooms, strict=True)]

    def _retire(self, state: DraftState, rows: Sequence[int]) -> None:
        """Empty the caches of rows that outgrew the context, so that they can ride along without growing."""
        from .state import StateGroup

        for b in rows:
            state.rows[b].held, state.rows[b].full = 0, True
        caches = _caches(state)
        if not self._noted:
            self._noted = True
            log.warning("full-model drafter: %s", self.explain(DraftState(rows=[state.rows[rows[0]]]))[0])
        parts = [self.lm.make_states() if b in rows else caches.extract(b) for b in range(len(state.rows))]
        state.states = parts[0] if len(parts) == 1 else StateGroup.merge(parts)

    # -- catching up ------------------------------------------------------------------------------------

    def _tidy(self, state: DraftState) -> None:
        """Take back whatever the caches hold past the committed prefix."""
        caches, held = _caches(state), tuple(row.held for row in state.rows)
        if caches.lengths != held:
            caches.rewind(Mark(held), [0] * len(held))

    def _catch_up(self, lane: Lane, state: DraftState) -> mx.array:
        """Feed what each row has not seen; logits (B, V) after every row's anchor. Full rows get padding."""
        import mlx.core as mx

        self._tidy(state)
        rows: list[ModelRow] = state.rows
        while True:
            behind = [0 if row.full else len(t) - row.held for row, t in zip(rows, lane.tokens, strict=True)]
            width = max(behind)
            even = all(n == width or n > CHUNK for n in behind)
            if width <= (CHUNK if even else RAGGED_CHUNK):
                break
            # the last token of every row waits for the last forward, where its logits are read
            size = CHUNK if even and min(behind) > CHUNK else RAGGED_CHUNK
            self._feed(lane, state, [min(size, max(n - 1, 0)) for n in behind])
        logits = self._feed(lane, state, behind)
        _caches(state).mark()
        last = mx.array([max(n, 1) - 1 for n in behind])
        return logits[mx.arange(len(rows)), last]

    def _feed(self, lane: Lane, state: DraftState, counts: Sequence[int]) -> mx.array:
        """One forward over the next counts[b] committed tokens per row, padded on the right; logits (B, S, V)."""
        import mlx.core as mx

        rows: list[ModelRow] = state.rows
        width, caches = max(counts), _caches(state)
        block = []
        for row, tokens, n in zip(rows, lane.tokens, counts, strict=True):
            piece = tokens[row.held : row.held + n]
            block.append(piece + [0] * (width - n))
            row.held += n
        mark = caches.mark()
        logits = self.lm.forward(self._ids(mx.array(block, dtype=mx.int32)), caches).logits
        if min(counts) < width:
            caches.rewind(mark, counts)
        return logits

    def _ids(self, tokens: mx.array) -> mx.array:
        """Target ids as the drafter can look them up: ids past its vocabulary read its last row."""
        import mlx.core as mx

        return mx.minimum(tokens, self.lm.vocab_size - 1)


def _state_of(lane: Lane) -> DraftState:
    if lane.draft_state is None:
        raise RuntimeError("full-model on a lane without drafter state")
    return lane.draft_state


def _caches(state: DraftState) -> StateGroup:
    if state.states is None:
        raise RuntimeError("full-model with a state that holds no caches")
    return state.states
