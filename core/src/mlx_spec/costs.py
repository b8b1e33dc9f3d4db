"""What a round costs on this machine, per pair, batch size and K, and how often drafts are accepted.

K = 0 is one plain step. Costs are kept in seconds and compared in plain steps, so a machine that slows
down as a whole changes no decision. Timings are noisy and one-sided (a busy core only ever adds time), so a
quantile a little below the median of a short window stands for a cost.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from .diskcache import read_entry, remove_entry, write_entry

AREA = "costs"
VERSION = 1
WINDOW = 16  # samples per K that count
FIRM = 3  # samples after which a saved value no longer counts
DOUBT_SAMPLES = 8  # fewer samples than this leave doubt about a K
DEAREST_DRAFT = 1.5  # plain steps a draft more may make a round dearer, unless it was just timed
AGING, OLDEST = 0.002, 1.5  # doubt grows so much with every round at another K, up to this
SAVE_EVERY = 8  # new samples that make a save worth a file
BEND = 0.02  # share of its cost by which a K is expected to lie beside the line through all of them
LINE = 4  # values of K, fewer make no line
SPREAD_SAMPLES = 12  # fewer than this say little about how noisy timings are


@dataclass(frozen=True, slots=True)
class CostPrior:
    """Cost of a round in plain steps before anything was measured: base + slope * K for K >= 1."""

    base: float = 1.1
    slope: float = 0.1

    def steps(self, k: int) -> float:
        """Plain steps one round with k drafts is believed to take."""
        return 1.0 if k <= 0 else self.base + self.slope * k


class BatchCosts:
    """Costs of one batch size B: seconds per K, and the same in plain steps.

    Args:
        saved: seconds per K of earlier runs.
        prior: what is believed of a K nobody measured.
    """

    def __init__(self, saved: Mapping[int, float] | None = None, prior: CostPrior | None = None):
        self.saved = dict(saved or {})
        self.prior = prior or CostPrior()
        self.fresh = 0  # samples since the last save
        self.wait = 0.0  # tokens between probes that earlier requests have come to, while none of them won
        self.untimed = math.inf  # tokens, of all requests, since a round with drafts was last timed
        self.plain_age = 0.0  # the same since plain steps were
        self._rounds = 0  # timed with drafts
        self._timed: dict[int, int] = {}  # K -> the newest of them at this K
        self._live: dict[int, list[float]] = {}
        self._draft: dict[int, list[float]] = {}
        # what follows from the samples of a K, until there is another one: asked of every K in every round
        self._cache: dict[int, float | None] = {}
        self._agreed: dict[int, bool] = {}
        self._spread: dict[int, float] = {}
        self._known: dict[int, float] | None = None

    def observe(self, k: int, seconds: float, draft_seconds: float | None = None) -> None:
        """One round with k drafts (0: one plain step) took `seconds`, the drafter's part included."""
        if not math.isfinite(seconds) or seconds <= 0:
            return
        if k > 0:
            self.untimed = 0.0
            self._rounds += 1
            self._timed[k] = self._rounds
        else:
            self.plain_age = 0.0
        samples = self._live.setdefault(k, [])
        samples.append(seconds)
        _forget_old_regime(samples)
        del samples[:-WINDOW]
        if draft_seconds is not None and math.isfinite(draft_seconds):
            drafts = self._draft.setdefault(k, [])
            drafts.append(draft_seconds)
            del drafts[:-WINDOW]
        self.fresh += 1
        self._agreed.pop(k, None)
        self._spread.pop(k, None)
        if self.saved:  # all of them follow the drift
            self._cache.clear()
        else:
            self._cache.pop(k, None)
        self._known = None

    def count(self, k: int) -> int:
        """Samples of this run that count for k."""
        return len(self._live.get(k, ()))

    def measured(self, k: int) -> bool:
        """True when k was timed in an earlier run, or twice here with like results (no warm-up, no spike)."""
        if k not in self._agreed:
            best = sorted(self._live.get(k, ()))[:2]
            self._agreed[k] = k in self.saved or (len(best) == 2 and best[1] < 1.5 * best[0])
        return self._agreed[k]

    def seconds(self, k: int) -> float | None:
        """Best estimate of seconds per round at k, None when neither measured nor saved."""
        if k not in self._cache:
            self._cache[k] = self._estimate(k)
        return self._cache[k]

    def _estimate(self, k: int) -> float | None:
        live = self._live.get(k, [])
        saved = self.saved.get(k)
        if saved is not None:
            live = [*live, *[saved * self._drift()] * max(0, FIRM - len(live))]
        return typical(live) if live else None

    def _drift(self) -> float:
        """How much slower this machine is now than when the saved costs were taken."""
        ratios = [
            typical(live) / self.saved[k] for k, live in self._live.items() if len(live) >= FIRM and k in self.saved
        ]
        return statistics.median(ratios) if ratios else 1.0

    def strays(self) -> bool:
        """True when some K costs something else than saved and no plain step of this run can say why."""
        if self.count(0) >= FIRM:
            return False
        drifts = [
            typical(live) / self.saved[k]
            for k, live in self._live.items()
            if k > 0 and len(live) >= FIRM and k in self.saved
        ]
        return any(not 0.75 < d < 1.33 for d in drifts)

    # -- in plain steps ---------------------------------------------------------------------------------

    @property
    def blank(self) -> bool:
        """True when no K >= 1 was ever measured."""
        return not any(k > 0 and self.measured(k) for k in {*self._live, *self.saved})

    def steps(self, k: int) -> float:
        """Plain steps one round at k takes: measured, between measured neighbours, or the prior."""
        if k <= 0:
            return 1.0
        points = self._points()
        if k in points:
            return points[k]
        below = max(p for p in points if p < k)
        above = min((p for p in points if p > k), default=None)
        if above is not None:
            share = (k - below) / (above - below)
            return points[below] + share * (points[above] - points[below])
        if below == 0:
            return self.prior.steps(k)
        lower = max((p for p in points if 0 < p < below), default=None)
        slope = self.prior.slope if lower is None else (points[below] - points[lower]) / (below - lower)
        return points[below] + max(slope, 0.02) * (k - below)

    def hoped_steps(self, k: int) -> float:
        """As `steps`, but with the benefit of the doubt for a K that was never measured.

        A width nobody tried may sit below a step in the machine's cost curve, so half of the interpolated
        value is thought possible, never less than the prior or a measured smaller K.
        """
        if k <= 0 or self.measured(k):
            return self.steps(k)
        points = self._points()
        below = max(p for p in points if p < k)
        if any(p > k for p in points):
            return max(points[below] if below else 1.0, min(self.steps(k), max(self.prior.steps(k), self.steps(k) / 2)))
        if below == 0:
            return self.steps(k)
        return min(self.steps(k), points[below] + self.prior.slope * (k - below))

    def doubt(self, k: int) -> float:
        """Factor >= 1 for a K with few samples, or old ones, so that unlucky timings do not bury it."""
        n = self.count(k)
        few = 1.0 + 0.2 / n if 0 < n < DOUBT_SAMPLES and k not in self.saved else 1.0
        return few * min(OLDEST, 1.0 + AGING * (self._rounds - self._timed.get(k, self._rounds)))

    def _points(self) -> dict[int, float]:
        """Known K -> plain steps; K = 0 is always there."""
        plain = self.seconds(0)
        if plain is None:
            return {0: 1.0}
        if self._known is None:
            known = {k for k in {*self._live, *self.saved} if k > 0 and self.measured(k)}
            # several rows cost at least one row: less only means that plain was timed on a busier machine
            self._known = {0: 1.0} | {k: max(1.0, (self.seconds(k) or plain) / plain) for k in known}
            # A narrow round costs no more than a wide one: where it seems to, it was timed on a busier machine.
            least = math.inf
            for k in sorted(known, reverse=True):
                self._known[k] = min(self._known[k], least)
                if self.count(k) >= FIRM or k in self.saved:
                    least = self._known[k]
            # Nor does a draft more cost much more than a step: a saved cost beyond that was taken on a busier machine.
            for below, k in pairwise(sorted(known)):
                if self.count(k) < FIRM:
                    self._known[k] = min(self._known[k], self._known[below] + DEAREST_DRAFT * (k - below))
            self._straighten(self._known)
        return self._known

    def _straighten(self, known: dict[int, float]) -> None:
        """Draw costs to the line through them, the more the noisier timings are and the fewer a K has.

        Where a draft more costs less than timings vary, one K or another would seem cheap by chance. With timings that
        hardly vary, steps in the machine's cost curve stay as they are.
        """
        weights = {k: max(self.count(k), DOUBT_SAMPLES if k in self.saved else 1) for k in known if k > 0}
        noise = self._noise()
        if noise == 0.0 or len(weights) < LINE:
            return
        total = sum(weights.values())
        middle = sum(n * k for k, n in weights.items()) / total
        level = sum(n * known[k] for k, n in weights.items()) / total
        rise = sum(n * (k - middle) * (known[k] - level) for k, n in weights.items())
        slope = max(0.0, rise / sum(n * (k - middle) ** 2 for k, n in weights.items()))
        for k, n in weights.items():
            line = level + slope * (k - middle)
            known[k] = max(1.0, line + (known[k] - line) * n / (n + (noise / BEND) ** 2))

    def _noise(self) -> float:
        """How far timings lie from the median of their K, as a share of it; 0 while few are known."""
        timed = {k: live for k, live in self._live.items() if k > 0 and len(live) > FIRM}
        count = sum(map(len, timed.values()))
        if count < SPREAD_SAMPLES:
            return 0.0
        for k, live in timed.items():
            if k not in self._spread:
                middle = statistics.median(live)
                self._spread[k] = statistics.median(abs(s / middle - 1.0) for s in live)
        return 1.48 * sum(len(live) * self._spread[k] for k, live in timed.items()) / count  # as a standard deviation

    def table(self) -> list[dict[str, float]]:
        """Rows k, seconds, steps, samples and, where told, draft_seconds: for `spec pair` and logs."""
        rows = []
        for k in sorted({*self._live, *self.saved}):
            seconds = self.seconds(k)
            if seconds is None:
                continue
            row = {"k": k, "seconds": seconds, "steps": self.steps(k), "samples": self.count(k)}
            if self._draft.get(k):
                row["draft_seconds"] = statistics.median(self._draft[k])
            rows.append(row)
        return rows

    def frozen(self) -> BatchCosts:
        """What was saved, and nothing measured since: equal for every request of a process."""
        return BatchCosts(self.saved, self.prior)

    def merged(self) -> dict[int, float]:
        """Seconds per K worth saving; those of a K that was not timed since stay as they were saved."""
        timed = {k: self.seconds(k) for k, live in self._live.items() if live and (k == 0 or self.measured(k))}
        values = self.saved | timed
        return {k: v for k, v in values.items() if v is not None}


