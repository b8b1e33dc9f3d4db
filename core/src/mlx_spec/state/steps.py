"""When a step that appends to a state starts, if it follows from another one that may still run.

MLX keeps what an operation reads until it has run. A step that is started behind one that runs therefore finds the K/V
held by somebody else, and writes into a copy of all of them instead of in place. On the CPU the copies cost more than
the device's waiting for the host: a step of a model of 135M parameters with 1,100 positions takes 5.7 ms in place of
7.8 in bfloat16, 8.7 in place of 14.9 in float32. So there a step starts when the one before it has run, unless
the states are small. A GPU has more to lose by waiting, and copies fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

COPIED = 1 << 20  # bytes that are copied without anybody waiting: that takes some 0.1 ms, as a wait does


def steps_in_turn(held: int) -> bool:
    """Whether a step that writes into states of `held` bytes starts only when the one before it has run."""
    return held > COPIED and bool(mx.default_device() == mx.Device(mx.cpu))


def start_step(results: Sequence[mx.array], before: Sequence[mx.array], held: int) -> None:
    """Have the device compute `results` of a step; on the CPU once those of the step `before` are there.

    The step itself has been built by then, so the device waits for no more than that it is handed over.

    held: bytes of the states the step writes into; where they are few nobody waits.
    """
    if before and steps_in_turn(held):
        mx.eval(*before)
    mx.async_eval(*results)


def await_readers(readers: Sequence[mx.array], read: int) -> None:
    """Wait for operations that read K/V of `read` bytes, if the next step that writes into them has to."""
    if steps_in_turn(read):
        mx.eval(*readers)
