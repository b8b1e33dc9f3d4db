"""What arithmetic costs here, in a second or two: memory, and a layer with kernels and without.

Both are read from memory: what is timed goes round through more bytes than a cache keeps, as a model's weights do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

from .cores import usable_cores

if TYPE_CHECKING:
    from .kernels import Swap

SIZE = 2048  # the layer is SIZE x SIZE
ROWS = (1, 4)  # a plain step, and a block of a round
BUDGET = 0.12  # seconds for one timing
MEBIBYTES = 128  # of memory that are read in turn, by the read rate and by the layers
BITS, GROUP = 4, 64
BYTES = SIZE * SIZE * BITS // 8 + 4 * SIZE * SIZE // GROUP  # codes of a layer, and the scale and bias of each group


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Milliseconds of one 4-bit layer of SIZE x SIZE for each of ROWS."""

    ms: tuple[float, ...]

    @property
    def ms_per_billion(self) -> float:
        """A token's share of every billion 4-bit weights, when each is read as quickly."""
        return self.ms[0] * 1e9 / SIZE**2

    @property
    def read_rate(self) -> float:
        """Bytes of weights a second that a plain step gets through; at most what memory gives."""
        return BYTES / (self.ms[0] / 1e3)


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
    """The time of a 4-bit layer, after the kernels of `swaps` took the place of mlx's own operations.

    Every run has another layer of a ring, so that none finds its weights in a cache.
    """
    import mlx.core as mx

    ring = cycle(_layers(swaps))
    inputs = [mx.ones((rows, SIZE), dtype=mx.bfloat16) for rows in ROWS]
    mx.eval(inputs)
    return LayerTime(tuple(_median(partial(_run, ring, x)) * 1e3 for x in inputs))


def _layers(swaps: Sequence[Swap]) -> list[Any]:
    """Layers of SIZE x SIZE, MEBIBYTES of them; all hold the same values, each in memory of its own."""
    import mlx.core as mx
    from mlx import nn

    from .kernels import swap_modules

    first: Any = nn.QuantizedLinear(SIZE, SIZE, bias=False, group_size=GROUP, bits=BITS)
    first.set_dtype(mx.bfloat16)
    layers = []
    for _ in range(-((-MEBIBYTES << 20) // BYTES)):
        layer: Any = nn.QuantizedLinear(GROUP, GROUP, bias=False, group_size=GROUP, bits=BITS)
        layer.update({name: value + mx.zeros_like(value) for name, value in first.parameters().items()})
        for swap in swaps:
            layer, _ = swap_modules(layer, swap)
        layers.append(layer)
    mx.eval([layer.parameters() for layer in layers])
    return layers


def _run(ring: Iterator[Any], x: Any) -> None:
    import mlx.core as mx

    mx.eval(next(ring)(x))


def _median(work: Callable[[], object]) -> float:
    """Median seconds of as many runs as BUDGET has room for, after one that is not counted."""
    work()
    times: list[float] = []
    end = time.perf_counter() + BUDGET
    while len(times) < 3 or (len(times) < 999 and time.perf_counter() < end):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
