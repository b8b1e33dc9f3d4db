"""Packing a drafter's matrices as it loads: a draft is bound by the bytes it reads.

MLX_SPEC_QUANTIZE_DRAFTER=0 leaves them as they are stored.
"""

# mypy: disable-error-code="misc, no-any-return"
# mlx.nn is untyped to mypy: its classes and calls are Any.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.nn as nn

from mlx_spec.settings import get_settings

Sizes = Mapping[str, int]
USUAL: Sizes = {"bits": 4, "group_size": 64}
"""How matrices are packed that are not packed yet."""


def pack(net: nn.Module, others: Mapping[str, Sizes | None] | None = None) -> int:
    """Pack every matrix of `net` that is dense and splits into whole groups; returns how many were.

    others: end of a module's name -> bits and group_size for it, None to leave it as it is.
    """
    if not get_settings().quantize_drafter:
        return 0
    count = 0

    def how(name: str, module: Any) -> Any:
        nonlocal count
        rule = next((sizes for end, sizes in (others or {}).items() if name.endswith(end)), USUAL)
        if rule is None or not hasattr(module, "to_quantized") or module.weight.shape[-1] % rule["group_size"]:
            return False
        count += 1
        return rule

    nn.quantize(net, class_predicate=how)
    return count
