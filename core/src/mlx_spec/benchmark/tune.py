"""Which block size is fastest: every width against plain decoding by the bench's method.

Each trial decodes one prompt plainly and then at every width, one right after the other, so a gain is a ratio of
neighbours. Draft and verify times come from one more reply per width and workload in which every phase waits for its
result; those replies are slower and count for nothing else.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .method import ARMS, Arm, BenchPlan, Run, Trial, request_of
from .report import Document, acceptance, document, of_arm

if TYPE_CHECKING:
    from ..pair import Pair

FORMAT = "mlx-spec tune 2"  # 1 counted decode_per_second from the first event on
NOISE = 2.0  # standard errors a gain must stand above 1
NEAR = 0.02  # gains this close to the best are as good, and the narrowest of them is taken


@dataclass(frozen=True, slots=True)
class WidthResult:
    """One width of the sweep.

    Attributes:
        block_size: L, anchor counted.
        per_second: median decode speed over all runs.
        gain: decode speed over plain: geometric mean over the workloads of each one's paired ratios.
        low, high: what the runs leave open: NOISE standard errors to either side of the gain, from how pairs of one
            workload disagree, and no less than the mean over the workloads of their worst and best pairs.
        acceptance_by_position: accepted / proposed, over all runs.
        draft_ms, verify_ms: per round with drafts; None when no profiled reply drafted.
        void: why it cannot be chosen, "" when it can.
    """

    block_size: int
    per_second: float
    gain: float
    low: float
    acceptance_by_position: list[float]
    tokens_per_forward: float
    draft_ms: float | None
    verify_ms: float | None
    void: str = ""
    high: float = 0.0

    @property
    def loses(self) -> bool:
        """True when it is slower than plain decoding whatever the runs leave open."""
        return not self.void and self.high < 1

    @property
    def wins(self) -> bool:
        """True when it is faster than plain decoding by more than noise explains."""
        return not self.void and self.low > 1


@dataclass(slots=True)
class Phases:
    """Milliseconds of the profiled replies of one width, and rounds with drafts in them."""

    rounds: int = 0
    draft: float = 0.0
    verify: float = 0.0
    by_workload: dict[str, dict[str, float]] = field(default_factory=dict)

    def per_round(self, total: float) -> float | None:
        """`total` over the rounds; None when there was none."""
        return total / self.rounds if self.rounds else None


def width_arms(widest: int) -> tuple[Arm, ...]:
    """Plain decoding, and every L from 2 to `widest` at its full width."""
    widths = (
        Arm(arm_name(L), f"blocks of {L} rows, no governor", True, adaptive=False, block_size=L, may_idle=True)
        for L in range(2, widest + 1)
    )
    return (ARMS["plain"], *widths)


def arm_name(L: int) -> str:
    """What tables call a width."""
    return f"L={L}"


def profile(pair: Pair, plan: BenchPlan, trials: Sequence[Trial], tick: Callable[[str], None]) -> dict[int, Phases]:
    """Draft and verify time per width, from one profiled reply per workload (its first trial)."""
    from ..diagnostics import held, profiled
    from ..engine import Engine

    out: dict[int, Phases] = {}
    first = [trial for trial in trials if trial.number == 1]
    for arm in plan.arms:
        if arm.block_size is None:
            continue
        phases = out.setdefault(arm.block_size, Phases())
        for trial in first:
            tick(f"phases of {trial.workload}: {arm.name}")
            with profiled(), held():
                handle = Engine(pair, max_rows=1).submit(request_of(trial, arm, plan.sampling, plan.max_tokens))
                timings = handle.result().timings
            ms, rounds = timings.phases_ms, timings.draft_rounds
            if rounds:
                phases.rounds += rounds
                phases.draft += ms.get("propose", 0.0)
                phases.verify += ms.get("verify", 0.0)
                phases.by_workload[trial.workload] = {name: value / rounds for name, value in ms.items()}
    return out


# -- figures -----------------------------------------------------------------------------------------------


def sweep(plan: BenchPlan, runs: Sequence[Run], phases: Mapping[int, Phases]) -> list[WidthResult]:
    """One result per width, in order."""
    return [_width(plan, runs, arm, phases.get(arm.block_size)) for arm in plan.arms if arm.block_size is not None]


def _width(plan: BenchPlan, runs: Sequence[Run], arm: Arm, phases: Phases | None) -> WidthResult:
    mine = [run for run in runs if run.arm == arm.name]
    plain = plan.arms[0].name
    logs = [
        [_log_ratio(a, b) for a, b in zip(of_arm(runs, w.name, arm.name), of_arm(runs, w.name, plain), strict=True)]
        for w in plan.workloads
    ]
    gain, low, high = gain_and_range(logs)
    seen = acceptance(mine)
    phases = phases or Phases()
    return WidthResult(
        block_size=arm.block_size or 0,
        per_second=statistics.median(run.decode_per_second for run in mine),
        gain=gain,
        low=low,
        acceptance_by_position=seen["acceptance_by_position"],
        tokens_per_forward=seen["tokens_per_forward"],
        draft_ms=phases.per_round(phases.draft),
        verify_ms=phases.per_round(phases.verify),
        void=next((f"{run.workload} {run.trial}: {run.void}" for run in mine if run.void), ""),
        high=high,
    )


def _log_ratio(run: Run, base: Run) -> float:
    """log(speed / plain speed); 0 when a clock did not run, in which case the run is void anyway."""
    if not (run.decode_per_second and base.decode_per_second):
        return 0.0
    return math.log(run.decode_per_second / base.decode_per_second)


def gain_and_range(logs: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """(gain, lowest, highest that the runs leave open) of log ratios per workload.

    Workloads differ in what they gain, which is no noise: the error of the mean is made of the spread inside each.
    The spread of three runs may be small by chance, so their worst and best are left open too.
    """
    middle = statistics.fmean(statistics.fmean(one) for one in logs)
    error = NOISE * math.sqrt(sum(statistics.variance(one) / len(one) for one in logs)) / len(logs)
    low = min(middle - error, statistics.fmean(min(one) for one in logs))
    high = max(middle + error, statistics.fmean(max(one) for one in logs))
    return math.exp(middle), math.exp(low), math.exp(high)


def choose(widths: Sequence[WidthResult]) -> WidthResult | None:
    """The width to store, None when no width beats plain decoding beyond noise.

    Of those within 2% of the best it is the narrowest: a wider block that gains nothing costs more where drafts are
    rejected and in a lane, whose rows all pay for the widest draft. A governor may draft less than it, never more.
    """
    winners = [width for width in widths if width.wins]
    if not winners:
        return None
    best = max(width.gain for width in winners)
    return min((w for w in winners if w.gain >= best * (1 - NEAR)), key=lambda w: w.block_size)


def tune_document(
    plan: BenchPlan,
    trials: Sequence[Trial],
    runs: Sequence[Run],
    warm: Any,
    phases: Mapping[int, Phases],
    context: Mapping[str, Any],
) -> Document:
    """The bench's document of these runs, with the sweep and the choice."""
    widths = sweep(plan, runs, phases)
    chosen = choose(widths)
    plain = [run for run in runs if run.arm == plan.arms[0].name]
    return document(plan, trials, runs, warm, context) | {
        "format": FORMAT,
        "plain_per_second": statistics.median(run.decode_per_second for run in plain),
        "plain_void": next((run.void for run in plain if run.void), ""),
        "sweep": [asdict(width) | {"wins": width.wins, "loses": width.loses} for width in widths],
        "phases": {str(L): one.by_workload for L, one in phases.items()},
        "chosen": None if chosen is None else chosen.block_size,
        "rule": f"gain over plain above 1 by {NOISE:g} standard errors, and in the mean of each workload's worst run; "
        f"narrowest within {NEAR:.0%} of the best",
    }


