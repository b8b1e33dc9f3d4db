"""The exactness probe: real rounds with rollback against single steps, on the loaded weights.

For every prompt the target is stepped one token at a time first (the reference). Then, per width L and
accept count a, a scripted draft that is right for a tokens and wrong after them goes through the pair's
own verify and rollback hooks, and single steps continue from what the rollback left. Every logits row
that the reference has is compared: bytes, argmax, largest difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .lane import Lane
from .types import LEVELS, Draft, ExactnessReport, Level, ModelRef

if TYPE_CHECKING:
    import mlx.core as mx

    from .models import Drafter, Target
    from .pair import Pair
    from .rounds import RoundHooks
    from .state import StateGroup

AREA, POINTERS = "exactness", "verdicts"  # memos by pair key, and which memo is about which files
CONTINUE = 3  # single steps after a rollback
MAX_PROMPT = 1536  # longest synthetic prompt, tokens


@dataclass(slots=True)
class ProbePlan:
    """What to compare.

    Attributes:
        width: the L the pair wants to run at; 2..width are all probed (the end of a reply narrows it).
        prompts: token id lists, each at least two tokens.
        hooks: the pair's bound round hooks.
        kv_bits, kv_group_size, prefill_step: the state and prefill partition in use.
        asked: level the caller needs; the widest width reaching it is searched.
        tick: told what is being compared, for progress bars.
    """

    width: int
    prompts: list[list[int]]
    hooks: RoundHooks
    kv_bits: int | None = None
    kv_group_size: int = 64
    prefill_step: int = 2048
    asked: str = "greedy"
    tick: Callable[[str], None] = lambda text: None


@dataclass(slots=True)
class Tally:
    """Comparison of one width."""

    rows: int = 0
    unequal: int = 0  # rows whose bytes differ
    mismatches: int = 0  # rows whose argmax differs
    wide_mismatches: int = 0  # of those, with a top-2 gap larger than the difference can explain
    max_abs_diff: float = 0.0
    min_gap: float = float("inf")

    def add(self, stats: Sequence[float]) -> None:
        """One row: (bytes equal, argmax equal, max abs diff, reference top-2 gap)."""
        same, argmax, diff, gap = stats
        self.rows += 1
        self.unequal += not same
        self.max_abs_diff = max(self.max_abs_diff, diff)
        self.min_gap = min(self.min_gap, gap)
        if not argmax:
            self.mismatches += 1
            self.wide_mismatches += gap > 2 * diff

    @property
    def level(self) -> Level:
        """Strongest level these rows support."""
        if not self.rows or self.wide_mismatches:
            return "unproven"
        if self.mismatches:
            return "distribution"
        return "greedy" if self.unequal else "bitwise"


@dataclass(slots=True)
class _Reference:
    """Single-step decoding of one prompt: states before the anchor, tokens and logits rows after it."""

    base: StateGroup
    tokens: list[int]  # anchor first, then greedy continuation
    rows: list[mx.array]  # rows[i] (V,): logits after tokens[i]


def row_stats(row: mx.array, reference: mx.array) -> mx.array:
    """(4,) float32: bytes equal, argmax equal, max abs difference, top-2 gap of the reference."""
    import mlx.core as mx

    a, b = row.astype(mx.float32), reference.astype(mx.float32)
    top = mx.topk(b, 2)
    return mx.stack(
        [
            mx.all(row == reference).astype(mx.float32),
            (mx.argmax(a) == mx.argmax(b)).astype(mx.float32),
            mx.max(mx.abs(a - b)),
            mx.max(top) - mx.min(top),
        ]
    )


def reference_run(target: Target, plan: ProbePlan, prompt: Sequence[int]) -> _Reference:
    """Prefill as plain decoding does, then single greedy steps."""
    import mlx.core as mx

    states = target.make_states(plan.kv_bits, plan.kv_group_size)
    body = list(prompt[:-1])
    for start in range(0, len(body), plan.prefill_step):
        target.forward(mx.array([body[start : start + plan.prefill_step]], dtype=mx.int32), states)
        mx.eval(states.arrays())
    base = states.extract(0)
    tokens, rows = [int(prompt[-1])], []
    for _ in range(plan.width + CONTINUE + 1):
        seen = target.forward(mx.array([[tokens[-1]]], dtype=mx.int32), states)
        row = seen.logits[0, -1]
        rows.append(row)
        tokens.append(int(mx.argmax(row).item()))
    return _Reference(base, tokens, rows)


def scripted_round(
    target: Target, drafter: Drafter, plan: ProbePlan, ref: _Reference, width: int, accept: int
) -> Iterator[tuple[int, mx.array]]:
    """One verify of `width` rows with a draft right for `accept` tokens, rollback, single steps.

    Yields (index into the reference, logits row) for every row the reference can judge.
    """
    import mlx.core as mx

    guess = list(ref.tokens[1:width])
    for i in range(accept, len(guess)):
        guess[i] = (guess[i] + 1) % target.vocab_size
    lane = Lane(target, drafter, ref.base.extract(0), None)
    lane.tokens = [[0] * ref.base.lengths[0] + [ref.tokens[0]]]
    lane.anchors = mx.array([ref.tokens[0]], dtype=mx.int32)
    lane.mark = lane.states.mark()
    seen = plan.hooks.verify(lane=lane, draft=Draft(mx.array([guess], dtype=mx.int32)))
    for i in range(accept + 1):
        yield i, seen.logits[0, i]
    plan.hooks.rollback(lane=lane, side="target", keep=[accept + 1])
    for i in range(accept + 1, accept + 1 + CONTINUE):
        step = target.forward(mx.array([[ref.tokens[i]]], dtype=mx.int32), lane.states)
        yield i, step.logits[0, -1]


def probe(target: Target, drafter: Drafter, plan: ProbePlan) -> ExactnessReport:
    """Compare every width 2..L and accept count; returns the widest width reaching `plan.asked`."""
    import mlx.core as mx

    tallies = {width: Tally() for width in range(2, plan.width + 1)}
    first = ""
    for number, prompt in enumerate(plan.prompts, 1):
        ref = reference_run(target, plan, prompt)
        for width, tally in tallies.items():
            place = f"prompt {number} of {len(plan.prompts)} ({len(prompt)} tokens)"
            plan.tick(f"probing: {place}, L={width} of {plan.width}")
            accepts = range(width) if width == plan.width else (0, width - 1)
            stats = [
                row_stats(row, ref.rows[i])
                for accept in accepts
                for i, row in scripted_round(target, drafter, plan, ref, width, accept)
            ]
            for line in mx.stack(stats).tolist():
                tally.add(line)
            if tally.unequal and not first:
                first = first_difference(target, drafter, plan, ref, width)
        del ref
        mx.clear_cache()
    return summarise(tallies, plan, first)


def first_difference(target: Target, drafter: Drafter, plan: ProbePlan, ref: _Reference, width: int) -> str:
    """Name of the first layer whose state differs between a block and single steps, else "output head"."""
    import mlx.core as mx

    block = ref.base.extract(0)
    target.forward(mx.array([ref.tokens[:width]], dtype=mx.int32), block)
    single = ref.base.extract(0)
    for token in ref.tokens[:width]:
        target.forward(mx.array([[token]], dtype=mx.int32), single)
    for i, (a, b) in enumerate(zip(block, single, strict=True)):
        left, right = a.to_tensors()[0], b.to_tensors()[0]
        if any(not bool(mx.array_equal(left[name], right[name]).item()) for name in left):
            return f"layer {i} (or the one feeding it)"
    return "after the last cached layer"


def summarise(tallies: dict[int, Tally], plan: ProbePlan, first: str) -> ExactnessReport:
    """The report at the widest width that reaches the asked level, with the reason when it is narrower."""
    rank = LEVELS.index
    chosen, level = 1, "unproven"
    weakest = len(LEVELS) - 1
    for width in sorted(tallies):
        weakest = min(weakest, rank(tallies[width].level))
        if weakest >= rank(plan.asked):
            chosen, level = width, LEVELS[weakest]
    worst = tallies[max(tallies)]
    if chosen == 1:
        level = LEVELS[weakest]
    shown = tallies[chosen] if chosen > 1 else worst
    reason = ""
    if chosen < plan.width:
        reason = (
            f"at L={plan.width} {worst.mismatches} of {worst.rows} rows pick another token "
            f"(largest difference {worst.max_abs_diff:.3g}, smallest top-2 gap {worst.min_gap:.3g}, "
            f"first at {first or 'unknown'})"
        )
    return ExactnessReport(
        level=level,  # type: ignore[arg-type]
        width=chosen,
        asked_width=plan.width,
        max_abs_diff=shown.max_abs_diff,
        min_top2_gap=shown.min_gap,
        first_layer=first,
        mismatches=shown.mismatches,
        rows=shown.rows,
        reason=reason,
        widths=[{"width": w, "level": t.level, **_numbers(t)} for w, t in sorted(tallies.items())],
    )


def _numbers(tally: Tally) -> dict[str, float]:
    return {
        "rows": tally.rows,
        "unequal": tally.unequal,
        "mismatches": tally.mismatches,
        "max_abs_diff": tally.max_abs_diff,
        "min_gap": tally.min_gap,
    }


# -- a pair's own proof, remembered -----------------------------------------------------------------------


TEXTS = (
    "def average(values):\n    total = 0\n    for value in values:\n",
    "The quick brown fox jumps over the lazy dog, and then it counts: one, two, three, four,",
)


def probe_prompts(pair: Pair) -> list[list[int]]:
    """Short, around-the-window and past-the-window synthetic prompts, and two text prompts."""
    import random

    target = pair.target
    limit = pair.token_limit or target.vocab_size
    rng = random.Random(20)
    room = target.context - pair.plan.block_size - CONTINUE - 2
    windows = {w for s in target.make_states() if isinstance(w := getattr(s, "window", None), int)}
    lengths = {8, *(w - 1 for w in windows), *(min(w + 32, MAX_PROMPT) for w in windows)}
    prompts = [[rng.randrange(limit) for _ in range(n)] for n in sorted(lengths) if 2 <= n <= room]
    if pair.tokenizer is not None:
        encoded = [pair.tokenizer.encode(text)[: max(2, room)] for text in TEXTS]
        prompts += [ids for ids in encoded if len(ids) >= 2]
    return prompts or [[rng.randrange(limit) for _ in range(2)]]


def prove(pair: Pair, fresh: bool = False, tick: Callable[[str], None] = lambda text: None) -> ExactnessReport:
    """The pair's report: from the disk memo when its key is known, else probed now and remembered."""
    from .diskcache import read_entry, write_entry
    from .plugins import get_manager
    from .rounds import bind_hooks

    plan = pair.plan
    name = f"{pair.key}-L{plan.block_size}-{plan.exactness_asked}"
    if not fresh:
        known = _recall(read_entry(AREA, name), pair.key, plan.block_size)
        if known is not None:
            return known
    call = get_manager().owner_call("spec_probe_exactness", pair.owner)
    job = ProbePlan(
        width=plan.block_size,
        prompts=probe_prompts(pair),
        hooks=bind_hooks(pair),
        kv_bits=plan.kv_bits,
        kv_group_size=plan.kv_group_size,
        prefill_step=plan.prefill_step,
        asked=plan.exactness_asked if plan.exactness_asked in LEVELS else "greedy",
        tick=tick,
    )
    report: ExactnessReport = call(target=pair.target, drafter=pair.drafter, plan=job)
    report.key = pair.key
    report.environment = environment()
    write_entry(AREA, name, _as_dict(report))
    if pair.drafter_ref is not None and plan.kv_bits is None:
        where = {"memo": name, "key": pair.key, "block_size": plan.block_size}
        write_entry(POINTERS, _files_key(pair.target_ref, pair.drafter_ref), where)
    return report