def typical(samples: Sequence[float]) -> float:
    """The 30% quantile: near the median, the minimum of up to three, and deaf to slow outliers."""
    return sorted(samples)[int(len(samples) * 0.3)]


def _forget_old_regime(samples: list[float]) -> None:
    """Drop older samples once the newest agree that times have changed (2 faster or 3 slower in a row)."""
    for newest, side in ((2, -1), (3, 1)):
        if len(samples) < newest + FIRM:
            continue
        old = typical(samples[:-newest])
        tail = samples[-newest:]
        if all(s < 0.7 * old if side < 0 else s > 1.4 * old for s in tail):
            del samples[:-newest]
            return


class CostModel:
    """Costs and typical acceptance of one pair on one machine, for every batch size.

    Args:
        key: names the pair, see `pair.pair_key`; "" keeps nothing on disk.
        directory: cache folder, None for the one in the settings.
    """

    def __init__(self, key: str = "", directory: Path | None = None, prior: CostPrior | None = None):
        self.key = key
        self.prior = prior or CostPrior()
        self.acceptance: list[float] = []  # per depth, given that the depth before was accepted
        self.saved_acceptance: tuple[float, ...] = ()
        self._directory = directory
        self._batches: dict[int, BatchCosts] = {}
        self._saved: dict[int, dict[int, float]] = {}

    def for_batch(self, rows: int = 1) -> BatchCosts:
        """Costs of rounds over `rows` rows. Shared by every governor of that batch size."""
        if rows not in self._batches:
            self._batches[rows] = BatchCosts(self._saved.get(rows), self.prior)
        return self._batches[rows]

    def learn_acceptance(self, rates: Sequence[float], weight: float = 0.3) -> None:
        """Blend one request's conditional acceptance per depth into what new requests start from."""
        for i, rate in enumerate(rates):
            if i < len(self.acceptance):
                self.acceptance[i] += weight * (rate - self.acceptance[i])
            else:
                self.acceptance.append(rate)

    # -- disk -------------------------------------------------------------------------------------------

    def load(self) -> CostModel:
        """Take in what earlier runs saved; values that make no sense are left out."""
        if not self.key:
            return self
        data = read_entry(AREA, self.key, self._directory) or {}
        if data.get("version") == VERSION:
            self._saved = _clean_batches(data.get("batches"))
            self.acceptance = _clean_rates(data.get("acceptance"))
            self.saved_acceptance = tuple(self.acceptance)
        return self

    def save(self, force: bool = False) -> bool:
        """Write to disk when enough was learned since the last time; False when nothing was written."""
        fresh = sum(b.fresh for b in self._batches.values())
        if not self.key or fresh < (1 if force else SAVE_EVERY):
            return False
        batches = self._saved | {rows: batch.merged() for rows, batch in self._batches.items()}
        data = {
            "version": VERSION,
            "batches": {str(b): {str(k): s for k, s in costs.items()} for b, costs in batches.items() if costs},
            "acceptance": self.acceptance,
        }
        for batch in self._batches.values():
            batch.fresh = 0
        return write_entry(AREA, self.key, data, self._directory)


