"""K/V stored quantised, 4 or 8 bit, in groups along the head dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx

from ..errors import LoadError, UsageError
from .kv import KVState
from .registry import register_state
from .view import KVView
from .window import WindowState

BITS = (4, 8)
GROUP_SIZES = (32, 64, 128)


def check_quantisation(bits: object, group_size: object) -> None:
    """Raise UsageError for bits or a group size that MLX does not have."""
    if type(bits) is not int or bits not in BITS:
        raise UsageError(
            "KV bits",
            found=repr(bits),
            expected=" or ".join(map(str, BITS)),
            next_step="Choose one of them",
            code="U27",
        )
    if type(group_size) is not int or group_size not in GROUP_SIZES:
        raise UsageError(
            "KV group size",
            found=repr(group_size),
            expected=" or ".join(map(str, GROUP_SIZES)),
            next_step="Choose one of them",
            code="U28",
        )


class _Quantised(KVState):
    """Storage as triples (packed uint32, scales, biases) for K and for V.

    Groups never cross a position, so lowering a length never touches the groups of rows that stay.
    `bits` and `group_size` are what sends mlx-lm's attention down its quantised path.
    """

    PARTS: ClassVar[tuple[str, ...]] = tuple(
        f"{side}.{part}" for side in ("keys", "values") for part in ("packed", "scales", "biases")
    )
    DENSE: ClassVar[bool] = False
    bits: int
    group_size: int

    def _quantise_as(self, bits: int, group_size: int) -> None:
        check_quantisation(bits, group_size)
        self.bits, self.group_size = bits, group_size

    def _encode(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        for name, part in (("key", keys), ("value", values)):
            if part.shape[-1] % self.group_size:
                raise LoadError(
                    f"KV group size for a {name} head",
                    found=f"{self.group_size} with a head of {part.shape[-1]}",
                    expected="a divisor of the head size",
                    next_step=_smaller(part.shape[-1]),
                    code="L33",
                )
        return [a for part in (keys, values) for a in mx.quantize(part, group_size=self.group_size, bits=self.bits)]

    def _decode(self, arrays: Sequence[mx.array]) -> tuple[Any, Any]:
        return tuple(arrays[:3]), tuple(arrays[3:])

    def _view(self, lo: int, bits: int | None = None, group_size: int | None = None) -> KVView:
        return super()._view(lo, self.bits, self.group_size)


def _smaller(width: int) -> str:
    """What to do when a head of `width` does not split into the groups asked for."""
    fits = [str(size) for size in GROUP_SIZES if width % size == 0]
    return f"Choose {' or '.join(fits)}, or leave K/V unquantised" if fits else "Leave K/V of this model unquantised"


@register_state("kv-quantised")
class QuantisedKVState(_Quantised):
    """Full attention over quantised K/V; at B = 1, L = 1 byte for byte mlx-lm's `QuantizedKVCache`."""

    def __init__(self, bits: int = 8, group_size: int = 64, batch: int = 1):
        super().__init__(batch)
        self._quantise_as(bits, group_size)

    def _settings(self) -> dict[str, Any]:
        return {"bits": self.bits, "group_size": self.group_size}


@register_state("window-quantised")
class QuantisedWindowState(_Quantised, WindowState):
    """Sliding-window attention over quantised K/V; mlx-lm has no counterpart."""

    def __init__(
        self,
        window: int,
        bits: int = 8,
        group_size: int = 64,
        max_width: int = 64,
        batch: int = 1,
        align: int | None = None,
    ):
        WindowState.__init__(self, window, max_width, batch, align)
        self._quantise_as(bits, group_size)

    def _settings(self) -> dict[str, Any]:
        return {**WindowState._settings(self), "bits": self.bits, "group_size": self.group_size}
