"""Which layers of a checkpoint would run on kernels, told without loading its weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from .kernels import KernelUse, use_kernels
from .types import ModelRef


@dataclass(slots=True)
class Coverage:
    """Layers by what computes them.

    Attributes:
        use: kernels and the layers they would replace, or why none would be.
        rest: class name -> number of layers with weights that stay on mlx's own operations.
    """

    use: KernelUse
    rest: dict[str, int] = field(default_factory=dict)

    def line(self) -> str:
        """One line, e.g. "cpu avx2 (linear 57, rope 8); LayerNorm 2 on mlx's own operations"."""
        rest = ", ".join(f"{name} {n}" for name, n in sorted(self.rest.items()))
        if not self.use.layers:
            return self.use.line()
        return f"{self.use.line()}; {rest or 'no layer'} on mlx's own operations"


def kernel_coverage(ref: ModelRef, tensors: Collection[str]) -> Coverage | None:
    """What kernels would do for a model whose classes are known, None for others.

    `tensors` names the checkpoint's tensors, which say what is packed.
    """
    model = _skeleton(ref, tensors)
    if model is None:
        return None
    before = list(model.modules())  # held: an identity is only unique among things that live
    known = {id(module) for module in before}
    use = use_kernels(model)
    rest: dict[str, int] = {}
    for module in model.modules():
        if id(module) in known and _has_weights(module):
            name = type(module).__name__
            rest[name] = rest.get(name, 0) + 1
    return Coverage(use, rest)


def _skeleton(ref: ModelRef, tensors: Collection[str]) -> Any:
    """The module tree with arrays that nobody computes, quantised where the checkpoint has scales."""
    from mlx import nn

    from .loading import model_classes

    config = ref.config
    try:
        classes: Any = model_classes(ref)
        if classes is None:
            return None
        model_class, arguments = classes
        model = model_class(arguments.from_dict(dict(config)))
        packing = config.get("quantization")
        if isinstance(packing, Mapping):
            chosen = {key: packing[key] for key in ("group_size", "bits", "mode") if key in packing}
            nn.quantize(model, **chosen, class_predicate=lambda path, module: _packing(path, module, packing, tensors))
    except Exception:  # a config that is refused with its reason elsewhere
        return None
    return model


def _packing(path: str, module: Any, packing: Mapping[str, Any], tensors: Collection[str]) -> Any:
    """Whether a layer is packed, and how when that is its own."""
    own = packing.get(path)
    if not hasattr(module, "to_quantized") or own is False:
        return False
    return (own if isinstance(own, dict) else True) if f"{path}.scales" in tensors else False


def _has_weights(module: Any) -> bool:
    """Whether it is a layer: it holds a matrix, or arrays and no modules.

    A container with a scalar or vector of its own, as a block with a gate, is told by what is in it.
    """
    import mlx.core as mx

    own = [value for value in module.values() if isinstance(value, mx.array)]
    return any(array.ndim > 1 for array in own) or bool(own and not module.children())


__all__ = ["Coverage", "kernel_coverage"]
