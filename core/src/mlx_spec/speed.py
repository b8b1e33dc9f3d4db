"""What arithmetic costs here, in about a second: memory, and a layer with kernels and without."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from .cores import usable_cores

if TYPE_CHECKING:
    from .kernels import Swap

SIZE = 2048  # the layer is SIZE x SIZE
ROWS = (1, 4)  # a plain step, and a block of a round
BUDGET = 0.12  # seconds for one timing
MEBIBYTES = 64


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Milliseconds of one 4-bit layer of SIZE x SIZE for each of ROWS."""

    ms: tuple[float, ...]

    @property
    def ms_per_billion(self) -> float:
        """A token's share of every billion 4-bit weights, when each is read as quickly."""
        return self.ms[0] * 1e9 / SIZE**2


def read_rate() -> float:
    """Bytes a second that this process reads from memory on all its cores."""
    import numpy as np

    data = np.ones(MEBIBYTES << 17, dtype=np.int64)
    cores = usable_cores()
    parts = np.array_split(data, cores)
    with ThreadPoolExecutor(cores) as pool:
        seconds = _median(lambda: list(pool.map(np.max, parts)))
    return data.nbytes / seconds


def layer_time(swaps: Sequence[Swap] = ()) -> LayerTime:
    """The time of a 4-bit layer, after the kernels of `swaps` took the place of mlx's own operations."""
    import mlx.core as mx
    from mlx import nn

    from .kernels import swap_modules

    layer: Any = nn.QuantizedLinear(SIZE, SIZE, bias=False, group_size=64, bits=4)
    layer.set_dtype(mx.bfloat16)
    for swap in swaps:
        layer, _ = swap_modules(layer, swap)
    inputs = [mx.ones((rows, SIZE), dtype=mx.bfloat16) for rows in ROWS]
    mx.eval(layer.parameters(), inputs)
    return LayerTime(tuple(_median(partial(_run, layer, x)) * 1e3 for x in inputs))


def _run(layer: Any, x: Any) -> None:
    import mlx.core as mx

    mx.eval(layer(x))


def _median(work: Callable[[], object]) -> float:
    """Median seconds of as many runs as BUDGET has room for, after one that is not counted."""
    work()
    times: list[float] = []
    end = time.perf_counter() + BUDGET
    while len(times) < 3 or (len(times) < 99 and time.perf_counter() < end):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
