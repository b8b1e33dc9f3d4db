"""The phases of deciding K for the rows that share a verify: measure plain steps, speculate, parked.

goodput(K) = expected committed tokens / cost of a round, both relative to plain decoding, so 1.0 means
"as fast as plain". Parked means that no K beats plain; a probe follows after 8, 32, 64, ... 512 tokens, so
speculation comes back when the text turns predictable, and a probe that wins resets the wait. The wait runs on
from one request to the next, and a process that only remembers costs probes at once. What probes
may waste is bounded. Tokens are counted per row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .acceptance import AcceptanceEstimate
    from .costs import BatchCosts

FIRST_WAIT = 8  # tokens from parking to the first probe: often only the first drafts were unlucky
SECOND_WAIT, LONGEST_WAIT = 32, 512  # from a lost probe to the next one, doubled each time
HOPELESS_WAIT = 128  # the same when not even full acceptance would pay
SOONEST = 8  # tokens before a probe when earlier requests have waited long enough, or costs are only remembered
PROBE_ROUNDS = 3
STALE_TRIALS = 2.0  # rounds that evidence from before a probe is worth
PROBE_WASTE = 1.0  # plain steps a probe may lose before it stops
WASTE_SHARE = 0.01  # of all tokens: probing more often than this costs too much
DRY_ROUNDS, DRY_LONGEST = 4, 32  # empty drafts in a row before plain spans of 2, 4, ... tokens
LONGEST_SPAN = 64  # plain steps before looking again whether costs have changed
SECOND_LOOK = 1.25  # a parked lane probes early when costs alone raised its goodput this much, to above 1
PLAIN_FIRST = 6  # plain steps that open a request on a machine nothing is known of: its first ones are cold
PLAIN_AGAIN = 4
PLAIN_STALE = 256  # tokens, times the square of a gain, after which plain steps are measured again: it may be mistaken
PLAIN_FEW, NARROW_WIN = 6, 1.2  # with fewer samples than this, eight times sooner but only below this goodput

NO_DRAFTS = "the drafter had nothing to propose"  # in lines for people; `spec bench` advises by it


@dataclass(frozen=True, slots=True)
class Crew:
    """Who is in a round: acceptance and largest K of each drafting row, and how many rows never draft."""

    rows: Sequence[tuple[AcceptanceEstimate, int]]
    plain: int = 0

    @property
    def top(self) -> int:
        """Largest K any row may draft."""
        return max((top for _, top in self.rows), default=0)

    def expected(self, k: int) -> float:
        """Tokens per row that a round at K = k is expected to commit."""
        if len(self.rows) == 1 and not self.plain:
            estimate, top = self.rows[0]
            return estimate.expected(min(k, top))
        total = sum(estimate.expected(min(k, top)) for estimate, top in self.rows)
        return (total + self.plain) / max(1, len(self.rows) + self.plain)


@dataclass(slots=True)
class Record:
    """One round while its rows report: tokens of all rows, widest draft, time."""

    asked: int
    tokens: float = 0.0
    rows: int = 0
    width: int = 0
    seconds: float | None = None
    draft_seconds: float | None = None


class Pilot:
    """Decides K for a lane; at B = 1 it belongs to one request.

    Args:
        kmax: most tokens drafted per round.
        costs: of the lane's batch size.
        timed: False decides from `costs` as they are and never measures.
    """

    def __init__(self, kmax: int, costs: BatchCosts, timed: bool = True):
        self.kmax, self.costs, self.timed = kmax, costs, timed
        self.tokens = 0.0
        self.probes = 0
        self.parked = False
        self.crew = Crew(())
        self._record: Record | None = None
        self._parked_at = self._resume_at = 0.0
        self._wait = FIRST_WAIT
        self._burst: list[tuple[float, float]] | None = None  # (tokens, steps) of each round of a probe
        self._dry = 0  # empty drafts in a row
        self._dry_until = 0.0
        self._plain_left = 0
        self._span_step = 0  # steps seen of the running plain span
        self._held: float | None = None  # time of the newest plain step, kept only if another one follows
        self._asked = 0
        self._ready: int | None = None  # K that was decided ahead, for a round with room for all drafts
        self._last = (0, 0.0)  # K and goodput of the last decision
        self._opened = False
        self._drafted = False  # whether any round of this pilot drafted

    def use(self, costs: BatchCosts) -> None:
        """The lane has another batch size now; a size never seen is measured plainly first."""
        if costs is self.costs or not self.timed:
            return
        self.settle()
        self.costs = costs
        self._opened, self._burst, self._plain_left, self._ready = False, None, 0, None

    def choose(self, crew: Crew) -> int:
        """K for the next round, 0..crew.top; 0 is a plain step."""
        self._asked, self._ready = 0, None
        self._asked = self._decide(crew)
        return self._asked

    def prepare(self, crew: Crew) -> None:
        """Decide on the next round while one is under way and not reported, for whoever asks `ready`.

        Only rounds that go on drafting at more than a narrow win are decided so: what one more round may turn, plain
        steps and probes are left to `choose`, which knows of the last round.
        """
        self._ready = None
        if not (self.parked or self._dry):
            k = self._decide(crew)
            self._ready = k if k and self._last[1] >= NARROW_WIN else None

    def ready(self, room: int) -> int | None:
        """What `prepare` decided, once and with room for all drafts; None when `choose` has to be asked."""
        k, self._ready = self._ready, None
        if k is None or room < self.kmax:
            return None
        self._asked = k
        return k

    def _decide(self, crew: Crew) -> int:
        self.settle()
        self.crew, self._held = crew, None
        if crew.top <= 0:
            return 0
        self._open()
        self._want_plain()
        self._look_again()
        if self._plain_left > 0 or self.tokens < max(self._dry_until, self._resume_at if self.parked else 0):
            return 0
        if self.parked:
            return self._probe()
        k, gain = self._best(crew.top)
        if gain < 1.0 and crew.top == self.kmax:
            self._park(k, gain)
            return 0
        if crew.top == self.kmax:  # the end of a reply leaves no room for a choice worth reporting
            self._last = (k, gain)
        return k if gain >= 1.0 else 0

    def force(self, k: int) -> None:
        """The lane drafts k tokens whatever was chosen, because a row of it has a fixed width."""
        self._asked = k

    def plain_span(self) -> int:
        """Plain steps to run in a row before the next `choose`, after it returned 0."""
        self.settle()
        self._span_step, self._held = 0, None
        if self._plain_left > 0:
            return self._plain_left
        until = max(self._dry_until, self._resume_at if self.parked else 0)
        return min(LONGEST_SPAN, max(1, math.ceil(until - self.tokens)))

    # -- what a round brought ---------------------------------------------------------------------------

    def report(self, first: bool, tokens: int, width: int, seconds: float | None, draft_seconds: float | None) -> None:
        """One row's part of a round; `first` opens a new round, the others add to it."""
        if first or self._record is None:
            self.settle()
            self._record = Record(self._asked, seconds=seconds, draft_seconds=draft_seconds)
        self._record.tokens += tokens
        self._record.rows += 1
        self._record.width = max(self._record.width, width)

    def settle(self) -> None:
        """Take in the round that was reported last, if that has not happened yet."""
        record, self._record = self._record, None
        if record is None:
            return
        mean = record.tokens / record.rows
        self.tokens += mean
        if self.timed:
            self.costs.untimed += mean
            self.costs.plain_age += mean
            self._time(record)
        if record.width == 0:
            self._plain_left = max(0, self._plain_left - 1)
            self._note_empty(record.asked)
            return
        self._dry, self._drafted = 0, True
        if self._burst is not None:
            self._burst.append((mean, self.costs.steps(record.width)))
            self._judge_probe()

    def _time(self, record: Record) -> None:
        if record.width > 0:
            if record.seconds is not None:
                self.costs.observe(record.width, record.seconds, record.draft_seconds)
            return
        # Steps of a span overlap: the first one waits for two builds, the last one for none, so neither
        # says what a step costs; nor does the single step after an empty draft.
        if self._held is not None:
            self.costs.observe(0, self._held)
        self._span_step += 1
        self._held = record.seconds if self._span_step > 1 and record.asked == 0 else None

    def _note_empty(self, asked: int) -> None:
        """A drafter with nothing to say is asked less often: plain steps in a row can be pipelined."""
        if asked == 0:
            return
        self._asked = 0
        self._dry += 1
        if self._dry >= DRY_ROUNDS:
            self._dry_until = self.tokens + min(DRY_LONGEST, 2 ** (self._dry - DRY_ROUNDS + 1))

    # -- phases -----------------------------------------------------------------------------------------

    def _open(self) -> None:
        """First decision at a batch size: measure plain steps unless this machine is known."""
        if not self._opened and self.timed and self.costs.seconds(0) is None:
            self._plain_left = PLAIN_FIRST
        self._opened = True

    def _want_plain(self) -> None:
        """Start a short plain span when the plain cost is old, whichever request it was measured in."""
        if not self.timed or self._plain_left or self.parked or self._burst is not None:
            return
        decided, gain = self._last
        early = self.costs.count(0) < PLAIN_FEW and gain < NARROW_WIN
        wait = PLAIN_STALE / 8 if early else PLAIN_STALE * max(1.0, gain) ** 2
        if (decided and self.costs.plain_age >= wait) or self.costs.strays():
            self._plain_left = PLAIN_AGAIN
            self.costs.plain_age = 0.0

    def _look_again(self) -> None:
        """Plain steps of a parked lane keep measuring: probe now if costs turned out other than believed."""
        if not (self.timed and self.parked) or self._burst is not None or self.tokens < self._parked_at + SECOND_WAIT:
            return
        _, gain = self._best(self.crew.top)
        if gain >= 1.05 and gain >= SECOND_LOOK * self._last[1]:
            self._resume_at = self.tokens

    def _best(self, top: int) -> tuple[int, float]:
        """(K, goodput in plain decodings) of the best K in 1..top; the smaller K wins a tie.

        On a machine where no round was timed yet a narrow one comes first: it can waste the least.
        """
        first, best, most, gain = 1, 1, 0.0, 0.0
        if self.timed and self.costs.blank:
            first = top = min(top, max(1, (self.kmax + 1) // 4))
        for k in range(first, top + 1):
            value = self.crew.expected(k) / self.costs.hoped_steps(k)
            gain = max(gain, value)
            value *= self.costs.doubt(k)
            if value > most * (1 + 1e-9):
                best, most = k, value
        return best, gain

    def _ceiling(self, top: int) -> tuple[int, float]:
        """(K, goodput) if every draft were accepted: what a probe looks for."""
        values = [(k, (k + 1) / self.costs.hoped_steps(k)) for k in range(1, max(1, top) + 1)]
        most = max(v for _, v in values)
        return next((k, v) for k, v in values if v >= most * 0.999)

    def _park(self, k: int, gain: float) -> None:
        self.parked, self._burst = True, None
        self._last = (k, gain)
        if self._ceiling(self.kmax)[1] <= 1.0:
            self._wait = max(self._wait, HOPELESS_WAIT)
        if self.timed:
            self._wait = max(self._wait, int(self.costs.wait))
        self._parked_at = self.tokens
        waited = self.costs.untimed if self.timed else 0.0  # a short reply must not hide bad costs from the next one
        self._resume_at = self.tokens + max(SOONEST, self._wait - waited)

    def _probe(self) -> int:
        """K of the next round of a probe; starts one when none runs."""
        if self._burst is None:
            self._burst = []
            self.probes += 1
            for estimate, _ in self.crew.rows:
                estimate.soften(STALE_TRIALS)
        return self._ceiling(self.crew.top)[0]

    def _judge_probe(self) -> None:
        """End the probe as won or lost, or let it run on."""
        burst = self._burst or []
        tokens, steps = (sum(column) for column in zip(*burst, strict=True))
        k, gain = self._best(self.kmax)
        if tokens >= steps:
            if gain >= 1.0 and len(burst) >= 2:
                self.parked, self._burst, self._wait, self.costs.wait = False, None, FIRST_WAIT, 0.0
                self._last = (k, gain)
            elif len(burst) >= 2 * PROBE_ROUNDS:
                self._lost(steps - tokens, k, gain)
            return
        if len(burst) >= PROBE_ROUNDS or steps - tokens >= PROBE_WASTE:
            self._lost(steps - tokens, k, gain)

    def _lost(self, waste: float, k: int, gain: float) -> None:
        """Park again, for longer: at most the wait at which probing costs its allowed share."""
        affordable = min(LONGEST_WAIT, max(2 * SECOND_WAIT, int(waste / WASTE_SHARE)))
        self._wait = min(max(SECOND_WAIT, self._wait * 2), affordable)
        self.costs.wait = min(self._wait, HOPELESS_WAIT)  # the next request may bring another text
        self._park(k, min(gain, 0.99))

    # -- for people -------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """One line for people: what is chosen now and why."""
        self.settle()
        if self._plain_left > 0:
            return f"K=0: measuring {self._plain_left} plain steps"
        if not (self._opened and self._last[0]):
            return "not started"
        if self.tokens < self._dry_until:
            return f"K=0: {NO_DRAFTS} {self._dry} times in a row"
        k, gain = self._last
        if not (self.parked or self.costs.measured(k)):
            return f"K={k}: being measured"
        # where there is room for k tokens: the end of a reply, where this is mostly read, has none
        tokens, steps = Crew([(estimate, k) for estimate, _ in self.crew.rows]).expected(k), self.costs.steps(k)
        unseen = "" if self._drafted else ", by earlier replies: this one drafted nothing"
        if not self.parked:
            seen = tokens / steps
            doubt = f"K={k}: {seen:.2f}x plain so far, in doubt{unseen}"
            return f"K={k}: {seen:.2f}x plain estimated{unseen}" if seen >= 1 else doubt
        wait = math.ceil(self._resume_at - self.tokens)
        then = "probing now" if self._burst is not None or wait <= 0 else f"re-probe in {wait} tokens"
        if tokens >= steps:  # learned since: plain steps or saved costs changed what a round is believed to cost
            known = f"costs known by now give {tokens / steps:.2f}x at K={k}"
            return f"parked at {gain:.2f}x plain; {known}; {then}{unseen}"
        expected = f"{tokens:.1f} tokens/round expected at K={k}"
        return f"parked: {expected}, which costs {steps:.1f} plain steps ({tokens / steps:.2f}x); {then}{unseen}"