def load_costs(key: str, directory: Path | None = None, prior: CostPrior | None = None) -> CostModel:
    """The cost model of a pair on this machine, with what earlier runs learned."""
    return CostModel(f"{key}-{machine_key()}" if key else "", directory, prior).load()


def forget_costs(key: str, directory: Path | None = None) -> dict[int, list[int]] | None:
    """Remove what runs learned of a pair on this machine; returns, per batch size, each K that had a cost.

    None when there was nothing, or when it could not be removed, which is said.
    """
    model = load_costs(key, directory)
    if not model.key or not remove_entry(AREA, model.key, directory):
        return None
    return {rows: sorted(costs) for rows, costs in sorted(model._saved.items())}


def machine_key() -> str:
    """Short hex name of the kind of machine: processor, cores, accelerator. Not of the very machine."""
    import hashlib
    import os
    import platform

    import mlx.core as mx

    device: dict[str, Any] = getattr(mx, "device_info", dict)()
    parts = [platform.system(), platform.machine(), platform.processor(), os.cpu_count()]
    parts += [device.get(name) for name in ("device_name", "architecture", "memory_size")]
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:12]


def _clean_batches(value: Any) -> dict[int, dict[int, float]]:
    found: dict[int, dict[int, float]] = {}
    for rows, costs in value.items() if isinstance(value, dict) else ():
        if not (str(rows).isdecimal() and isinstance(costs, dict)):
            continue
        good = {int(k): float(s) for k, s in costs.items() if str(k).isdecimal() and _sensible(s)}
        if good:
            found[int(rows)] = good
    return found


def _sensible(seconds: Any) -> bool:
    return type(seconds) in (int, float) and math.isfinite(seconds) and 0 < seconds < 3600


def _clean_rates(value: Any) -> list[float]:
    rates = value if isinstance(value, list) else []
    good = all(type(r) in (int, float) and 0 <= r <= 1 for r in rates)
    return [float(r) for r in rates] if good else []
