"""What a loaded target and a loaded drafter must offer. Base classes with the shared defaults."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .types import Capabilities, Draft, DrafterCard, ModelRef, Verification

if TYPE_CHECKING:
    import mlx.core as mx

    from .draft_state import DraftState
    from .lane import Lane
    from .state import StateGroup


class Target(ABC):
    """A loaded model that scores L tokens per row and can return to a mark.

    Attributes:
        ref: where it came from.
        model_type, vocab_size (width V of its logits), hidden_size (D).
        context: largest number of positions, prompt and reply together.
        dtype: mlx dtype of its activations.
        capabilities: flags the engine reads.
        tap_names: names `forward` can return, e.g. ("hidden",).
        model: the mlx module tree (kernels may be swapped in as modules).
    """

    ref: ModelRef
    model_type: str
    vocab_size: int
    hidden_size: int
    context: int
    dtype: Any
    capabilities: Capabilities = Capabilities()
    tap_names: tuple[str, ...] = ()
    model: Any

    @abstractmethod
    def make_states(self, kv_bits: int | None = None, kv_group_size: int = 64) -> StateGroup:
        """Empty state for one row (B = 1); merge several to get a batch."""

    @abstractmethod
    def forward(self, tokens: mx.array, states: StateGroup, taps: Sequence[str] = ()) -> Verification:
        """Run tokens (B, L) int32 at each row's own length, append to `states`; lazy."""

    def prefill(
        self, tokens: mx.array, states: StateGroup, taps: Sequence[str] = (), last: bool = False
    ) -> dict[str, mx.array]:
        """Run one chunk of a prompt, (1, S) int32, of which no logits are wanted; returns the taps, lazy.

        taps name -> (1, S, ...), or (1, 1, ...) with `last`, when nobody will look at earlier positions. The
        states end up as after `forward`. Default: `forward`; override it where less has to be computed.
        """
        seen = self.forward(tokens, states, taps).taps
        return {name: value[:, -1:] for name, value in seen.items()} if last else seen

    def check_prompt(self, tokens: Sequence[int]) -> None:
        """Raise UsageError when this text path cannot serve these prompt ids (media placeholders, say)."""

    @abstractmethod
    def embed(self, tokens: mx.array) -> mx.array:
        """tokens (...,) int32 -> (..., D), scaled as the target's own first layer receives them."""

    @abstractmethod
    def head(self, hidden: mx.array) -> mx.array:
        """Post-norm hidden (..., D) -> logits (..., V), as the target computes them."""


class Drafter(ABC):
    """A loaded proposer. It holds weights only: everything a request owns lives in its DraftState.

    Attributes:
        card: what its directory declares.
        taps: names of target taps it wants to see of committed rows.
        capabilities: flags the engine reads (batch, sampling, quantised_kv, history).
        model: the mlx module tree, or None for weight-free drafters.
        networks: names of the attributes that hold module trees; kernels are put into them when a pair loads. Of one
            module in several of them, weights are shared.
    """

    ref: ModelRef | None = None
    card: DrafterCard
    taps: tuple[str, ...] = ()
    capabilities: Capabilities = Capabilities()
    model: Any = None
    networks: tuple[str, ...] = ("model",)

    @property
    def kind(self) -> str:
        """Drafter kind, e.g. "mtp"."""
        return self.card.kind

    @abstractmethod
    def make_state(self) -> DraftState:
        """Empty per-request state for one row (B = 1)."""

    def prime(self, state: DraftState, tokens: mx.array, taps: dict[str, mx.array], start: int) -> None:
        """See one prefill chunk of one row: tokens (1, S), taps name -> (1, S, ...), first position `start`.

        Called for every chunk in order, before the row joins a lane. A drafter whose `history` is "last" gets
        taps of the prompt's last row alone, (1, 1, ...), and none before. Default: nothing.
        """

    @abstractmethod
    def propose(self, lane: Lane, budget: Sequence[int]) -> Draft:
        """Guess up to budget[b] tokens after each row's anchor. May not touch the target's state.

        Draw every token with `lane.draw`, so that processors, filters and noise are the row's own. Where
        `lane.greedy_limit` says that this is the greedy choice alone, it may be made without asking.
        """

    def rollback(self, lane: Lane, keep: Sequence[int]) -> None:
        """The verify kept keep[b] rows (anchor + accepted) of row b: forget drafted rows beyond them.

        Default: nothing to forget. Drafters with caches lower them to the committed prefix.
        """

    def explain(self, state: DraftState) -> list[str]:
        """Per row, why nothing can be drafted for it any more, "" while something can; shown in the reply."""
        return [""] * len(state.rows)