# -- tables ------------------------------------------------------------------------------------------------

COLUMNS = ("L", "decode tok/s", "gain", "at least", "accepted by position", "tok/forward", "draft", "verify", "verdict")
PAIRED = "gains are means of paired runs and do not divide from the speeds"


def table(doc: Document) -> list[tuple[str, ...]]:
    """Rows under `COLUMNS`, plain decoding first; draft and verify are milliseconds per round."""
    rows: list[tuple[str, ...]] = [("plain", f"{doc['plain_per_second']:.1f}", "1.00x", "", "", "1.00", "", "", "")]
    for width in doc["sweep"]:
        rates = " ".join(f"{rate:.0%}" for rate in width["acceptance_by_position"])
        rows.append(
            (
                str(width["block_size"]),
                f"{width['per_second']:.1f}",
                f"{width['gain']:.2f}x",
                f"{width['low']:.2f}x",
                rates or "-",
                f"{width['tokens_per_forward']:.2f}",
                _ms(width["draft_ms"]),
                _ms(width["verify_ms"]),
                _verdict(width, doc),
            )
        )
    return rows


def _verdict(width: Mapping[str, Any], doc: Document) -> str:
    """Why this width was chosen or was not."""
    if width["block_size"] == doc["chosen"]:
        return "chosen"
    if width["void"]:
        return "VOID"
    if not width["wins"]:
        gain = width["gain"]
        by = f"{'slower' if gain < 1 else 'faster'} by {abs(gain - 1):.0%}"
        return by if width["loses"] else f"{by}, within noise ({width['low']:.2f}x-{width['high']:.2f}x)"
    best = max((w for w in doc["sweep"] if w["wins"]), key=lambda w: w["gain"])
    if width["gain"] >= best["gain"] * (1 - NEAR):
        return f"no better than L={doc['chosen']}, which is narrower"
    return f"{1 - width['gain'] / best['gain']:.0%} slower than L={best['block_size']}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"
