"""Layers of mlx and mlx-lm on row-exact kernels: subclasses sharing the weights of what they replace.

Only exact types are replaced: a subclass may compute something else. What a kernel does not take (integer
activations, float64, other quantisation modes) goes to the layer's own implementation.
"""

# mypy: disable-error-code="misc, no-any-return"
# mlx.nn is untyped to mypy: its classes and calls are Any.

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma3_text, gemma4_text
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_spec.kernels import swap_modules
from mlx_spec.linear import HeldLinear

from .activation import swap_activation
from .attention import swap_attention
from .convolution import CONVOLUTION
from .native import library
from .recurrence import RECURRENCE
from .rope import ROPE
from .twins import FLOATS, GROUPS, Rule, swapper

INDICES = (mx.int32, mx.uint32, mx.int64)
BITS = {"affine": (2, 3, 4, 5, 6, 8), "mxfp4": (4,), "nvfp4": (4,)}


class RowLinear(nn.Linear):
    """nn.Linear: y (..., N) = x (..., K) times weight (N, K) transposed, plus bias (N,)."""

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., K) -> (..., N)."""
        if x.dtype not in FLOATS:
            return super().__call__(x)
        return library().linear(x, self["weight"], bias=self.get("bias"))


class RowQuantizedLinear(nn.QuantizedLinear):
    """nn.QuantizedLinear over packed weights."""

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., K) -> (..., N)."""
        if x.dtype not in FLOATS:
            return super().__call__(x)
        return library().linear(x, bias=self.get("bias"), **packed(self))


class RowEmbedding(nn.Embedding):
    """nn.Embedding, also as an output head."""

    def __call__(self, x: mx.array) -> mx.array:
        """x (...) -> (..., D)."""
        return library().rows(x, self["weight"]) if x.dtype in INDICES else super().__call__(x)

    def as_linear(self, x: mx.array) -> mx.array:
        """x (..., D) -> logits (..., V)."""
        return library().linear(x, self["weight"]) if x.dtype in FLOATS else super().as_linear(x)


class RowQuantizedEmbedding(nn.QuantizedEmbedding):
    """nn.QuantizedEmbedding, also as an output head."""

    def __call__(self, x: mx.array) -> mx.array:
        """x (...) -> (..., D)."""
        return library().rows(x, **packed(self)) if x.dtype in INDICES else super().__call__(x)

    def as_linear(self, x: mx.array) -> mx.array:
        """x (..., D) -> logits (..., V)."""
        return library().linear(x, **packed(self)) if x.dtype in FLOATS else super().as_linear(x)


class RowSwitchLinear(SwitchLinear):
    """mlx-lm's SwitchLinear: each row with the weights (experts, N, K) of the experts it chose."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x (..., M, K), indices (...) -> (..., M, N)."""
        if x.dtype not in FLOATS:
            return super().__call__(x, indices, sorted_indices)
        y = library().gathered(x, self["weight"], indices.astype(mx.uint32))
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y


class RowQuantizedSwitchLinear(QuantizedSwitchLinear):
    """mlx-lm's QuantizedSwitchLinear."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x (..., M, K), indices (...) -> (..., M, N)."""
        if x.dtype not in FLOATS:
            return super().__call__(x, indices, sorted_indices)
        y = library().gathered(x, indices=indices.astype(mx.uint32), **packed(self))
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y


class RowRMSNorm(nn.RMSNorm):
    """nn.RMSNorm in one operation."""

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., D) -> (..., D)."""
        return library().rms_norm(x, self["weight"], self.eps) if x.dtype in FLOATS else super().__call__(x)


class RowRMSNormNoScale(gemma4_text.RMSNormNoScale):
    """mlx-lm's norm without weights."""

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., D) -> (..., D)."""
        return library().rms_norm(x, None, self.eps) if x.dtype in FLOATS else super().__call__(x)


class RowGemmaNorm(gemma3_text.RMSNorm):
    """mlx-lm's norm of Gemma 3: times 1 + weight."""

    def __call__(self, x: mx.array) -> mx.array:
        """x (..., D) -> (..., D)."""
        return library().rms_norm(x, 1.0 + self["weight"], self.eps) if x.dtype in FLOATS else super().__call__(x)


def packed(layer: Any) -> dict[str, Any]:
    """Weights of a quantised layer, as the library takes them."""
    return {
        "weight": layer["weight"],
        "scales": layer["scales"],
        "biases": layer.get("biases"),
        "mode": layer.mode,
        "group_size": layer.group_size,
        "bits": layer.bits,
    }


def _plain(module: Any) -> bool:
    return module["weight"].dtype in FLOATS


def _known_packing(module: Any) -> bool:
    """Whether the kernel reads these packed weights."""
    mode = module.mode
    scales = (mx.uint8,) if mode in ("mxfp4", "nvfp4") else FLOATS
    known = module.group_size in GROUPS.get(mode, ()) and module.bits in BITS.get(mode, ())
    biases = module.get("biases")
    matched = (biases is None) if mode != "affine" else biases is not None and biases.dtype == module["scales"].dtype
    return known and matched and module["scales"].dtype in scales and module.get("global_scale") is None


LINEAR: tuple[Rule, ...] = (
    (nn.Linear, RowLinear, _plain),
    (HeldLinear, RowLinear, _plain),
    (nn.QuantizedLinear, RowQuantizedLinear, _known_packing),
    (nn.Embedding, RowEmbedding, _plain),
    (nn.QuantizedEmbedding, RowQuantizedEmbedding, _known_packing),
)
EXPERTS: tuple[Rule, ...] = (
    (SwitchLinear, RowSwitchLinear, _plain),
    (QuantizedSwitchLinear, RowQuantizedSwitchLinear, _known_packing),
)
NORM: tuple[Rule, ...] = (
    (nn.RMSNorm, RowRMSNorm, _plain),
    (gemma3_text.RMSNorm, RowGemmaNorm, _plain),
    (gemma4_text.RMSNormNoScale, RowRMSNormNoScale, lambda _: True),
)


def swap_tree(module: nn.Module) -> nn.Module:
    """`module` with every layer replaced that a kernel covers."""
    from .operations import swap_layers

    library()
    for rules in (LINEAR, EXPERTS, NORM, ROPE, RECURRENCE, CONVOLUTION):
        module, _ = swap_modules(module, swapper(rules))
    for swap in (swap_attention, swap_activation, swap_layers):
        module, _ = swap_modules(module, swap)
    return module
