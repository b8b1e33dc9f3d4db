"""Kernels core itself brings, as records; what builds them is imported when it is first needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .registry import Kernel


def build_gated_delta() -> Callable[..., Any]:
    """function(q, k, v, g, beta, state) -> (y, state, delta)."""
    from .gated_delta_gpu import KernelGatedDelta

    return KernelGatedDelta()


def gated_delta(*given: Any) -> Any:
    """The gated delta rule in plain mlx operations: (y, state, delta)."""
    from .gated_delta import GatedDelta

    return GatedDelta()(*given)


def swap_gated_delta(module: Any) -> Any | None:
    """Core's gated delta rule."""
    from .gated_delta_gpu import swap_gated_delta as swap

    return swap(module)


def ready() -> tuple[bool, str]:
    """Tried on this device before a model relies on it."""
    from .gated_delta_gpu import tried

    return tried()


GATED_DELTA = Kernel("gated-delta", ("metal", "cuda"), "1e-5", build_gated_delta, gated_delta, swap_gated_delta, ready)
