"""A layer of another class in the place of a layer: it holds the same weights and runs a kernel."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

FLOATS = (mx.float32, mx.bfloat16, mx.float16)
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
