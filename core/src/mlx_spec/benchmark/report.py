"""The result of a benchmark: a JSON document, tables made from it, files that are whole or absent."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..conversion.refusals import NO_ROOM
from ..errors import RefusedError, SpecError, UsageError
from .statistics import Spread, first_difference, geometric_mean, paired_ratios, verdict

if TYPE_CHECKING:
    from .method import BenchPlan, Run, Trial, WarmUp

FORMAT = "mlx-spec bench 2"  # 1 counted decode_per_second from the first event on
EXACT = ("bitwise", "greedy")  # levels at which a differing reply is a fault
IMPLAUSIBLE = "implausible"
BEYOND = 1.1  # a gain over what its tokens per forward explain that timings of short replies may differ by
Document = dict[str, Any]


def document(
    plan: BenchPlan, trials: Sequence[Trial], runs: Sequence[Run], warm: WarmUp, context: Mapping[str, Any]
) -> Document:
    """Everything measured, and what measuring it again takes (`context`: pair, machine, versions)."""
    void = [f"{run.workload} {run.trial}, {run.arm}: {run.void}" for run in runs if run.void]
    different = differences(plan, runs)
    return {
        "format": FORMAT,
        "void": bool(void),
        "void_reasons": void,
        "tokens_equal": None if plan.sampling.law == "rejection" else not different,
        "differences": different,
        "summary": summarise(plan, runs),
        "geometric_mean": overall(plan, runs),
        **context,
        "method": method(plan, warm),
        "prompts": [asdict(trial) for trial in trials],
        "runs": [raw(run, runs, plan) for run in runs],
    }


def method(plan: BenchPlan, warm: WarmUp) -> Document:
    """How the runs were made, as fixed before they were."""
    sampling = plan.sampling
    return {
        "arms": [asdict(arm) for arm in plan.arms],
        "order": "trials go round the workloads; within a trial the arms follow each other",
        "pairs": plan.pairs,
        "max_tokens": plan.max_tokens,
        "ignore_eos": True,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "law": sampling.law,
        "chat_template": plan.template,
        "concurrency": 1,
        "prefix_cache": "none: every run starts with an empty state",
        "warm_up": asdict(warm),
    }


def raw(run: Run, runs: Sequence[Run], plan: BenchPlan) -> Document:
    """One run; its ids are left out when they equal those of the first arm."""
    out = asdict(run)
    base = _base(run, runs, plan)
    if base is not run and base.ids == run.ids:
        del out["ids"]
        out["ids_equal_to"] = base.arm
    return out


def _base(run: Run, runs: Sequence[Run], plan: BenchPlan) -> Run:
    same = (r for r in runs if (r.workload, r.trial) == (run.workload, run.trial))
    return next(r for r in same if r.arm == plan.arms[0].name)


def differences(plan: BenchPlan, runs: Sequence[Run]) -> list[Document]:
    """Replies that are not those of the first arm: where, and the two ids; none under `rejection`."""
    if plan.sampling.law == "rejection":
        return []
    out = []
    for run in runs:
        base = _base(run, runs, plan)
        at = first_difference(base.ids, run.ids)
        if at is not None:
            found, wanted = run.ids[at : at + 1], base.ids[at : at + 1]
            out.append(
                {"workload": run.workload, "trial": run.trial, "arm": run.arm, "position": at, "found": found}
                | {"expected": wanted, "expected_of": base.arm}
            )
    return out


# -- summary --------------------------------------------------------------------------------------------


def of_arm(runs: Sequence[Run], workload: str, arm: str) -> list[Run]:
    """Runs of one arm on one workload, by trial."""
    return [run for run in runs if (run.workload, run.arm) == (workload, arm)]


def summarise(plan: BenchPlan, runs: Sequence[Run]) -> list[Document]:
    """One entry per workload and arm: clocks, gain over the first arm, acceptance, memory."""
    out = []
    for workload in plan.workloads:
        base = of_arm(runs, workload.name, plan.arms[0].name)
        for arm in plan.arms:
            mine = of_arm(runs, workload.name, arm.name)
            entry: Document = {"workload": workload.name, "arm": arm.name, "void": any(run.void for run in mine)}
            entry |= clocks(mine)
            if arm is not plan.arms[0]:
                entry |= gains(mine, base)
            out.append(entry | acceptance(mine) | {"peak_memory": max(run.peak_memory for run in mine)})
    return out


def clocks(runs: Sequence[Run]) -> Document:
    """The three clocks of one arm on one workload, each as a spread."""
    return {
        "first_token_s": asdict(Spread.of([run.first_token_s for run in runs])),
        "decode_per_second": asdict(Spread.of([run.decode_per_second for run in runs])),
        "total_s": asdict(Spread.of([run.total_s for run in runs])),
    }


def gains(runs: Sequence[Run], base: Sequence[Run]) -> Document:
    """Ratios over the first arm, trial by trial; above 1 is faster. Empty when a clock did not run."""
    if not all(run.decode_per_second and run.total_s for run in [*runs, *base]):
        return {"decode_gain": None, "total_gain": None, "verdict": "no figures"}
    decode = paired_ratios([run.decode_per_second for run in runs], [run.decode_per_second for run in base])
    total = paired_ratios([run.total_s for run in base], [run.total_s for run in runs])
    found = {"decode_gain": asdict(decode), "total_gain": asdict(total)}
    return found | {"verdict": IMPLAUSIBLE if implausible(runs, base) else verdict(decode.values)}


def implausible(runs: Sequence[Run], base: Sequence[Run]) -> bool:
    """True when some run gained more than its tokens per forward explain.

    A verify costs no less than a plain step: the reference was slowed by something else, or the reply was too short to
    be timed.
    """
    return any(
        run.decode_per_second * reference.path["tokens_per_forward"]
        > BEYOND * reference.decode_per_second * run.path["tokens_per_forward"]
        for run, reference in zip(runs, base, strict=True)
    )


def acceptance(runs: Sequence[Run]) -> Document:
    """Accepted / proposed by draft position over all runs, and tokens per forward of the target."""
    depth = max((len(run.path["proposed_by_position"]) for run in runs), default=0)
    proposed, accepted = [0] * depth, [0] * depth
    for run in runs:
        for i, (p, a) in enumerate(
            zip(run.path["proposed_by_position"], run.path["accepted_by_position"], strict=True)
        ):
            proposed[i] += p
            accepted[i] += a
    forwards = sum(run.path["draft_rounds"] + run.path["plain_steps"] for run in runs)
    return {
        "proposed_by_position": proposed,
        "accepted_by_position": accepted,
        "acceptance_by_position": [a / p if p else 0.0 for a, p in zip(accepted, proposed, strict=True)],
        "tokens_per_forward": sum(len(run.ids) for run in runs) / forwards if forwards else 0.0,
    }


def overall(plan: BenchPlan, runs: Sequence[Run]) -> dict[str, float | None]:
    """Per arm, the geometric mean over workloads of its median decode gain; None where one is no figure."""
    out: dict[str, float | None] = {}
    for arm in plan.arms[1:]:
        found = [gains(of_arm(runs, w.name, arm.name), of_arm(runs, w.name, plan.arms[0].name)) for w in plan.workloads]
        usable = all(gain["decode_gain"] and gain["verdict"] != IMPLAUSIBLE for gain in found)
        out[arm.name] = geometric_mean([gain["decode_gain"]["median"] for gain in found]) if usable else None
    return out


# -- tables ---------------------------------------------------------------------------------------------

PAIRED = "gains are medians of paired runs and do not divide from the speeds"
COLUMNS = (
    "workload",
    "arm",
    "decode tok/s",
    "gain",
    "pairs",
    "first token",
    "total",
    "accepted",
    "tok/forward",
    "peak",
)


def table(doc: Document) -> list[tuple[str, ...]]:
    """Rows under `COLUMNS`, medians with (lowest-highest)."""
    return [_row(entry) for entry in doc["summary"]]


def _row(entry: Document) -> tuple[str, ...]:
    gain = entry.get("decode_gain")
    rates = entry["acceptance_by_position"]
    return (
        entry["workload"],
        entry["arm"],
        _ranged(entry["decode_per_second"], "{:.1f}"),
        "VOID" if entry["void"] else _ranged(gain, "{:.2f}", "x") if gain else "-",
        "-" if entry["void"] else entry.get("verdict", "-"),
        _ranged(entry["first_token_s"], "{:.0f}", " ms", 1e3),
        _ranged(entry["total_s"], "{:.2f}", " s"),
        " ".join(f"{rate:.0%}" for rate in rates) or "-",
        f"{entry['tokens_per_forward']:.2f}",
        f"{entry['peak_memory'] / 2**20:.0f} MiB",
    )


def _ranged(spread: Document, form: str, unit: str = "", scale: float = 1.0) -> str:
    middle, low, high = (form.format(spread[name] * scale) for name in ("median", "low", "high"))
    return f"{middle}{unit} ({low}-{high})"


NO_GAIN = {"median": 1.0}


def _doubt(entry: Document, tokens: int) -> str:
    return (
        f"implausible: {entry['arm']} on {entry['workload']} ({_ranged(entry['decode_gain'], '{:.2f}x')}): some run "
        f"gained more than its tokens a forward can give ({entry['tokens_per_forward']:.2f} over all); something "
        f"slowed the run it is compared with, or replies of {tokens} tokens are too short to time: take a larger -n"
    )


def _loss(entry: Document) -> str:
    gain = entry["decode_gain"]
    if gain["high"] >= 1:
        return f"undecided: {entry['arm']} on {entry['workload']} ({_ranged(gain, '{:.2f}x')})"
    return f"loss: {entry['arm']} is slower on {entry['workload']} ({gain['median']:.2f}x)"


def remarks(doc: Document) -> list[str]:
    """What must be said beside the figures."""
    gains = {} if doc["void"] else doc["geometric_mean"]
    lines = [f"{arm}: {gain:.2f}x over all workloads (geometric mean)" for arm, gain in gains.items() if gain]
    lines += [_loss(e) for e in doc["summary"] if (e.get("decode_gain") or NO_GAIN)["median"] < 1 and not e["void"]]
    tokens = doc["method"]["max_tokens"]
    lines += [_doubt(e, tokens) for e in doc["summary"] if e.get("verdict") == IMPLAUSIBLE and not e["void"]]
    if doc["tokens_equal"] is None:
        lines.append("tokens: not compared, since rejection keeps the distribution and not the tokens")
    elif doc["tokens_equal"]:
        lines.append(f"tokens: all {len(doc['runs'])} replies equal between the arms")
    for d in doc["differences"]:
        lines.append(
            f"tokens DIFFER: {d['workload']} {d['trial']}, {d['arm']}: reply token {d['position']} is {d['found']}, "
            f"{d['expected_of']} has {d['expected']} (exactness level: {doc['pair']['exactness']})"
        )
    if not doc["method"]["warm_up"]["settled"]:
        lines.append("note: the speed had not settled after the warm-up; something else keeps this machine busy")
    if any(trial["repeated"] for trial in doc["prompts"]):
        lines.append("note: more pairs than prompts, so some prompts came twice")
    fallbacks = {text for run in doc["runs"] for text in run["path"]["fallbacks"]}
    lines += [f"note: {text}" for text in sorted(fallbacks)]
    return lines + [f"VOID {reason}" for reason in doc["void_reasons"]]


def failed(doc: Document) -> bool:
    """True when the result cannot be used, or replies differ although the pair is proven exact."""
    return bool(doc["void"] or (doc["differences"] and doc["pair"]["exactness"] in EXACT))


# -- files ----------------------------------------------------------------------------------------------


def to_json(doc: Any) -> str:
    """Indented JSON with every list of numbers on one line."""
    text = json.dumps(doc, indent=1, ensure_ascii=False, allow_nan=False)
    number = r"-?\d[\d.eE+-]*"
    return re.sub(
        rf"\[\n\s*({number}(?:,\n\s*{number})*)\n\s*\]", lambda m: "[" + re.sub(r"\n\s*", " ", m[1]) + "]", text
    )


def open_folder(path: str) -> Path:
    """The folder for results, created; an error as of `write_file` when it cannot be written to."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".bench-")
        os.close(handle)
        Path(name).unlink()
    except OSError as error:
        raise _refuse(path, error) from error
    return folder


@contextmanager
def results_folder(path: str | None) -> Iterator[Path | None]:
    """`open_folder` for the time of a run; what was made and stayed empty is gone at its end."""
    if path is None:
        yield None
        return
    made = [folder for folder in (Path(path), *Path(path).parents) if not folder.exists()]
    folder = open_folder(path)
    try:
        yield folder
    finally:
        with suppress(OSError):  # of the first that holds something
            for empty in made:
                empty.rmdir()


def write_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; UsageError when it cannot, RefusedError on a full disk."""
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".bench-")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise _refuse(str(path.parent), error) from error


def _refuse(path: str, error: OSError) -> SpecError:
    if error.errno in NO_ROOM:
        return RefusedError(
            f"room for --out {path}",
            found=error.strerror,
            expected="room for the results",
            next_step="Make room, or choose a folder on another disk",
            code="R40",
        )
    return UsageError(
        f"--out {path}",
        found=error.strerror or str(error),
        expected="a folder that can be written to",
        next_step="Choose another folder, or leave --out away",
        code="U83",
    )