def remembered(
    target: ModelRef, drafter: ModelRef, usual: Callable[[str], int] = lambda key: 0
) -> ExactnessReport | None:
    """A verdict on two checkpoints, when these versions gave it on this device; loads no weights.

    usual: L that the pair of a key runs with when nobody says; its verdict comes before the newest one.
    """
    from .diskcache import read_entry

    where = read_entry(POINTERS, _files_key(target, drafter)) or {}
    memo, key, size = where.get("memo"), where.get("key"), where.get("block_size")
    if not isinstance(memo, str) or not isinstance(key, str) or type(size) is not int:
        return None
    for width in dict.fromkeys((usual(key), size)):
        report = _recall(read_entry(AREA, memo.replace(f"-L{size}-", f"-L{width}-")), key, width)
        if report is not None and report.environment == environment():
            return report
    return None


def _files_key(target: ModelRef, drafter: ModelRef) -> str:
    """Names two checkpoints by their contents, and what kernels they are asked to run on."""
    import hashlib

    from .checkpoint import fingerprint
    from .settings import get_settings

    asked = get_settings()
    parts = fingerprint(target.path), fingerprint(drafter.path), asked.kernels, asked.activations, asked.plugins
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


def environment() -> dict[str, str]:
    """Versions and device a verdict belongs to."""
    import platform

    import mlx.core as mx

    from . import __version__

    return {
        "mlx": mx.__version__,
        "device": str(mx.default_device()),
        "machine": platform.machine(),
        "system": platform.system(),
        "mlx_spec": __version__,
    }


