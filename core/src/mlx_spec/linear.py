"""Dense layers that keep their transposed weight, so that a step does not transpose it again.

A step of a small model is bound by the number of operations, not by arithmetic, and mlx.nn's `Linear`
transposes its weight in each call. The held array is a view of the same bytes with the same strides, so MLX
runs the same kernel and every result keeps its bytes.
"""

from __future__ import annotations

from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path


class HeldLinear(nn.Linear):  # type: ignore[misc]  # mlx.nn is untyped
    """`nn.Linear` with `weight.T` at hand; follows a weight that is replaced later."""

    def __init__(self, weight: mx.array, bias: mx.array | None = None):
        nn.Module.__init__(self)
        self.weight = weight
        if bias is not None:
            self.bias = bias
        self._hold(weight)

    @classmethod
    def of(cls, layer: nn.Linear) -> Self:
        """The same layer, sharing its parameters."""
        return cls(layer.weight, layer.get("bias"))

    def _hold(self, weight: mx.array) -> None:
        turned = weight.T
        mx.eval(turned)  # a lazy one would be transposed anew by every graph it enters
        self["_held"], self["_turned"] = weight, turned

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., in) -> (..., out)."""
        if self["weight"] is not self["_held"]:
            self._hold(self["weight"])
        bias = self.get("bias")
        return x @ self["_turned"] if bias is None else mx.addmm(bias, x, self["_turned"])


def hold_transposes(model: nn.Module) -> None:
    """Replace every `nn.Linear` in `model` (subclasses and quantised layers stay) by a `HeldLinear`.

    Reads the weights from disk if that has not happened yet.
    """

    def held(_: str, layer: Any) -> Any:
        return HeldLinear.of(layer) if type(layer) is nn.Linear else layer

    model.update_modules(tree_map_with_path(held, model.leaf_modules(), is_leaf=nn.Module.is_module))


__all__ = ["HeldLinear", "hold_transposes"]
