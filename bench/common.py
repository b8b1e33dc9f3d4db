"""What the scripts beside this file share: which pair, which texts, how results are kept."""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_spec.benchmark.machine import describe_machine, versions
from mlx_spec.benchmark.report import to_json, write_file
from mlx_spec.benchmark.workloads import NAMES, bundled
from mlx_spec.pair import Pair

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Checkpoints:
    """Directories of one pair, and what to call it."""

    label: str
    target: Path
    drafter: Path | None


def parser(doc: str | None, name: str, **defaults: Any) -> argparse.ArgumentParser:
    """An argument parser with the options every script has; `defaults` fills tokens and runs."""
    out = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--target", type=Path, help="target directory; default: the bundled demo pair, else a tiny one")
    out.add_argument("--drafter", type=Path, help="drafter directory")
    out.add_argument("--tokens", type=int, default=defaults.get("tokens", 128), help="length of every reply")
    out.add_argument("--runs", type=int, default=defaults.get("runs", 7), help="alternations")
    out.add_argument("--save", action="store_true", help=f"write results/{name}.json")
    return out


def by_position(rounds: Sequence[tuple[int, int]]) -> list[float]:
    """Accepted / proposed by draft position, over (drafted, accepted) of rounds."""
    rates = []
    for i in range(max(drafted for drafted, _ in rounds)):
        rates.append(round(sum(a > i for _, a in rounds) / sum(d > i for d, _ in rounds), 4))
    return rates


def checkpoints(options: argparse.Namespace) -> Checkpoints:
    """The pair asked for, else the demo pair, else a tiny random one (said on stderr)."""
    if options.target is not None:
        return Checkpoints("/".join(options.target.resolve().parts[-2:]), options.target, options.drafter)
    found = demo()
    if found is None:
        print("no demo pair here: using a tiny random pair, so acceptance and gains mean nothing", file=sys.stderr)
    return found or tiny_gemma4()


def same_operations() -> None:
    """Leave every operation to mlx, as the other side of a comparison does; kernels of plugins stay out."""
    os.environ["MLX_SPEC_KERNELS"] = "off"


def demo() -> Checkpoints | None:
    """The pair bundled with the Gemma 4 plugin, None when this copy has none."""
    from mlx_spec_gemma4.plugin import DEMO

    target, drafter = DEMO / "target", DEMO / "drafter"
    found = all((folder / "config.json").exists() for folder in (target, drafter))
    return Checkpoints("demo pair", target, drafter) if found else None


def qwen35_checkpoints(options: argparse.Namespace) -> Checkpoints:
    """The Qwen checkpoint asked for, else the bundled one; without a drafter it drafts with its own head."""
    if options.target is not None:
        return Checkpoints(options.target.resolve().name, options.target, options.drafter or options.target)
    from mlx_spec_qwen35.plugin import DEMO

    return Checkpoints("qwen35 demo", DEMO, DEMO)


def scratch() -> Path:
    """An empty folder of this process, gone when it ends: by itself, by an error, by SIGTERM."""
    folder = Path(tempfile.mkdtemp(prefix="mlx-spec-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return folder


def tiny_gemma4() -> Checkpoints:
    """A random pair of the E2B shape: right for equality and overhead, useless for acceptance."""
    from mlx_spec_gemma4.tiny import write_tiny

    folder = scratch()
    write_tiny(folder, "E")
    return Checkpoints("tiny random gemma4", folder / "target", folder / "drafter")


def tiny_llama() -> Checkpoints:
    """A small random Llama in bfloat16, for core's generic target."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.llama import Model, ModelArgs

    config = {
        "model_type": "llama",
        "hidden_size": 192,
        "num_hidden_layers": 8,
        "intermediate_size": 512,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 2048,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }
    mx.random.seed(7)
    model = Model(ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    folder = scratch() / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    return Checkpoints("small random llama", folder, None)


def prompts(pair: Pair, count: int, names: Sequence[str] = NAMES) -> list[list[int]]:
    """`count` prompts from the bundled workloads, round and round; made of numbers without a tokenizer."""
    limit = pair.token_limit or pair.target.vocab_size
    if pair.tokenizer is None:
        return [[3 + (7 * i * (n + 2)) % (limit - 3) for i in range(60)] for n in range(count)]
    texts = [text for turn in range(5) for name in names for text in [bundled(name).measured[turn]]]
    return [pair.tokenizer.encode(texts[n % len(texts)]) for n in range(count)]


def ids_only(pair: Pair) -> Pair:
    """The same pair without text, so that only token ids are timed."""
    pair.tokenizer = None
    return pair


@dataclass
class Timed:
    """A reply and its clocks. `rate`: tokens after the first event, per second."""

    ids: list[int]
    first_s: float
    rate: float
    total_s: float


def timed(blocks: Iterator[Sequence[int]]) -> Timed:
    """Drain an iterator of token blocks, with the clock running from before its first step."""
    ids: list[int] = []
    times: list[float] = []
    first = 0
    started = time.perf_counter()
    for block in blocks:
        if not block:
            continue
        ids += block
        first = first or len(block)
        times.append(time.perf_counter())
    span = times[-1] - times[0]
    return Timed(ids, times[0] - started, (len(ids) - first) / span if span else 0.0, times[-1] - started)


def take_turns(arms: dict[str, Callable[[int], Timed]], runs: int, warm: int = 2) -> dict[str, list[Timed]]:
    """Run every arm per turn, in an order that reverses each time; the first `warm` turns are dropped."""
    out: dict[str, list[Timed]] = {name: [] for name in arms}
    for turn in range(-warm, runs):
        order = list(arms) if turn % 2 == 0 else list(reversed(arms))
        for name in order:
            done = arms[name](turn)
            if turn >= 0:
                out[name].append(done)
    return out


def describe(values: Sequence[float], digits: int = 3) -> dict[str, Any]:
    """Median, quartiles and every value, rounded."""
    quarters = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    rounded = [round(v, digits) for v in values]
    return {
        "median": round(statistics.median(values), digits),
        "quartiles": [round(quarters[0], digits), round(quarters[2], digits)],
        "values": rounded,
    }


def shown(spread: dict[str, Any]) -> str:
    """`1.02 (0.99-1.05)`: median and quartiles."""
    low, high = spread["quartiles"]
    return f"{spread['median']:.3g} ({low:.3g}-{high:.3g})"


def finish(name: str, options: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Print the figures as JSON; keep them when --save was given."""
    doc = {"bench": name, "tokens": options.tokens, "runs": options.runs, **figures}
    doc |= {"machine": describe_machine(), "versions": versions()}
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        write_file(RESULTS / f"{name}.json", (to_json(doc) + "\n").encode())
        print(f"wrote results/{name}.json", file=sys.stderr)
    else:
        print(to_json(doc))
