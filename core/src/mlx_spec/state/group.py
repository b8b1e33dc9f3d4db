"""All layer states of one model as the list that mlx-lm's modules expect, moved about as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..errors import LoadError, RequestError
from .base import Mark, State
from .delta import DeltaState  # noqa: F401  its name must be known before a file is read
from .files import read_state, write_state
from .kv import KVState
from .quantised import QuantisedKVState
from .registry import state_name, state_type
from .window import WindowState

if TYPE_CHECKING:
    import mlx.nn as nn


STARTING = 4  # layers with K/V a model has to have for its blocks to start early


class StateGroup(list[State]):
    """States of layers that advance together: between forwards they all hold the same lengths.

    On the CPU a layer after the first eighth of those with K/V starts a block while the rest of its forward is being
    built, since the device would wait for that. Plain decoding does not need it: its next step is built while the
    last one runs.
    """

    def __init__(self, states: Iterable[State] = ()):
        super().__init__(states)
        held = [state for state in self if isinstance(state, KVState)]
        early = len(held) >= STARTING and mx.default_device() == mx.Device(mx.cpu)
        for i, state in enumerate(held):
            state.starts = early and i == len(held) // 8

    @property
    def lengths(self) -> tuple[int, ...]:
        """Positions held per row (B,). Raises RequestError when the layers disagree."""
        self._agree("the layers of a model")
        return self[0].lengths if self else ()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return sum(state.nbytes for state in self)

    @property
    def bytes_read(self) -> int:
        """Bytes of the layers whose K/V somebody was given to read since the last mark."""
        return sum(state.nbytes for state in self if isinstance(state, KVState) and state.read)

    def arrays(self) -> list[mx.array]:
        """Every array held, for one evaluation after a prefill chunk; later steps write into them."""
        return [array for state in self for array in state.arrays()]

    def mark(self) -> Mark:
        """Mark every layer; one mark stands for all, since lengths agree."""
        lengths = self.lengths
        for state in self:
            state.mark()
        return Mark(lengths)

    def rewind(self, mark: Mark, keep: Sequence[int]) -> None:
        """Take every layer back to mark.lengths[b] + keep[b], or none of them.

        Raises ValueError, with nothing changed, when one layer cannot; RequestError when a layer says it
        went back but holds something else afterwards.
        """
        for state in self:
            state.check_rewind(mark, keep)
        for state in self:
            state.rewind(mark, keep)
        wanted = tuple(map(add, mark.lengths, keep))
        self._agree("a rewind", wanted if self else None)

    def extract(self, row: int) -> StateGroup:
        """A copy of one row (B = 1)."""
        return StateGroup(state.extract(row) for state in self)

    def select(self, rows: Sequence[int]) -> StateGroup:
        """Only these rows, in this order."""
        return StateGroup(state.select(rows) for state in self)

    @classmethod
    def merge(cls, groups: Sequence[StateGroup]) -> StateGroup:
        """One group holding the rows of all of them, in order. Raises ValueError when they do not match."""
        layers = {len(group) for group in groups}
        if len(layers) != 1:
            raise ValueError(f"merge needs groups of one number of layers, got {sorted(layers)}")
        return cls(type(column[0]).merge(column) for column in zip(*groups, strict=True))

    def to_tensors(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        """Tensors named "<layer>.<part>", and json-able meta that names each layer's kind."""
        tensors: dict[str, mx.array] = {}
        layers = []
        for i, state in enumerate(self):
            own, meta = state.to_tensors()
            tensors.update({f"{i}.{name}": array for name, array in own.items()})
            layers.append({"type": state_name(state), "meta": meta})
        return tensors, {"layers": layers}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, mx.array], meta: Mapping[str, Any]) -> StateGroup:
        """Inverse of `to_tensors`. Raises LoadError for a kind nobody registered."""
        owned: dict[int, dict[str, mx.array]] = {}
        for name, array in tensors.items():
            layer, part = name.split(".", 1)
            owned.setdefault(int(layer), {})[part] = array
        layers = enumerate(meta["layers"])
        return cls(state_type(entry["type"]).from_tensors(owned.get(i, {}), entry["meta"]) for i, entry in layers)

    def save(self, path: str | Path) -> None:
        """Write to one safetensors file at `path`, atomically."""
        write_state(Path(path), *self.to_tensors())

    @classmethod
    def load(cls, path: str | Path) -> StateGroup:
        """Read what `save` wrote. Raises LoadError when the file is missing, cut short or something else."""
        return cls.from_tensors(*read_state(Path(path)))

    def _agree(self, subject: str, wanted: tuple[int, ...] | None = None) -> None:
        """Raise RequestError naming the first layer whose lengths differ from `wanted` (or from layer 0's)."""
        for i, state in enumerate(self):
            wanted = state.lengths if wanted is None else wanted
            if state.lengths != wanted:
                raise RequestError(
                    f"state lengths after {subject}",
                    found=f"{state.lengths} in layer {i} ({type(state).__name__})",
                    expected=wanted,
                    next_step="Start the request again, and report the model",
                    code="R01",
                )


def from_mlx_lm(model: nn.Module, kv_bits: int | None = None, kv_group_size: int = 64) -> StateGroup:
    """Empty states (B = 1) for a model of mlx-lm, from the kinds of cache it asks for.

    With `kv_bits` the full-attention layers store K/V quantised; sliding windows stay dense, their size is
    bounded and mlx-lm quantises none either. Raises LoadError for a cache that cannot be taken back.
    """
    from mlx_lm.models.cache import make_prompt_cache

    return StateGroup(_state_for(cache, kv_bits, kv_group_size) for cache in make_prompt_cache(model))


def _state_for(cache: Any, kv_bits: int | None, kv_group_size: int) -> State:
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    if type(cache) is KVCache:
        return KVState() if kv_bits is None else QuantisedKVState(kv_bits, kv_group_size)
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return WindowState(cache.max_size)
    kept = f" with keep={cache.keep}" if type(cache) is RotatingKVCache else ""
    raise LoadError(
        "model state",
        found=f"a layer that asks for {type(cache).__name__}{kept}, which cannot roll back",
        expected="KVCache or RotatingKVCache(keep=0) in every layer",
        next_step="Install a plugin that owns this model_type; without one, no drafter can help: run it with mlx-lm",
        code="L30",
    )
