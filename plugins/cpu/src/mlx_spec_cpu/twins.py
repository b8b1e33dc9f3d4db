"""A layer of another class in the place of a layer: it holds the same weights and runs a kernel.

The class is written here for a layer of few lines; where a layer's own code calls a function that a kernel stands
for, the class runs that code and means the kernel by the function's name. No module of mlx or mlx-lm changes.
"""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

FLOATS = (mx.float32, mx.bfloat16, mx.float16)
GROUPS = {"affine": (32, 64, 128), "mxfp4": (32,), "nvfp4": (16,)}
HELD = ("_held", "_turned")  # the transpose that core's dense layers keep for mlx, of no use to a kernel
Swap = Callable[[nn.Module], "nn.Module | None"]
Rule = tuple[type, type, Callable[[Any], bool]]  # exact type, its twin, whether the kernel covers such a layer


def swapper(rules: tuple[Rule, ...]) -> Swap:
    """function(module) -> the layer that replaces it, or None when no rule covers it."""

    def swap(module: nn.Module) -> nn.Module | None:
        for old, new, covers in rules:
            if type(module) is old and covers(module):
                return twin(module, new)
        return None

    return swap


def twin(module: nn.Module, kind: type) -> nn.Module:
    """A layer of `kind` with everything `module` holds; arrays are shared, not copied."""
    layer: Any = nn.Module.__new__(kind)
    nn.Module.__init__(layer)
    dict.update(layer, {name: value for name, value in module.items() if name not in HELD})
    layer.__dict__.update(module.__dict__)
    return layer


Meanings = tuple[tuple[str, Any, Any], ...]  # name, the function it means in a layer's module, what it shall mean


def caller(module: nn.Module, meanings: Meanings) -> nn.Module | None:
    """A layer whose code calls one of these functions, as one that calls the new; None for others."""
    own: Any = type(module)
    kind = calling(own, meanings)
    return None if kind is None else twin(module, kind)


@cache
def calling(kind: Any, meanings: Meanings) -> type | None:
    """The subclass of a layer class that runs the same code and means something else by some names."""
    call = vars(kind).get("__call__")
    if not isinstance(call, FunctionType):
        return None
    called = {name: new for name, old, new in meanings if call.__globals__.get(name) is old}
    changed = {name: new for name, new in called.items() if name in call.__code__.co_names}
    if not changed:
        return None
    scope = {**call.__globals__, **changed}
    own = FunctionType(call.__code__, scope, "__call__", call.__defaults__, call.__closure__)
    own.__kwdefaults__ = call.__kwdefaults__
    name = kind.__name__ if kind.__name__.startswith("Row") else f"Row{kind.__name__}"
    return type(name, (kind,), {"__call__": own, "__doc__": kind.__doc__, "__module__": __name__})
