"""CPU kernels against what this machine can do at all, and against mlx's own operations.

    python bench/kernels.py [--runs 7] [--quick] [--save]

The limit of a linear layer is the larger of its bytes of weights over the read bandwidth and its multiply-adds
over the rate of float32 multiply-adds. Both rates are measured by the same threads right before and right after a
layer, the best of fourteen passes; a rate from another minute says little on a machine that others use too. bfloat16
products in pairs are twice as fast as float32 ones where a processor has them: there a layer can be below its limit.
Every layer is run over copies that do not fit into the caches together, ours and mlx's in turns, and the medians are
compared. Goal: quantised layers of 1 to 8 rows within 1.5x of the limit. MLX_SPEC_ACTIVATIONS is heeded.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from common import finish, parser

from mlx_spec_cpu.native import library

GOAL = 1.5
SLOW = 0.2  # seconds a call
ROWS = (1, 2, 4, 8)
SIZES = ((2048, 2048), (4096, 4096), (8192, 8192))
CACHES = 96 << 20  # bytes of weights that no cache of this class of machine holds
LAYOUTS = {"4 bit": ("affine", 4, 64), "8 bit": ("affine", 8, 64), "bfloat16": ("dense", 0, 0)}


def main() -> int:
    """Measure; exit 1 when a quantised layer of few rows misses the goal."""
    arguments = parser(__doc__, "kernels", runs=7)
    arguments.add_argument("--quick", action="store_true", help="the smallest size alone, without mlx's side")
    options = arguments.parse_args()
    native = library()
    figures: dict[str, Any] = {"kernels": native.kernels(), "threads": native.threads(), "layers": [], "prefill": []}
    for size in SIZES[: 1 if options.quick else None]:
        for layout in LAYOUTS:
            figures["layers"] += layer(native, layout, size, ROWS, options)
    figures["prefill"] = layer(native, "4 bit", SIZES[0], (64, 512), options)
    figures["rates"] = {
        name: statistics.median(row["rates"][name] for row in figures["layers"]) for name in ("read", "multiply_add")
    }
    for row in (*figures["layers"], *figures["prefill"]):
        rates = row["rates"]
        row["limit_ms"] = 1e3 * max(row["bytes"] / rates["read"], row["macs"] / rates["multiply_add"])
        row["to_limit"] = row["ms"] / row["limit_ms"]
    figures["missed"] = [row for row in figures["layers"] if "bit" in row["layout"] and row["to_limit"] > GOAL]
    show(figures)
    finish("_".join(["kernels", *native.kernels().split()[1:]]), options, figures)
    return 1 if figures["missed"] else 0


def measure_rates(native: Any) -> dict[str, float]:
    """Bytes and multiply-adds a second, by the threads the kernels use."""
    return {"read": native.read_rate(256), "multiply_add": native.multiply_add_rate()}


def layer(native: Any, layout: str, size: tuple[int, int], rows: Sequence[int], options: Any) -> list[dict[str, Any]]:
    """One layer over several numbers of rows."""
    mode, bits, group = LAYOUTS[layout]
    N, K = size
    weight = mx.random.normal((N, K)).astype(mx.bfloat16)
    packed = [weight] if mode == "dense" else list(mx.quantize(weight, group, bits))
    size_of_one = sum(a.nbytes for a in packed)
    copies = [[mx.array(a) + mx.array(0, a.dtype) for a in packed] for _ in range(CACHES // size_of_one + 1)]
    mx.eval(copies)
    found = []
    before = measure_rates(native)
    for M in rows:
        x = mx.random.normal((M, K)).astype(mx.bfloat16)
        ours = timer(lambda given, x=x: native.linear(x, *given, mode=mode, group_size=group, bits=bits), copies)
        few = copies[: max(1, len(copies) // 16)]
        theirs = None if options.quick or M > 8 else timer(lambda given, x=x: stock(x, given, group, bits), few)
        seconds, stock_seconds = in_turns(ours, theirs, options.runs)
        row = {"layout": layout, "size": [N, K], "rows": M, "bytes": size_of_one, "macs": M * N * K}
        row |= {"ms": 1e3 * seconds, "mlx_ms": stock_seconds and 1e3 * stock_seconds}
        after = measure_rates(native)
        row["rates"] = {name: max(value, after[name]) for name, value in before.items()}
        before = after
        found.append(row)
    return found


def stock(x: mx.array, given: Sequence[mx.array], group: int, bits: int) -> mx.array:
    """mlx's own operation."""
    return x @ given[0].T if len(given) == 1 else mx.quantized_matmul(x, *given, group_size=group, bits=bits)


def timer(call: Callable[[Any], mx.array], copies: Sequence[Any]) -> Callable[[], float]:
    """function() -> seconds of one call, over all copies."""

    def run() -> float:
        start = time.perf_counter()
        mx.eval([call(given) for given in copies])
        return (time.perf_counter() - start) / len(copies)

    return run


def in_turns(ours: Callable[[], float], theirs: Callable[[], float] | None, runs: int) -> tuple[float, float | None]:
    """Medians of both sides, run in turns; the first turn warms up, a side slower than SLOW runs once."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(runs + 1):
        for side, run in enumerate((ours, theirs)):
            enough = side == 1 and (turn >= 4 or sum(seconds[1]) > SLOW)
            if run is not None and not enough:
                seconds[side].append(run())
    middle = [statistics.median(taken[1:] or taken) if taken else None for taken in seconds]
    return middle[0] or 0.0, middle[1]


def show(figures: dict[str, Any]) -> None:
    """Rates, then a line per layer."""
    rates = figures["rates"]
    print(
        f"{figures['kernels']} on {figures['threads']} threads, medians: {rates['read'] / 1e9:.1f} GB/s read, ", end=""
    )
    print(f"{rates['multiply_add'] / 1e9:.0f} G multiply-adds/s")
    for row in [*figures["layers"], *figures["prefill"]]:
        stock_text = (
            "" if row["mlx_ms"] is None else f"  mlx {row['mlx_ms']:8.2f} ms ({row['mlx_ms'] / row['ms']:.0f}x)"
        )
        print(
            f"{row['layout']:9} {row['size'][0]}x{row['size'][1]} rows {row['rows']:3}: {row['ms']:8.3f} ms, "
            f"limit {row['limit_ms']:7.3f} ms ({row['to_limit']:.2f}x){stock_text}"
        )
    missed = len(figures["missed"])
    print(f"goal of {GOAL}x: " + (f"{missed} quantised layers miss it" if missed else "met"))


if __name__ == "__main__":
    sys.exit(main())
