"""`spec bench`: speculative against plain decoding, in turns, with every raw run kept."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..benchmark.workloads import NAMES, bundled, from_files
from ..errors import RefusedError, UsageError
from .options import PairOptions, load_pair, pair_options, read_pair_options
from .output import note, print_table, progress
from .values import NUMBER, WHOLE, Folder, Whole

if TYPE_CHECKING:
    from ..benchmark.method import Arm, BenchPlan
    from ..pair import Pair


@click.command("bench")
@pair_options
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    type=click.Choice(NAMES),
    help="Kind of text; may be given several times. Default: all.",
)
@click.option(
    "--prompt-file",
    "prompt_files",
    multiple=True,
    type=click.Path(dir_okay=False),
    help="Measure on this text instead; may be given several times, one prompt each.",
)
@click.option(
    "-n",
    "--max-tokens",
    type=Whole(16),
    default=128,
    show_default=True,
    help="Length of every reply; end ids do not end it.",
)
@click.option("--pairs", type=Whole(3), default=3, show_default=True, help="Trials per workload.")
@click.option(
    "--arms",
    default="plain,spec",
    show_default=True,
    help="What takes turns, the first being the reference: plain, spec, fixed (no governor).",
)
@click.option("--temp", "temperature", type=NUMBER, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=WHOLE, default=0, show_default=True, help="Seed of the first trial under --temp.")
@click.option("--no-chat-template", is_flag=True, help="Use the prompts as they are.")
@click.option("--out", type=Folder(), help="Folder for bench.json and bench.png; files of those names are replaced.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON document instead of tables.")
def command(out: str | None, as_json: bool, **values: Any) -> None:
    """Time speculative against plain decoding: warm-up, alternating runs, medians and every raw run.

    The reference is plain decoding by the same engine in the same process. A run that did not take the
    path its arm stands for makes the result void (exit 1), as does a reply that differs from the first
    arm's although the pair is proven exact.
    """
    from ..benchmark.report import failed, results_folder

    with results_folder(out) as folder:
        chosen = read_pair_options(values)
        plan = make_plan(values, chosen)
        doc = run(plan, values, chosen)
        show(doc, as_json)
        if folder is not None:
            save(doc, folder)
    if failed(doc):
        raise RefusedError(
            "bench",
            found="a void run" if doc["void"] else "replies that differ between the arms",
            expected="every run on the path of its arm, and equal replies",
            next_step=next_step(doc),
            code="R30",
        )


def next_step(doc: dict[str, Any]) -> str:
    """What to do about a result that cannot be used."""
    from ..pilot import NO_DRAFTS

    if not doc["void"]:
        return "Run spec probe, and report this with the JSON document"
    if any(NO_DRAFTS in reason for reason in doc["void_reasons"]):
        return "See the lines above; take text that repeats itself (--workload, --prompt-file), or another drafter"
    pinned = any(arm["speculative"] and not arm["adaptive"] for arm in doc["method"]["arms"])
    advice = "" if pinned else ", and --arms plain,fixed drafts without the governor"
    return f"See the lines above; a larger -n leaves more rounds to draft in{advice}"


def make_plan(values: dict[str, Any], chosen: PairOptions) -> BenchPlan:
    """The plan these options ask for."""
    from ..benchmark.method import BenchPlan
    from ..sampling import Sampling

    given = {"temperature": values["temperature"], "seed": values["seed"], "acceptance": chosen.acceptance}
    workloads = [bundled(name) for name in dict.fromkeys(values["workloads"])]
    if values["prompt_files"]:
        workloads.append(from_files(values["prompt_files"]))
    return BenchPlan(
        arms=read_arms(values["arms"]),
        workloads=tuple(workloads or [bundled(name) for name in NAMES]),
        pairs=values["pairs"],
        max_tokens=values["max_tokens"],
        sampling=Sampling.from_mapping(given),
        template=not values["no_chat_template"],
    )


def read_arms(text: str) -> tuple[Arm, ...]:
    """Arms of a comma-separated list; UsageError for unknown, repeated or too few names."""
    from ..benchmark.method import ARMS

    names = [name.strip() for name in text.split(",") if name.strip()]
    if len(names) < 2 or len(set(names)) < len(names) or not set(names) <= set(ARMS):
        raise UsageError(
            "--arms",
            found=repr(text),
            expected=f"two or three different ones of {', '.join(ARMS)}",
            next_step="Correct it",
            code="U84",
        )
    return tuple(ARMS[name] for name in names)


def run(plan: BenchPlan, values: dict[str, Any], chosen: PairOptions) -> dict[str, Any]:
    """Load, warm up, measure; the result document."""
    from ..benchmark import machine, method, report

    context: dict[str, Any] = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["spec", *sys.argv[1:]]),
    }
    method.need_tokenizer(chosen.target)
    began = time.perf_counter()
    with progress("loading") as steps:
        pair = load_pair(values, chosen, steps)
        settle(pair)
    context["load_s"] = time.perf_counter() - began
    check_active(pair, plan)
    for line in [pair.plan.line(), *(f"note: {text}" for text in pair.plan.notes)]:
        note(line)
    context |= {"pair": machine.describe_pair(pair), "machine": machine.describe_machine()}
    context["versions"] = machine.versions()
    trials = method.prepare(pair, plan)
    with progress("warming up") as steps:
        warm = method.warm_up(pair, plan, steps.describe)
    with progress("measuring", plan.runs) as steps:
        steps.announce(f"measuring {plan.runs} replies of {plan.max_tokens} tokens")

        def tick(text: str) -> None:
            steps.describe(text)
            steps.advance()

        runs = method.measure(pair, plan, trials, tick)
    context["load_average_after"] = machine.load_average()
    if pair.costs is not None:
        context["costs"] = pair.costs.for_batch(1).table()
    return report.document(plan, trials, runs, warm, context)


def settle(pair: Pair) -> None:
    """Have every weight in memory before a clock starts."""
    import mlx.core as mx

    modules = (pair.target.model, pair.drafter.model if pair.drafter is not None else None)
    mx.eval([module.parameters() for module in modules if module is not None])


def check_active(pair: Pair, plan: BenchPlan) -> None:
    """Refuse before measuring when an arm that drafts could not."""
    from ..loading import how_to_draft

    if pair.plan.active or not any(arm.speculative for arm in plan.arms):
        return
    missing = pair.drafter is None and pair.plan.requested == "none"
    raise RefusedError(
        "bench",
        found="no drafter" if missing else f"speculation off ({pair.plan.reason})",
        expected="a pair that speculates, for arms other than plain",
        next_step=how_to_draft(pair.target_ref) if missing else "See spec pair",
        code="R31",
    )


def save(doc: dict[str, Any], folder: Path) -> None:
    """Write bench.json and, where matplotlib is installed, bench.png."""
    from ..benchmark import plot
    from ..benchmark.report import to_json, write_file

    write_file(folder / "bench.json", (to_json(doc) + "\n").encode())
    note(f"wrote {folder / 'bench.json'}")
    if not plot.available():
        note(plot.MISSING)
        return
    write_file(folder / "bench.png", plot.draw(doc))
    note(f"wrote {folder / 'bench.png'}")


def show(doc: dict[str, Any], as_json: bool) -> None:
    """The document, or its tables and what must be said beside them."""
    from ..benchmark.report import COLUMNS, PAIRED, remarks, table, to_json

    if as_json:
        print(to_json(doc))
        return
    runs = f"{doc['method']['pairs']} alternating runs of {doc['method']['max_tokens']} tokens"
    print_table(COLUMNS, table(doc), f"{runs}, median (lowest-highest); {PAIRED}")
    for line in remarks(doc):
        print(line)