def _as_dict(report: ExactnessReport) -> dict[str, Any]:
    from dataclasses import asdict

    out = asdict(report)
    if out["min_top2_gap"] == float("inf"):
        out["min_top2_gap"] = None
    return out


def _recall(data: Any, key: str, asked: int) -> ExactnessReport | None:
    """The remembered report of this key and width; None when it is absent, damaged or another version's."""
    if not isinstance(data, dict):
        return None
    data = {**data, "source": "memo"}
    if data.get("min_top2_gap") is None:
        data["min_top2_gap"] = float("inf")
    try:
        report = ExactnessReport(**data)
    except TypeError:  # written by another version: probe again
        return None
    return report if _sound(report) and (report.key, report.asked_width) == (key, asked) else None


def _sound(report: ExactnessReport) -> bool:
    """Whether every field of a report that was read from disk can be what a probe writes."""
    if not isinstance(report.environment, dict) or not isinstance(report.widths, list):
        return False
    texts = (report.first_layer, report.reason, *report.environment, *report.environment.values())
    return (
        report.level in LEVELS
        and _counts(report.width, report.asked_width, report.mismatches, report.rows)
        and 1 <= report.width <= max(1, report.asked_width)
        and _measures(report.max_abs_diff, report.min_top2_gap)
        and all(isinstance(text, str) for text in texts)
        and all(map(_sound_width, report.widths))
    )


def _sound_width(row: Any) -> bool:
    if not isinstance(row, dict) or set(row) != {"width", "level", *_numbers(Tally())}:
        return False
    counts = (row["width"], row["rows"], row["unequal"], row["mismatches"])
    return row["level"] in LEVELS and _counts(*counts) and _measures(row["max_abs_diff"], row["min_gap"])


def _counts(*values: Any) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _measures(*values: Any) -> bool:
    """Numbers from 0 up; a gap that was never measured is infinite, and NaN is no number here."""
    return all(type(value) in (int, float) and value >= 0 for value in values)
