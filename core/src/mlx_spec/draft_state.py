"""What a request owns on the drafter's side, as one value that batches, splits and rewinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import RefusedError

if TYPE_CHECKING:
    import mlx.core as mx

    from .state import StateGroup


class DraftState:
    """Caches, carried arrays and plain objects of B rows.

    Attributes:
        states: the drafter's own caches, or None.
        carry: name -> array (B, ...), e.g. a carried hidden state.
        rows: one plain object per row (an n-gram index, say); copied by reference. A state that is to be saved
            holds values of JSON here.
    """

    def __init__(
        self,
        states: StateGroup | None = None,
        carry: dict[str, mx.array] | None = None,
        rows: list[Any] | None = None,
    ):
        self.states = states
        self.carry = carry or {}
        self.rows: list[Any] = rows if rows is not None else [None]

    @classmethod
    def merge(cls, parts: Sequence[DraftState]) -> DraftState:
        """One state with the rows of all parts, in order; carries missing from a part become zeros."""
        import mlx.core as mx

        from .state import StateGroup

        states = None
        if parts[0].states is not None:
            states = StateGroup.merge([p.states for p in parts if p.states is not None])
        names = {name: p.carry[name] for p in parts for name in p.carry}
        carry = {
            name: mx.concatenate(
                [
                    p.carry[name] if name in p.carry else mx.zeros((len(p.rows), *sample.shape[1:]), sample.dtype)
                    for p in parts
                ]
            )
            for name, sample in names.items()
        }
        return cls(states, carry, [r for p in parts for r in p.rows])

    def select(self, rows: Sequence[int]) -> DraftState:
        """A state with only these rows, in this order."""
        import mlx.core as mx

        index = mx.array(list(rows))
        return type(self)(
            self.states.select(rows) if self.states is not None else None,
            {name: value[index] for name, value in self.carry.items()},
            [self.rows[r] for r in rows],
        )

    def to_tensors(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        """Tensors "states.<layer>.<part>" and "carry.<name>", and json-able meta.

        Raises RefusedError (R02) when a row holds an object that JSON has no form for.
        """
        tensors = {f"carry.{name}": value for name, value in self.carry.items()}
        meta: dict[str, Any] = {"rows": _as_json(self.rows), "states": None}
        if self.states is not None:
            own, meta["states"] = self.states.to_tensors()
            tensors |= {f"states.{name}": value for name, value in own.items()}
        return tensors, meta

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, mx.array], meta: Mapping[str, Any]) -> DraftState:
        """Inverse of `to_tensors`. Raises LoadError for a kind of state nobody registered."""
        from .state import StateGroup

        parts: dict[str, dict[str, mx.array]] = {"carry": {}, "states": {}}
        for name, value in tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = value
        saved = meta["states"]
        states = StateGroup.from_tensors(parts["states"], saved) if saved is not None else None
        return cls(states, parts["carry"], list(meta["rows"]))

    def save(self, path: str | Path) -> None:
        """Write to one safetensors file at `path`, atomically."""
        from .state.files import write_state

        write_state(Path(path), *self.to_tensors())

    @classmethod
    def load(cls, path: str | Path) -> DraftState:
        """Read what `save` wrote. Raises LoadError when the file is missing, cut short or something else."""
        from .state.files import read_state

        return cls.from_tensors(*read_state(Path(path)))

    def arrays(self) -> list[mx.array]:
        """Every array held, for one evaluation after a prefill chunk."""
        return [*self.carry.values(), *(self.states.arrays() if self.states is not None else ())]

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        own: int = sum(a.nbytes for a in self.carry.values())
        return own + (self.states.nbytes if self.states is not None else 0)


def _as_json(rows: list[Any]) -> Any:
    """The rows as JSON reads them back; RefusedError for an object it has no form for."""
    import json

    try:
        return json.loads(json.dumps(rows))
    except (TypeError, ValueError, RecursionError) as error:
        kinds = ", ".join(sorted({type(row).__name__ for row in rows}))
        raise RefusedError(
            "saving a drafter's state",
            found=f"rows of {kinds} ({error})",
            expected="values of JSON in DraftState.rows",
            next_step="Save the tokens instead and prefill them again, which makes these rows anew, or use a drafter "
            "that keeps none or values of JSON there",
            code="R02",
        ) from error
