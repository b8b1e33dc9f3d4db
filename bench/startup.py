"""What starting costs: imports, the light commands, and one hook call.

    python bench/startup.py [--runs 15] [--json]

Each command runs in a process of its own; a warm-up run fills the file cache, then medians and every raw run
are printed. The cost of a bare interpreter is measured alongside, since it is part of every figure.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Sequence

BUDGETS_MS = {"import mlx_spec": 50.0, "spec --help": 300.0}
COMMANDS = {
    "bare interpreter": ["-c", "pass"],
    "import mlx_spec": ["-c", "import mlx_spec"],
    "spec --help": ["-m", "mlx_spec", "--help"],
    "spec plugins": ["-m", "mlx_spec", "plugins"],
    "import mlx.core": ["-c", "import mlx.core"],
    "import mlx_lm": ["-c", "import mlx_lm"],
}


def run_ms(arguments: Sequence[str]) -> float:
    """Wall time of one interpreter run, in milliseconds."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - start) * 1e3


def hook_call_us(plugins: int, calls: int = 20_000) -> float:
    """Microseconds of one owner-bound spec_propose with that many other plugins installed; best of five."""
    from mlx_spec import hookimpl
    from mlx_spec.discovery import EntryRecord
    from mlx_spec.plugins import PluginManager

    def load(name: str) -> types.ModuleType:
        def spec_propose(lane: object, budget: object) -> object:
            return budget

        module = types.ModuleType(name)
        module.spec_propose = hookimpl(spec_propose)  # type: ignore[attr-defined]
        return module

    names = [f"p{i}" for i in range(plugins + 1)]
    entries = [EntryRecord(name, name, "0", name, load=lambda name=name: load(name)) for name in names]
    call = PluginManager(entries).owner_call("spec_propose", "p0")
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            call(lane=None, budget=1)
        best = min(best, time.perf_counter() - start)
    return best / calls * 1e6


def measure(runs: int) -> dict[str, object]:
    """All figures; runs alternate over the commands, so that a slow minute touches each of them."""
    raw: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(runs + 1):
        for name, arguments in COMMANDS.items():
            elapsed = run_ms(arguments)
            if turn:  # the first turn warms the file cache
                raw[name].append(round(elapsed, 1))
    return {
        "machine": {"system": platform.platform(), "python": platform.python_version()},
        "runs": runs,
        "raw_ms": raw,
        "median_ms": {name: round(statistics.median(values), 1) for name, values in raw.items()},
        "hook_call_us": {f"{n} other plugins": round(hook_call_us(n), 2) for n in (0, 6)},
    }


def main() -> int:
    """Print the figures; exit 1 when a budget is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.runs)
    medians: dict[str, float] = found["median_ms"]  # type: ignore[assignment]
    bare = medians["bare interpreter"]
    # An import is charged what it adds to a bare interpreter, a command all that a person waits.
    cost = {"import mlx_spec": medians["import mlx_spec"] - bare, "spec --help": medians["spec --help"]}
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in medians.items():
            print(f"{name:18} {value:8.1f} ms   +{value - bare:7.1f} ms over a bare interpreter")
        for name, value in found["hook_call_us"].items():  # type: ignore[attr-defined]
            print(f"one hook call      {value:8.2f} us   with {name}")
    missed = [name for name in cost if cost[name] > BUDGETS_MS[name]]
    for name in missed:
        print(f"budget missed: {name}: {cost[name]:.1f} ms, budget {BUDGETS_MS[name]:.0f} ms", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
