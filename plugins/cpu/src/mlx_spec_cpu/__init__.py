"""Row-exact CPU kernels: a row gives the same bytes alone and in any block, on any number of threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx import nn

__version__ = "0.1.0"
__all__ = ["__version__", "swap"]


def swap(module: nn.Module) -> nn.Module:
    """The same layer, or tree of layers, on row-exact kernels.

    A tree is changed in place and returned; a single layer is returned as a new one that shares its weights.
    Layers without a kernel stay as they are. RefusedError (CP01) when the library cannot be used here.
    """
    from .modules import swap_tree

    return swap_tree(module)
