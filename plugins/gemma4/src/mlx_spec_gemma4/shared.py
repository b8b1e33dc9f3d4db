"""The target's keys and values as the assistant's layers read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_spec.state import Room, narrow, visible_mask

if TYPE_CHECKING:
    from mlx_spec.state import KVView


@dataclass(frozen=True, slots=True)
class SharedKV:
    """What one layer type attends to: a view cut to what is visible, and a mask when rows differ."""

    view: KVView
    mask: mx.array | None

    @classmethod
    def of(cls, view: KVView, positions: Sequence[int], window: int | None) -> SharedKV:
        """Every committed key for full layers, those within `window` of positions[b] for sliding ones."""
        # visible_mask also hides keys after the query, and there are none: all keys are below n
        seen = narrow(view, positions, window)
        mask = visible_mask(seen, positions, window)
        if mask is not None and 0 in view.lengths:
            # a row without keys drafts nothing, but softmax over nothing is NaN: let it see one zero key
            mask = mask | mx.array([n == 0 for n in view.lengths])[:, None, None, None]
        return cls(seen, mask)


class TargetKV:
    """The target's K/V as the positions of one draft see them, by layer type; made when first asked for.

    Args:
        states: the target's states.
        sources: layer type -> index of the state that is read.
        positions: of the queries (B,).
        windows: layer type -> keys a query sees, None for all.
    """

    def __init__(
        self,
        states: Sequence[Any],
        sources: Mapping[Any, int],
        positions: Sequence[int],
        windows: Mapping[Any, int | None],
    ):
        self._states = {kind: states[source] for kind, source in sources.items()}
        self._positions, self._windows = positions, windows
        self._seen: dict[str, SharedKV] = {}
        self._lent: list[Room | None] | None = None

    def __getitem__(self, kind: str) -> SharedKV:
        """What layers of this type attend to."""
        if kind not in self._seen:
            self._seen[kind] = SharedKV.of(self._states[kind].view(), self._positions, self._windows[kind])
        return self._seen[kind]

    def lent(self) -> list[Room | None]:
        """Storage per layer type, in the order of `sources`; None where it cannot be read as it lies."""
        if self._lent is None:
            lend = [(getattr(state, "lent", None), self._windows[kind]) for kind, state in self._states.items()]
            self._lent = [None if ask is None else ask(self._positions[0], window) for ask, window in lend]
        return self._lent
