"""The gated delta rule as one GPU kernel for all steps of a run, and one for a replay.

The bodies are in `shaders/`, for Metal and for CUDA, and are built when they are first needed. No device was at
hand when they were written: the tests compile them for the CPU and compare them with the rule in plain MLX
(core/tests/emulated.py). So a device tries them before a model relies on them (`tried`), and a pair is proven
by the probe before it drafts, as everywhere.
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


@cache
def tried() -> tuple[bool, str]:
    """(True, device) when a small run on this device agrees with plain MLX, else (False, what went wrong)."""
    device = device_kind()
    try:
        wrong = _disagreement()
    except Exception as error:  # a compiler's complaint, a driver's: plain MLX runs instead
        return False, f"gated-delta on {device}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return (False, f"gated-delta on {device}: {wrong}") if wrong else (True, device)


def _disagreement() -> str:
    """What differs between kernel and plain MLX on two rows of three steps; "" when nothing does."""
    B, L, Hk, Hv, Dk, Dv = 2, 3, 1, 2, 64, 6
    keys = mx.random.split(mx.random.key(0), 6)
    q, k = (mx.random.normal((B, L, Hk, Dk), key=key) / Dk**0.5 for key in keys[:2])
    v, state = mx.random.normal((B, L, Hv, Dv), key=keys[2]), mx.random.normal((B, Hv, Dv, Dk), key=keys[3])
    g, beta = (mx.random.uniform(0.2, 1.0, (B, L, Hv), key=key) for key in keys[4:])
    ours, plain = KernelGatedDelta(), GatedDelta()
    for found, expected in zip(ours(q, k, v, g, beta, state), plain(q, k, v, g, beta, state), strict=True):
        if not mx.allclose(found, expected, rtol=0, atol=1e-4).item():
            return "another result than plain MLX's"
    delta = ours(q, k, v, g, beta, state)[2]
    kept = ours.replay(state, k, g, delta, mx.array([2, 2], dtype=mx.int32))
    _, ran, _ = ours(q[:, :2], k[:, :2], v[:, :2], g[:, :2], beta[:, :2], state)
    return "" if mx.array_equal(kept, ran).item() else "a replay that differs from a run"


def swap_gated_delta(module: nn.Module) -> nn.Module | None:
    """The kernel's module in the place of core's plain one; None for everything else."""
    return KernelGatedDelta() if type(module) is GatedDelta else None


__all__ = ["KernelGatedDelta", "swap_gated_delta", "tried"]
