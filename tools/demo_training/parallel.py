"""Data-parallel training in one process per core.

On small matrices that beats threads inside each operation.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from .layers import Linear


def launch(worker: Callable[..., None], processes: int, *args: Any) -> None:
    """Run worker(*args) in `processes` processes with one thread each, or here when it is one process."""
    if processes == 1:
        worker(*args)
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as meeting:
        mp.spawn(_enter, args=(worker, processes, f"file://{meeting}/store", Linear.compute, args), nprocs=processes)


def _enter(index: int, worker: Callable[..., None], processes: int, store: str, compute: Any, args: Any) -> None:
    torch.set_num_threads(1)
    Linear.compute = compute
    dist.init_process_group("gloo", init_method=store, rank=index, world_size=processes)
    worker(*args)
    dist.destroy_process_group()


def rank() -> int:
    """This process's number; 0 does the printing and saving."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def average_gradients(model: nn.Module) -> None:
    """Replace every gradient by its mean over the processes."""
    if world() == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    flat /= world()
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


class Clock:
    """Elapsed share of a fixed time, the same in all processes."""

    def __init__(self, minutes: float) -> None:
        self.minutes, self.begin = minutes, time.monotonic()

    def progress(self) -> float:
        """0 at the start, 1 or more when the time is over."""
        passed = torch.tensor([(time.monotonic() - self.begin) / 60 / self.minutes], dtype=torch.float64)
        if world() > 1:
            dist.broadcast(passed, src=0)
        return float(passed)
