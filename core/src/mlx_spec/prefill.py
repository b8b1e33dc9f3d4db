"""Prompt processing of one request, in chunks, before it joins a lane.

Every prompt token but the last is processed here; the last one becomes the anchor of the first round. Plain
and speculative decoding share this partition (the one mlx-lm uses), so the state a reply starts from does
not depend on the drafter.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from .membership import new_draft_state
from .rounds import DraftFault
from .types import TapBlock

if TYPE_CHECKING:
    import mlx.core as mx

    from .draft_state import DraftState
    from .pair import Pair
    from .request import Row

log = logging.getLogger("mlx_spec.engine")


class Prefill:
    """The unfinished prompt of one row and the B = 1 states it fills; `done` counts processed tokens."""

    def __init__(self, pair: Pair, row: Row):
        plan = pair.plan
        self.pair, self.row = pair, row
        self.states = pair.target.make_states(plan.kv_bits, plan.kv_group_size)
        self.drafter = pair.drafter if plan.active and row.drafting else None
        self.draft_state: DraftState | None = None
        try:
            self.draft_state = new_draft_state(pair)
        except DraftFault as fault:
            self._give_up(str(fault))
        self.fresh: list[TapBlock] = []
        self.done = 0
        self._total = row.prompt_length - 1
        if self.drafter is not None and row.sampling.law != "greedy" and not self.drafter.capabilities.sampling:
            self._give_up(f"{self.drafter.kind} drafts for greedy requests only")

    def chunk(self) -> bool:
        """Process the next chunk; True when the row can join."""
        import mlx.core as mx

        started = time.perf_counter()
        size = min(self.pair.plan.prefill_step, self._total - self.done)
        if size > 0:
            tokens = mx.array([self.row.tokens[self.done : self.done + size]], dtype=mx.int32)
            if not self._prime(tokens, self._forward(tokens)):
                mx.eval(self.states.arrays())
            mx.clear_cache()
            self.done += size
        self.row.timings.prompt_ms += (time.perf_counter() - started) * 1e3
        return self.done >= self._total

    def _forward(self, tokens: mx.array) -> dict[str, mx.array]:
        """The chunk through the target; taps of as much of it as the drafter looks at."""
        drafter = self.drafter
        last = drafter is not None and drafter.capabilities.history != "all"
        unfinished = self.done + tokens.shape[1] < self._total
        taps = () if drafter is None or (last and unfinished) else drafter.taps
        return self.pair.target.prefill(tokens, self.states, taps, last)

    def _prime(self, tokens: mx.array, taps: dict[str, mx.array]) -> bool:
        """Show the chunk to the drafter; the last row stays for the first propose. True when all was computed."""
        import mlx.core as mx

        if self.drafter is None or self.draft_state is None:
            return False
        try:
            self.drafter.prime(self.draft_state, tokens, taps, self.done)
            if self.drafter.capabilities.history != "none" and taps:
                self.fresh = [TapBlock({name: value[:, -1:] for name, value in taps.items()}, [1])]
            mx.eval(self.states.arrays(), self.draft_state.arrays(), *(b.taps for b in self.fresh))
        except Exception as exc:  # foreign code: costs acceptance only
            log.debug("drafter prime raised", exc_info=True)
            self._give_up(f"drafter prime raised {type(exc).__name__}: {exc}")
            return False
        return True

    def _give_up(self, reason: str) -> None:
        """Go on without the drafter, and without a state of which nobody knows what it holds."""
        self.drafter, self.fresh, self.draft_state = None, [], None
        if not self.row.drafting:
            return  # it was not going to draft
        self.row.stop_drafting(reason)
        kind = reason.partition(":")[0]
        if kind not in self.pair._said:
            self.pair._said.add(kind)
            log.warning("%s", self.row.report.reason)
