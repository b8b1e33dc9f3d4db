"""How often a draft is accepted at each depth: a decayed estimate that remembers about 30 rounds."""

from __future__ import annotations

from collections.abc import Sequence

MEMORY_ROUNDS = 30.0
DEFAULT_RATE = 0.7  # acceptance of a depth before anything is known
TRUST = 0.8  # in what earlier requests have taught, the rest goes to the default: another text may follow
STRENGTH = 3.0  # rounds the prior is worth
MISSES = 4.0  # refusals in a row, and nothing else, after which what was believed before counts no more
FADE = 0.99  # a deeper draft is believed slightly less likely than the one before it


class AcceptanceEstimate:
    """Conditional acceptance per depth: the draft at depth i, given that all before it were accepted.

    Args:
        depths: Kmax.
        prior: rates learned by earlier requests.
    """

    def __init__(self, depths: int, prior: Sequence[float] = ()):
        self._hits = [0.0] * depths
        self._trials = [0.0] * depths
        self._prior = [TRUST * p + (1.0 - TRUST) * DEFAULT_RATE for p in prior[:depths]]
        self._rates: list[float] | None = None
        self._totals: list[float] | None = None

    def observe(self, drafted: int, accepted: int) -> None:
        """One round: depths up to `accepted` held, the next one failed if it was drafted."""
        keep = 1.0 - 1.0 / MEMORY_ROUNDS
        self._hits = [h * keep for h in self._hits]
        self._trials = [t * keep for t in self._trials]
        for i in range(min(drafted, accepted + 1, len(self._hits))):
            self._trials[i] += 1.0
            self._hits[i] += i < accepted
        self._rates = self._totals = None

    def soften(self, trials: float) -> None:
        """Let old evidence weigh at most `trials` rounds: the text may have changed since.

        The prior moves half way to what was seen, so that one lucky draft does not outweigh a reply.
        """
        self._prior = [0.5 * (rate + DEFAULT_RATE) for rate in self.rates]
        for i, n in enumerate(self._trials):
            if n > trials:
                self._hits[i] *= trials / n
                self._trials[i] = trials
        self._rates = self._totals = None

    @property
    def rates(self) -> list[float]:
        """Estimate per depth, 0..1; a depth without evidence follows the one before it."""
        if self._rates is None:
            rates: list[float] = []
            for i, (hits, trials) in enumerate(zip(self._hits, self._trials, strict=True)):
                inherited = rates[-1] * FADE if rates else DEFAULT_RATE
                base = self._prior[i] if i < len(self._prior) else inherited
                if hits == 0 and trials >= MISSES - 0.5:  # the first of them have faded a little
                    rates.append(0.5 / (trials + 1.0))
                else:
                    rates.append((hits + STRENGTH * base) / (trials + STRENGTH))
            self._rates = rates
        return self._rates

    def expected(self, k: int) -> float:
        """Tokens a round with k drafts is expected to commit, the target's own one included."""
        if self._totals is None:
            total = reach = 1.0
            self._totals = [total]
            for rate in self.rates:
                reach *= rate
                total += reach
                self._totals.append(total)
        return self._totals[max(0, min(k, len(self._totals) - 1))]

    def seen(self) -> list[float]:
        """Rates of the leading depths that have real evidence, for later requests."""
        known = []
        for rate, trials in zip(self.rates, self._trials, strict=True):
            if trials < 3.0:
                break
            known.append(rate)
        return known
