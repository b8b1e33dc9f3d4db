"""A recipe written layer by layer, and modules that run as one operation by it.

A module of any package can be run so: it has `describe(blueprint)`, which writes what it computes, and
`arrange(*its arguments)`, which says what a call of it hands over, or None for a call that its own code has to do.
Activations are of its `dtype` when it has one, else of that of the first input.
The same rule holds for all: as soon as a part of the module is not the library's own, its own code runs.
"""

# mypy: disable-error-code="misc, no-any-return"
# mlx.nn is untyped to mypy: its classes and calls are Any.

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .modules import (
    RowEmbedding,
    RowGemmaNorm,
    RowLinear,
    RowQuantizedEmbedding,
    RowQuantizedLinear,
    RowRMSNorm,
    RowRMSNormNoScale,
    packed,
)
from .native import library
from .recipe import Recipe
from .rope import rotation
from .twins import twin

Run = Callable[..., list[mx.array]]


class UncoveredError(Exception):
    """A part is not the library's own; the module's own code has to run."""


class Blueprint(Recipe):
    """A recipe of what modules do, for activations of one dtype."""

    def __init__(self, dtype: mx.Dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def apply(self, of: int, layer: Any) -> int:
        """A linear layer. Raises UncoveredError unless it is the library's."""
        if type(layer) not in (RowLinear, RowQuantizedLinear):
            raise UncoveredError(type(layer).__name__)
        weights = packed(layer) if "scales" in layer else {"weight": layer["weight"]}
        return self.linear(of, bias=layer.get("bias"), **weights)

    def read_out(self, of: int, table: Any) -> int:
        """An embedding as an output head. Raises UncoveredError likewise."""
        if type(table) not in (RowEmbedding, RowQuantizedEmbedding):
            raise UncoveredError(type(table).__name__)
        return self.linear(of, **_table(table))

    def looked_up(self, of: int, table: Any) -> int:
        """The rows of an embedding that ids name. Raises UncoveredError likewise."""
        if type(table) not in (RowEmbedding, RowQuantizedEmbedding):
            raise UncoveredError(type(table).__name__)
        dense, affine = "scales" not in table, table.get("biases") is not None
        rows = table["weight"].dtype if dense else table["scales"].dtype if affine else mx.bfloat16
        if rows != self.dtype:
            raise UncoveredError(f"a table whose rows are {rows}")
        return self.embed(of, **_table(table))

    def normed(self, of: int, layer: Any, size: int = 0) -> int:
        """A norm over every `size` values, by default one per weight. Raises UncoveredError likewise."""
        if type(layer) is RowRMSNorm:
            return self.norm(of, layer["weight"], layer.eps, layer["weight"].size)
        if type(layer) is RowGemmaNorm:
            return self.norm(of, 1.0 + layer["weight"], layer.eps, layer["weight"].size)
        if type(layer) is RowRMSNormNoScale and size:
            return self.norm(of, None, layer.eps, size)
        raise UncoveredError(type(layer).__name__)

    def turn(self, of: int, heads: int, layer: Any) -> int:
        """Rotary positions of `heads` side by side. Raises UncoveredError likewise."""
        turned = rotation(layer)
        if turned is None:
            raise UncoveredError(type(layer).__name__)
        return self.rotate(of, heads, *turned)

    def weighted(self, of: int, weight: mx.array) -> int:
        """`scale` by a weight that is rounded as activations are."""
        return self.scale(of, weight.astype(self.dtype))


def _table(table: Any) -> dict[str, Any]:
    return packed(table) if "scales" in table else {"weight": table["weight"]}


class Built:
    """The operations of a module for one dtype, and the parts and parameters they were made of."""

    def __init__(self, module: Any, dtype: mx.Dtype):
        self.dtype = dtype
        self.holders = list(module.modules())
        self.parts = [part for holder in self.holders for part in holder.values()]
        # names with an underscore are no parameters: wavelengths, say, which only turn what they are given
        own = [part for holder in self.holders for name, part in holder.items() if not name.startswith("_")]
        self.exact = all(stays(part, dtype) for part in own)
        self.runs: dict[str, Run | None] = {}

    def stale(self) -> bool:
        """Whether a part or a parameter is another one now."""
        return not library().hold(self.holders, self.parts)

    def run(self, name: str, write: Callable[[Blueprint], None]) -> Run | None:
        """The operation of this name, written when it is first asked for; None when a part is not covered."""
        if name not in self.runs:
            self.runs[name] = built(write, self.dtype) if self.exact else None
        return self.runs[name]


def built_of(module: Any, dtype: mx.Dtype) -> Built:
    """What a module holds of operations, made anew after a part or parameter was replaced."""
    held: Built | None = module.__dict__.get("_built")
    if held is None or held.dtype != dtype or held.stale():
        held = module.__dict__["_built"] = Built(module, dtype)
    return held


def built(write: Callable[[Blueprint], None], dtype: mx.Dtype) -> Run | None:
    """What `write` writes, as an operation; None when it meets a part that is not covered."""
    blueprint = Blueprint(dtype)
    try:
        write(blueprint)
    except UncoveredError:
        return None  # its own code runs
    return blueprint.build(dtype)


def stays(array: Any, dtype: mx.Dtype) -> bool:
    """Whether an operation with this parameter gives what it is given: activations of `dtype`."""
    if not isinstance(array, mx.array) or not mx.issubdtype(array.dtype, mx.floating):
        return True
    return (mx.zeros((), dtype) + mx.zeros((), array.dtype)).dtype == dtype


def width(layer: Any) -> int:
    """Values a linear layer takes."""
    weight = layer["weight"]
    return int(weight.shape[-1] * 32 // layer.bits if "scales" in layer else weight.shape[-1])


def swap_described(module: nn.Module) -> nn.Module | None:
    """A module that describes itself, as one that runs in one operation; None for others."""
    kind: Any = type(module)
    describes = callable(getattr(kind, "describe", None)) and callable(getattr(kind, "arrange", None))
    return twin(module, _described(kind)) if describes and not kind.__name__.startswith("Row") else None


@cache
def _described(kind: Any) -> type:
    def call(self: Any, *given: Any) -> Any:
        """The outputs it describes, by one operation when the module's parts and this call allow it."""
        arranged = self.arrange(*given)
        if arranged is not None:
            inputs, place = arranged
            run = built_of(self, getattr(self, "dtype", inputs[0].dtype)).run("", self.describe)
            if run is not None:
                return tuple(run(*inputs, **place))
        return kind.__call__(self, *given)

    return type(f"Row{kind.__name__}", (kind,), {"__call__": call, "__doc__": kind.__doc__, "__module__": __name__})
