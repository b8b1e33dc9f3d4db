"""Read-only access to a state's K/V, for drafters that attend to what the target has stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class KVView:
    """The stored K/V of B rows; hold it no longer than one propose, or the next append has to copy.

    Attributes:
        keys, values: (B, Hkv, T, Dk/Dv), or quantised triples (packed, scales, biases) of that T.
        origin: position of physical key 0 per row (B,).
        lengths: positions held per row (B,); physical keys at or past lengths[b] - origin[b] mean nothing.
        bits, group_size: of quantised K/V, else None. The names are the ones mlx-lm's attention looks for.
    """

    keys: Any
    values: Any
    origin: tuple[int, ...]
    lengths: tuple[int, ...]
    bits: int | None = None
    group_size: int | None = None

    @property
    def size(self) -> int:
        """T, physical keys in the slice."""
        keys = self.keys[0] if self.bits is not None else self.keys
        return int(keys.shape[2])


def visible_mask(view: KVView, positions: Sequence[int], window: int | None = None) -> mx.array | None:
    """Which stored keys a query at positions[b] sees: bool (B, 1, 1, T), or None when it is all of them.

    Key j of row b sits at origin[b] + j. It is seen when it is below lengths[b], not after the query and,
    with `window`, less than `window` positions before it.
    """
    spans = [_span(view, b, p, window) for b, p in enumerate(positions)]
    if all(span == (0, view.size) for span in spans):
        return None
    low = mx.array([lo for lo, _ in spans])[:, None, None, None]
    high = mx.array([hi for _, hi in spans])[:, None, None, None]
    index = mx.arange(view.size)
    return (index >= low) & (index < high)


def narrow(view: KVView, positions: Sequence[int], window: int | None = None) -> KVView:
    """The same view without the leading and trailing keys that no row's query sees.

    For one row, or rows in step, nothing hidden is left, so `visible_mask` of the result is None.
    """
    spans = [_span(view, b, p, window) for b, p in enumerate(positions)]
    lo, hi = min(s[0] for s in spans), max(s[1] for s in spans)
    if (lo, hi) == (0, view.size):
        return view
    return replace(
        view,
        keys=_cut(view.keys, lo, hi),
        values=_cut(view.values, lo, hi),
        origin=tuple(o + lo for o in view.origin),
    )


def _span(view: KVView, row: int, position: int, window: int | None) -> tuple[int, int]:
    """Physical keys lo..hi of `row` that a query at `position` sees."""
    origin = view.origin[row]
    first = origin if window is None else max(origin, position - window + 1)
    last = min(view.lengths[row], position + 1)
    return first - origin, max(first, last) - origin


def _cut(part: Any, lo: int, hi: int) -> Any:
    if isinstance(part, mx.array):
        return part[..., lo:hi, :]
    return tuple(p[..., lo:hi, :] for p in part)
