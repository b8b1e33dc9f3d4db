"""A DFlash drafter's network, filled from its files, packed and cast as the target wants it."""

# mypy: disable-error-code="misc, no-any-return"
# mlx.nn is untyped to mypy: its classes and calls are Any.

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.checkpoint import check_finite, load_tensors, tensor_index
from mlx_spec.errors import LoadError
from mlx_spec.linear import hold_transposes

from .dflash2 import DFlash2Net
from .dflash_config import COMPLETE, DFlashConfig
from .dflash_net import DFlashNet
from .dflash_validate import CODEBOOKS, canonical, shapes, tensor_problems
from .packed import packed_modules
from .quantise import pack

LOOKED_UP = CODEBOOKS
"""Tables of which a draft reads a few rows: packing them would save no time."""


def load_net(path: Path, config: DFlashConfig, dtype: Any) -> DFlashNet:
    """Build and fill a drafter in `dtype`. LoadError names missing, unexpected or misshapen tensors."""
    index = tensor_index(path)
    problem = next(iter(tensor_problems(config, index)), None)
    if problem is not None:
        raise LoadError(
            f"{problem.subject} of drafter {path}",
            found=problem.found,
            expected=problem.expected,
            next_step=COMPLETE,
            code=problem.code,
        )
    net = DFlash2Net(config) if config.second else DFlashNet(config)
    named = {canonical(name): info for name, info in index.items()}
    stored = packed_modules(shapes(config), named, config.quantization)
    nn.quantize(net, class_predicate=lambda name, _: stored[name].as_dict() if name in stored else False)
    weights: dict[str, mx.array] = {canonical(n): value for n, value in load_tensors(path, lambda _: True).items()}
    check_finite(weights, f"weights of drafter {path}")
    net.load_weights(list(weights.items()), strict=True)
    pack(net, dict.fromkeys(LOOKED_UP))
    net.set_dtype(dtype)
    mx.eval(net.parameters())
    hold_transposes(net)
    net.eval()
    return net
