"""How many tokens to draft, per request and round, by measured goodput; `pilot` holds the rules.

Each request knows how often its own drafts are accepted. The rows of a lane pay for a round together, and
for the widest draft of it, so with company one pilot decides for all: at the K that commits most tokens of
the whole lane per second, every row drafts as far as it may.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .acceptance import AcceptanceEstimate
from .costs import CostModel
from .pilot import NO_DRAFTS, Crew, Pilot

if TYPE_CHECKING:
    from .costs import BatchCosts


class FixedGovernor:
    """Always the full width (`adaptive=False`)."""

    def __init__(self, k: int):
        self.k = k
        self.tokens = 0
        self.speculative_rounds = 0
        self.plain_steps = 0
        self._asked = self._empty = 0  # K of this round; rounds asked for drafts that got none

    def choose(self, room: int) -> int:
        """K, or what is left of the reply."""
        self._asked = max(0, min(self.k, room))
        return self._asked

    def observe(
        self,
        drafted: int,
        accepted: int,
        seconds: float | None,
        draft_seconds: float | None = None,
        *,
        width: int | None = None,
    ) -> None:
        """Count the round."""
        self.tokens += accepted + 1
        if drafted:
            self.speculative_rounds += 1
        else:
            self.plain_steps += 1
            self._empty += self._asked > 0

    def plain_span(self) -> int:
        """Plain steps to run before asking again."""
        return 1

    def prepare(self) -> None:
        """There is nothing to decide."""

    def set_costs(self, costs: BatchCosts) -> None:
        """Costs play no part here."""

    def finish(self) -> None:
        """Nothing was learned."""

    @property
    def state(self) -> str:
        """One line for people."""
        empty = f"; {NO_DRAFTS} {self._empty} times" if self._empty else ""
        return f"K={self.k}: fixed (adaptive off){empty}"


class Governor:
    """Chooses K for one request, alone or through `choose_together` with its company.

    Args:
        kmax: most tokens drafted per round.
        costs: shared cost model of the pair; None keeps one for this request alone.
        reproducible: decide from accepted counts and saved costs only, never from timings of this process
            nor from the company, so that equal requests make equal choices.

    Attributes:
        tokens, speculative_rounds, plain_steps: counted so far.
    """

    def __init__(self, kmax: int, costs: CostModel | None = None, *, reproducible: bool = False):
        self.kmax = max(0, kmax)
        self.model = costs or CostModel()
        self.reproducible = reproducible
        self._acceptance = AcceptanceEstimate(
            self.kmax, self.model.saved_acceptance if reproducible else self.model.acceptance
        )
        self._news: tuple[int, int] | None = None  # (drafted, accepted) of the last round, until somebody asks
        self.tokens = 0
        self.speculative_rounds = 0
        self.plain_steps = 0
        alone = self.model.for_batch(1)
        self._pilot = Pilot(self.kmax, alone.frozen() if reproducible else alone, timed=not reproducible)
        self._leads = True

    @property
    def acceptance(self) -> AcceptanceEstimate:
        """How often drafts of this request are accepted."""
        if self._news is not None:
            self._acceptance.observe(*self._news)
            self._news = None
        return self._acceptance

    def prepare(self) -> None:
        """Decide on the round after the one that is under way, so that it need not wait for that.

        What the round under way will bring is not known by then; a reproducible choice has to know it.
        """
        if not self.reproducible:
            self._pilot.prepare(Crew([(self.acceptance, self.kmax)]))

    def ready(self, room: int) -> int | None:
        """K for the next round as `prepare` decided, None when `choose` has to be asked."""
        return self._pilot.ready(room) if self._leads else None

    def set_costs(self, costs: BatchCosts) -> None:
        """Use the costs of the batch size the request now runs in."""
        self._pilot.use(costs)

    def choose(self, room: int) -> int:
        """K for this round, 0..min(kmax, room); 0 is a plain step."""
        self._leads = True
        return self._pilot.choose(Crew([(self.acceptance, max(0, min(self.kmax, room)))]))

    def plain_span(self) -> int:
        """Plain steps to run in a row before the next `choose`, after it returned 0."""
        return self._pilot.plain_span()

    def observe(
        self,
        drafted: int,
        accepted: int,
        seconds: float | None,
        draft_seconds: float | None = None,
        *,
        width: int | None = None,
    ) -> None:
        """One round is over: `accepted` of `drafted` tokens held; it took `seconds` (None: do not use).

        Call it for every row of the lane, in order.

        width: most tokens drafted by any row of the batch, which is what the round's cost depends on.
        """
        # A reproducible row must not notice that others drafted where it did not.
        width = drafted if width is None or self.reproducible else max(width, drafted)
        self.tokens += accepted + 1
        if drafted > 0:
            self.speculative_rounds += 1
            if self._news is not None:
                self._acceptance.observe(*self._news)
            self._news = drafted, accepted
        else:
            self.plain_steps += 1
        self._pilot.report(self._leads, accepted + 1, width, seconds, draft_seconds)

    def finish(self) -> None:
        """The request is over: let later ones start from what was accepted."""
        self._pilot.settle()
        if not self.reproducible:
            self.model.learn_acceptance(self.acceptance.seen())

    @property
    def parked(self) -> bool:
        """True while no K is believed to beat plain decoding."""
        self._pilot.settle()
        return self._pilot.parked

    @property
    def probes(self) -> int:
        """Probes started while parked."""
        return self._pilot.probes

    @property
    def state(self) -> str:
        """One line for people: what is chosen now and why."""
        return self._pilot.state if self.kmax else "K=0: drafting is off"

    # -- company ----------------------------------------------------------------------------------------

    @staticmethod
    def together(members: Sequence[tuple[Governor, int]], others: int, floor: int) -> int:
        """One K for all members (governor, room); the first, longest-served one brings the pilot.

        others: rows of the lane that never draft. floor: K the lane runs at anyway.
        """
        leader = members[0][0]
        pilot = leader._pilot
        for governor, _ in members:
            governor._pilot, governor._leads = pilot, governor is leader
        pilot.kmax = max(governor.kmax for governor, _ in members)
        crew = Crew([(g.acceptance, max(0, min(g.kmax, room))) for g, room in members], others)
        k = pilot.choose(crew)
        if floor > k:
            pilot.force(floor)
        return max(k, floor)


def choose_together(governors: Sequence[Governor | FixedGovernor | None], rooms: Sequence[int]) -> list[int]:
    """K per row of a lane; None stands for a row that does not draft.

    Rows with a fixed or reproducible K decide alone; what they draft is verified anyway, so the others
    draft at least as much. A row never gets more than its own kmax or room.
    """
    if len(governors) == 1 and isinstance(governors[0], Governor):
        k = governors[0].ready(rooms[0])
        if k is not None:
            return [k]
    budget = [0] * len(governors)
    members: list[tuple[int, Governor]] = []
    for b, governor in enumerate(governors):
        if isinstance(governor, Governor) and not governor.reproducible:
            members.append((b, governor))
        elif governor is not None:
            budget[b] = governor.choose(rooms[b])
    if not members:
        return budget
    others = len(governors) - len(members)
    k = Governor.together([(g, rooms[b]) for b, g in members], others, max(budget, default=0))
    for b, governor in members:
        budget[b] = max(0, min(k, governor.kmax, rooms[b]))
    return budget
