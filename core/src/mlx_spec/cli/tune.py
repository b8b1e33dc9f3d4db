"""`spec tune`: time plain decoding and every block size here, and keep the best when it wins."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..benchmark.workloads import NAMES, bundled, from_files
from ..errors import RefusedError
from ..width import SWEEP
from .bench import settle
from .options import PairOptions, load_pair, pair_options, read_pair_options
from .output import note, print_table, progress
from .values import NUMBER, WHOLE, Folder, Whole

if TYPE_CHECKING:
    from ..benchmark.method import BenchPlan
    from ..pair import Pair

DEFAULT_WORKLOADS = ("code", "chat", "prose")
FEWEST_WIDEST = 6  # L tried at least, where the drafter can do it: what it declares may be too narrow for this machine


@click.command("tune")
@pair_options
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    type=click.Choice(NAMES),
    help="Kind of text; may be given several times. Default: code, chat and prose.",
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
@click.option("--temp", "temperature", type=NUMBER, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=WHOLE, default=0, show_default=True, help="Seed of the first trial under --temp.")
@click.option("--no-chat-template", is_flag=True, help="Use the prompts as they are.")
@click.option("--no-store", is_flag=True, help="Measure only; what is stored stays as it is.")
@click.option("--forget", is_flag=True, help="Drop what was learned of this pair here (block size, costs) and end.")
@click.option("--out", type=Folder(), help="Folder for tune.json and tune.png; files of those names are replaced.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON document instead of tables.")
def command(out: str | None, as_json: bool, **values: Any) -> None:
    """Time every block size against plain decoding; the best is stored for this pair and machine.

    A width is stored only when it beats plain decoding by more than the runs disagree; of widths within 2% of the
    best, the narrowest. `spec generate` and `mlx_spec.load` then use it wherever no width is asked for. When no width
    wins, an earlier choice is removed if it loses, and kept if these runs do not decide about it. --draft-block-size is
    the widest L tried.
    """
    from ..benchmark.method import need_tokenizer
    from ..benchmark.report import results_folder

    with results_folder(out) as folder:
        chosen = read_pair_options(values)
        if chosen.block_size is None:
            chosen = replace(chosen, block_size=widest_to_try(chosen), block_size_from=SWEEP)
        if values["forget"]:
            with progress("loading") as steps:
                forget(load_pair({**values, "no_probe": True}, chosen, steps))
            return
        need_tokenizer(chosen.target)
        with progress("loading and probing") as steps:
            pair = load_pair(values, chosen, steps)
        doc = run(pair, values, chosen)
        refuse_bad(doc)
        doc["stored"] = store(pair, doc) if not values["no_store"] else "not asked to"
        show(doc, as_json)
        if folder is not None:
            save(doc, folder)


def widest_to_try(chosen: PairOptions) -> int:
    """L to load at when none is asked for: what would run, or a little more; reads files only."""
    from ..loading import choose_drafter, how_to_draft, open_ref
    from ..width import resolve_block_size

    target = open_ref(chosen.target)
    choice = choose_drafter(
        chosen.draft_model,
        chosen.kind,
        chosen.options,
        target,
        name_from=chosen.draft_model_from,
        kind_from=chosen.kind_from,
    )
    if choice is None:
        raise refuse_idle("no drafter", how_to_draft(target))
    usual = resolve_block_size(None, choice.card, choice.kind).L
    return max(usual, min(FEWEST_WIDEST, choice.card.max_block_size or FEWEST_WIDEST))


def refuse_idle(found: str, step: str) -> RefusedError:
    """The error for a pair with nothing to tune."""
    return RefusedError("tune", found=found, expected="a pair that speculates", next_step=step, code="R31")


def forget(pair: Pair) -> None:
    """Drop what runs of the pair left on this machine, and say what that was."""
    from ..costs import forget_costs
    from ..tuned import forget_tuned, read_tuned

    tuned = read_tuned(pair.key)
    gone = []
    if forget_tuned(pair.key):
        gone.append(f"block size L={tuned.block_size}" if tuned is not None else "a block size of no use")
    costs = forget_costs(pair.key)
    if costs is not None:
        of = [f"K={', '.join(map(str, ks))}{f' with {rows} rows' if rows > 1 else ''}" for rows, ks in costs.items()]
        gone.append(f"costs and acceptance of rounds at {'; '.join(of)}" if of else "costs of no use")
    note(f"forgotten for this pair on this machine: {', '.join(gone) or 'nothing'}")


def run(pair: Pair, values: dict[str, Any], chosen: PairOptions) -> dict[str, Any]:
    """Warm up, measure every width, profile; the document."""
    from ..benchmark import machine, method, tune

    context: dict[str, Any] = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["spec", *sys.argv[1:]]),
    }
    if not pair.plan.active or pair.plan.block_size < 2:
        raise refuse_idle(f"speculation off ({pair.plan.reason})", "See spec pair")
    for line in pair.plan.notes:
        note(f"note: {line}")
    plan = make_plan(values, chosen, pair.plan.block_size)
    settle(pair)
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
    with progress("timing the phases of rounds") as steps:
        phases = tune.profile(pair, plan, trials, steps.describe)
    context["load_average_after"] = machine.load_average()
    return tune.tune_document(plan, trials, runs, warm, phases, context)


def make_plan(values: dict[str, Any], chosen: PairOptions, widest: int) -> BenchPlan:
    """The plan these options ask for, over every width up to `widest`."""
    from ..benchmark.method import BenchPlan
    from ..benchmark.tune import width_arms
    from ..sampling import Sampling

    given = {"temperature": values["temperature"], "seed": values["seed"], "acceptance": chosen.acceptance}
    workloads = [bundled(name) for name in dict.fromkeys(values["workloads"])]
    if values["prompt_files"]:
        workloads.append(from_files(values["prompt_files"]))
    return BenchPlan(
        arms=width_arms(widest),
        workloads=tuple(workloads or [bundled(name) for name in DEFAULT_WORKLOADS]),
        pairs=values["pairs"],
        max_tokens=values["max_tokens"],
        sampling=Sampling.from_mapping(given),
        template=not values["no_chat_template"],
    )


def refuse_bad(doc: dict[str, Any]) -> None:
    """RefusedError when nothing can be concluded: plain is void, or a proven pair replied differently."""
    from ..benchmark.report import EXACT

    different = bool(doc["differences"]) and doc["pair"]["exactness"] in EXACT
    if not (doc["plain_void"] or different):
        return
    first = doc["differences"][0] if different else {}
    raise RefusedError(
        "tune",
        found=f"{first['arm']} and plain replies that differ on {first['workload']} {first['trial']}"
        if different
        else f"a plain run that is void ({doc['plain_void']})",
        expected="every run on the path of its arm, and equal replies",
        next_step="Run spec probe, and report this with its JSON; nothing was stored",
        code="R30",
    )


def store(pair: Pair, doc: dict[str, Any]) -> str:
    """Keep the choice, or remove an earlier one that loses now; says what was done, in words."""
    from ..tuned import Tuned, forget_tuned, read_tuned, write_tuned

    best = next((width for width in doc["sweep"] if width["block_size"] == doc["chosen"]), None)
    if best is None:
        earlier = read_tuned(pair.key)
        again = next((w for w in doc["sweep"] if earlier and w["block_size"] == earlier.block_size), None)
        if earlier is not None and (again is None or not (again["loses"] or again["void"])):
            return f"L={earlier.block_size} as before, since these runs do not decide about it"
        return "removed an earlier choice" if forget_tuned(pair.key) else "nothing"
    kept = write_tuned(pair.key, Tuned(best["block_size"], best["gain"], doc["started"]))
    return f"L={best['block_size']}" if kept else "not possible, see the warning"


def save(doc: dict[str, Any], folder: Path) -> None:
    """Write tune.json and, where matplotlib is installed, tune.png."""
    from ..benchmark import plot, plot_tune
    from ..benchmark.report import to_json, write_file

    write_file(folder / "tune.json", (to_json(doc) + "\n").encode())
    note(f"wrote {folder / 'tune.json'}")
    if not plot.available():
        note(plot.MISSING)
        return
    write_file(folder / "tune.png", plot_tune.draw(doc))
    note(f"wrote {folder / 'tune.png'}")


def show(doc: dict[str, Any], as_json: bool) -> None:
    """The document, or the sweep and what became of it."""
    from ..benchmark.report import to_json
    from ..benchmark.tune import COLUMNS, PAIRED, table

    if as_json:
        print(to_json(doc))
        return
    names = ", ".join(dict.fromkeys(trial["workload"] for trial in doc["prompts"]))
    runs = f"{doc['method']['pairs']} alternating runs of {doc['method']['max_tokens']} tokens on each of {names}"
    print_table(COLUMNS, table(doc), f"{runs}; {PAIRED}")
    for width in doc["sweep"]:
        if width["void"]:
            print(f"VOID L={width['block_size']}: {width['void']}")
    if not doc["method"]["warm_up"]["settled"]:
        print("note: the speed had not settled after the warm-up; something else keeps this machine busy")
    if doc["chosen"] is None:
        print(f"no width beats plain decoding beyond noise; stored: {doc['stored']}")
    else:
        print(f"best: L={doc['chosen']} ({doc['chosen'] - 1} drafted tokens); stored: {doc['stored']}")
        if doc["chosen"] == max(width["block_size"] for width in doc["sweep"]):
            print("note: no wider one was tried; a larger --draft-block-size, if drafter and probe allow it, may win")
