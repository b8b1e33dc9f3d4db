"""Drafting with an MTP head: one cache row per committed position, all made from verified states.

Invariant between rounds: row b's caches hold a row for each of the first n - k committed positions, k >= 1. A propose
feeds the positions committed since then, whose hidden states core kept for it (`lane.fresh`): the last of them pairs
with the anchor and its output gives the first draft. Further drafts grow the caches from the head's own guesses; those
rows are taken back before propose returns and replaced, once the target has verified them, by rows made from what it
saw. So acceptance does not decay with the length of a reply, and there is nothing to roll back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.checkpoint import end_ids
from mlx_spec.draft_state import DraftState
from mlx_spec.errors import LoadError
from mlx_spec.models import Drafter, Target
from mlx_spec.state import KVState, Mark, StateGroup, start_step
from mlx_spec.types import Capabilities, Draft, DrafterCard, ModelRef

from .mtp_head import MtpHead, Reading
from .mtp_output import DraftOutput, draft_output
from .mtp_reading import find_reading
from .mtp_weights import load_head
from .target import Qwen35Target

if TYPE_CHECKING:
    from mlx_spec.lane import Lane

log = logging.getLogger("mlx_spec_qwen35")


class MtpModel(nn.Module):  # type: ignore[misc]  # mlx.nn is untyped
    """All weights of a drafter: the head and, where an option asks for one, an output matrix of its own."""

    def __init__(self, head: MtpHead, output: DraftOutput | None):
        super().__init__()
        self.head = head
        if output is not None:
            self.output = output


class MtpDrafter(Drafter):
    """A head bound to a target. Weights only; caches are in the request's DraftState.

    Attributes:
        reading: which hidden state the head takes, and which half of its input comes first.
    """

    capabilities = Capabilities(history="all")

    def __init__(self, card: DrafterCard, model: MtpModel, target: Target, reading: Reading):
        self.card, self.model, self.target, self.reading = card, model, target, reading
        before = f"residual.{len(target.make_states()) - 1}"  # the trunk's output, not yet normed
        self.taps = ("hidden",) if reading.hidden == "post" else (before,)

    @classmethod
    def load(cls, ref: ModelRef, card: DrafterCard, target: Target) -> MtpDrafter:
        """Load the head in `ref`, which may be the target's own directory.

        Raises LoadError when it, or `target`, is of another kind. What was decided about it is in `card.extra`.
        """
        if not isinstance(target, Qwen35Target):
            raise LoadError(
                f"MTP head {ref.name}",
                found=f"a target of model_type {target.model_type!r}",
                expected="a Qwen 3.5 target, whose hidden states the head reads",
                next_step="Pair it with the model it was trained on",
                code="QW20",
            )
        options = card.extra
        norms = options.get("mtp_norms")
        head, said = load_head(ref, target.dtype, None if norms is None else str(norms))
        ends = end_ids(target.ref.path, target.ref.config)
        output, said["output"] = draft_output(output_matrix(target), target.vocab_size, options, ends)
        reading, how = find_reading(ref, options, head, target)
        said |= how
        drafter = cls(replace(card, extra={**options, **said}), MtpModel(head, output), target, reading)
        drafter.ref = ref
        log.info("head of %s: %s", ref.name, "; ".join(f"{key} {value}" for key, value in said.items()))
        return drafter

    def make_state(self) -> DraftState:
        """Empty caches for one row, one per layer of the head."""
        return DraftState(StateGroup(KVState() for _ in self.model.head.layers))

    def prime(self, state: DraftState, tokens: mx.array, taps: dict[str, mx.array], start: int) -> None:
        """Feed a prefill chunk: tokens (1, S), hidden states (1, S, D) from position `start` on.

        Every row needs the token after its position. The chunk's last hidden state waits for it: carried to the next
        chunk or, after the last one, kept by core for the first propose.
        """
        hidden = taps[self.taps[0]]
        if start:
            pairs, ids = mx.concatenate([state.carry["hidden"][:, None], hidden[:, :-1]], axis=1), tokens
        else:
            pairs, ids = hidden[:, :-1], tokens[:, 1:]
        state.carry["hidden"] = hidden[:, -1]
        if ids.shape[1]:
            self._run(pairs, ids, _caches(state))

    def propose(self, lane: Lane, budget: Sequence[int]) -> Draft:
        """Draft up to budget[b] tokens per row in one lazy graph, a pass of the head each.

        Rows without history, as when their prompt was read without drafting, get none.
        """
        caches = _caches(lane.draft_state)
        held = caches.lengths
        hidden, known = lane.fresh_rows(self.taps[0], held)
        missing = [n - h for n, h in zip(lane.lengths, held, strict=True)]
        fed = [k if k == m else 0 for k, m in zip(known, missing, strict=True)]
        counts = [k if n else 0 for k, n in zip(budget, fed, strict=True)]
        if hidden is None or not any(fed):
            return Draft(mx.zeros((lane.size, 0), dtype=mx.int32), [0] * lane.size)
        try:
            seen, state = self._catch_up(lane, caches, held, hidden, fed)
            held = tuple(h + n for h, n in zip(held, fed, strict=True))
            return self._draft(lane, caches, seen, state, counts)
        finally:
            for cache in caches:  # one by one: a pass that failed half way left them unequal
                cache.rewind(Mark(held), [0] * lane.size)

    # -- passes of the head --------------------------------------------------------------------------------

    def _catch_up(
        self, lane: Lane, caches: StateGroup, held: Sequence[int], hidden: mx.array, counts: Sequence[int]
    ) -> tuple[mx.array, mx.array]:
        """Feed the next counts[b] committed positions of every row; both outputs (B, D) at their last."""
        width = max(counts)
        ids = []
        for start, tokens, n in zip(held, lane.tokens, counts, strict=True):
            ids.append(tokens[start + 1 : start + 1 + n] + [0] * (width - n))
        outputs = self._run(hidden[:, :width], mx.array(ids, dtype=mx.int32), caches)
        caches.rewind(Mark(tuple(held)), counts)  # takes back the padding of shorter rows
        if lane.size == 1:
            seen, state = (output[:, width - 1] for output in outputs)
            return seen, state
        rows, last = mx.arange(lane.size), mx.array([max(n, 1) - 1 for n in counts])
        seen, state = (output[rows, last] for output in outputs)
        return seen, state

    def _draft(self, lane: Lane, caches: StateGroup, seen: mx.array, state: mx.array, counts: Sequence[int]) -> Draft:
        """Draw max(counts) tokens, starting from what the head gave at each row's anchor, (B, D) each."""
        tokens: list[mx.array] = []
        laws: list[mx.array] = []
        for step in range(max(counts)):
            if step:
                one, two = self._run(state[:, None], tokens[-1][:, None], caches)
                seen, state = one[:, 0], two[:, 0]
            token, law = lane.draw(self.logits(seen), step)
            start_step([token], tokens[-1:], caches.nbytes)  # the device works while the next pass is being built
            tokens.append(token)
            if law is not None:
                laws.append(law)
        if not tokens:
            return Draft(mx.zeros((lane.size, 0), dtype=mx.int32), list(counts))
        return Draft(mx.stack(tokens, axis=1), list(counts), mx.stack(laws, axis=1) if laws else None)

    def _run(self, hidden: mx.array, ids: mx.array, caches: StateGroup) -> tuple[mx.array, mx.array]:
        """Append rows made of hidden (B, S, D) and the ids (B, S) after them; what `MtpHead` returns."""
        outputs: tuple[mx.array, mx.array] = self.model.head(self.target.embed(ids), hidden, caches, self.reading)
        return outputs

    def logits(self, seen: mx.array) -> mx.array:
        """Normed output of the head (B, D) -> logits (B, V); -inf for ids that cannot be drafted."""
        own: DraftOutput | None = self.model.get("output")
        return self.target.head(seen) if own is None else own(seen)


def output_matrix(target: Qwen35Target) -> Any:
    """The layer whose rows are the target's output matrix: its head, or the embedding when tied."""
    stack = target.model.language_model
    return stack.model.embed_tokens if target.text.tie_word_embeddings else stack.lm_head


def _caches(state: DraftState | None) -> StateGroup:
    if state is None or state.states is None:
        raise RuntimeError("MTP drafter on a lane without its caches")
    return state.states
