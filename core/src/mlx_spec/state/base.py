"""The State contract: every cache can return to a mark plus kept rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx

    from .view import KVView


@dataclass(frozen=True, slots=True)
class Mark:
    """Lengths (B,) at the time of the mark; small on purpose, no arrays."""

    lengths: tuple[int, ...]


class State(ABC):
    """One layer's cache for B rows of differing length.

    It is also what mlx-lm's modules call a cache: `offset`, `update_and_fetch` and `make_mask` have
    that meaning, so a target built from mlx-lm's modules runs on it unchanged.
    """

    @property
    @abstractmethod
    def lengths(self) -> tuple[int, ...]:
        """Positions held per row (B,), counted from the start of the sequence."""

    @abstractmethod
    def mark(self) -> Mark:
        """Remember where every row is; the next append may be taken back to here."""

    @abstractmethod
    def rewind(self, mark: Mark, keep: Sequence[int]) -> None:
        """Forget all rows past mark.lengths[b] + keep[b]. Raises ValueError when that cannot be done."""

    def check_rewind(self, mark: Mark, keep: Sequence[int]) -> None:
        """Raise the ValueError that `rewind` would raise, changing nothing; lets a group stay whole."""

    @abstractmethod
    def extract(self, row: int) -> State:
        """A copy of one row as a B = 1 state that shares nothing writable with this one."""

    @classmethod
    @abstractmethod
    def merge(cls, states: Sequence[State]) -> State:
        """One state holding the rows of all of them, in order."""

    @abstractmethod
    def select(self, rows: Sequence[int]) -> State:
        """A state with only these rows, in this order."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of device memory held."""

    def arrays(self) -> list[mx.array]:
        """The arrays that hold this state, for evaluating them.

        They are the state's own objects, into which later steps write: `mx.array(a)` keeps what one holds now.
        """
        return list(self.to_tensors()[0].values())

    @abstractmethod
    def to_tensors(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        """(tensors, json-able meta), enough to rebuild this state."""

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: Mapping[str, mx.array], meta: Mapping[str, Any]) -> State:
        """Inverse of `to_tensors`."""

    def view(self) -> KVView:
        """Stored K/V for a drafter that reads them; states without K/V raise TypeError."""
        raise TypeError(f"{type(self).__name__} holds no K/V to view")

    # -- what mlx-lm's modules ask of a cache ----------------------------------------------------------

    @property
    @abstractmethod
    def offset(self) -> int | mx.array:
        """Position of the next row: int when all rows agree, else int32 (B,)."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append keys, values (B, Hkv, L, Dk/Dv); return what attention should read. TypeError without K/V."""
        raise TypeError(f"{type(self).__name__} holds no K/V to append to")

    @abstractmethod
    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Mask for the next N rows: None, "causal" or bool, broadcastable to (B, 1, N, T)."""
