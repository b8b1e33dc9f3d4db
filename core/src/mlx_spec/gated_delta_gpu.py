"""The gated delta rule as one GPU kernel for all steps of a run, and one for a replay.

The bodies are in `shaders/`, for Metal and for CUDA, and are built when they are first needed. No device was at
hand when they were written: they are compiled for the CPU and compared with the rule in plain MLX there
(core/tests/emulated.py); a pair on a GPU is proven by the probe before it drafts, as everywhere.
"""

# mypy: disable-error-code="misc, no-any-return"
# mlx.nn is untyped to mypy: its classes and calls are Any.

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .gated_delta import GatedDelta
from .kernels import device_kind

SHADERS = Path(__file__).parent / "shaders"
INPUTS = {
    "gated_delta": ["q", "k", "v", "g", "beta", "state"],
    "gated_delta_replay": ["state", "k", "g", "delta", "keep"],
}
OUTPUTS = {"gated_delta": ["y", "after", "delta"], "gated_delta_replay": ["after"]}
UNFUSED = "#pragma METAL fp contract(off)\n"
LANES, ROWS = 32, 4
"""Threads that share a row of the state, and rows per threadgroup."""


class KernelGatedDelta(GatedDelta):
    """`GatedDelta` on the device's kernel; what the kernel does not take runs in plain MLX.

    The state has the bytes of the rule in plain MLX for equal deltas; sums over a key are added in another
    order, which depends neither on L nor on B.
    """

    def __call__(
        self, q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        """As GatedDelta: (y, state after the last step, delta)."""
        if k.shape[-1] % LANES or any(x.dtype != v.dtype for x in (q, k, beta)):
            return super().__call__(q, k, v, g, beta, state)
        return tuple(
            kernel("gated_delta")(
                inputs=[q, k, v, g.astype(mx.float32), beta, state],
                template=_template(k, v.shape[2], v.shape[3]),
                grid=(LANES, v.shape[3], v.shape[0] * v.shape[2]),
                threadgroup=(LANES, ROWS, 1),
                output_shapes=[v.shape, state.shape, v.shape],
                output_dtypes=[v.dtype, mx.float32, mx.float32],
            )
        )

    def replay(self, state: mx.array, k: mx.array, g: mx.array, delta: mx.array, keep: mx.array) -> mx.array:
        """As GatedDelta: the state after the first keep[b] steps of row b."""
        B, Hv, Dv, Dk = state.shape
        (after,) = kernel("gated_delta_replay")(
            inputs=[state, k, g.astype(mx.float32), delta, keep.astype(mx.int32)],
            template=_template(k, Hv, Dv),
            grid=(Dk, Dv, B * Hv),
            threadgroup=(min(Dk, LANES * ROWS), 1, 1),
            output_shapes=[state.shape],
            output_dtypes=[mx.float32],
        )
        return after


def _template(k: mx.array, value_heads: int, value_width: int) -> list[tuple[str, Any]]:
    sizes = {"Hk": k.shape[2], "Hv": value_heads, "Dk": k.shape[3], "Dv": value_width}
    return [("InT", k.dtype), *sizes.items()]


@cache
def kernel(name: str) -> Callable[..., list[mx.array]]:
    """The kernel of a body in `shaders/`, built for this machine's device."""
    if device_kind() == "metal":
        body = (SHADERS / f"{name}.metal").read_text(encoding="utf-8")
        return mx.fast.metal_kernel(name, INPUTS[name], OUTPUTS[name], body, header=UNFUSED)
    body = (SHADERS / f"{name}.cu").read_text(encoding="utf-8")
    return mx.fast.cuda_kernel(name, INPUTS[name], OUTPUTS[name], body)


def swap_gated_delta(module: nn.Module) -> nn.Module | None:
    """The kernel's module in the place of core's plain one; None for everything else."""
    return KernelGatedDelta() if type(module) is GatedDelta else None


__all__ = ["KernelGatedDelta", "swap_gated_delta"]
