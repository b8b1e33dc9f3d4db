"""What `spec inspect` tells from files is what loads: layers on kernels, state of a request, a head's own size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest

from mlx_spec import kernels, load
from mlx_spec.gated_delta import GatedDelta
from mlx_spec.inspection import inspect
from mlx_spec.kernels import Candidate
from mlx_spec.registry import Kernel
from mlx_spec.settings import reset_settings

KINDS = {"gated-delta": GatedDelta, "activation": nn.SiLU, "rms-norm": nn.RMSNorm, "short-convolution": nn.Conv1d}


class Replaced(nn.Module):
    """Stands for a kernel's layer."""


def candidate(op: str, kind: type) -> Candidate:
    swap = lambda module: Replaced() if isinstance(module, kind) else None  # noqa: E731
    return Candidate("acme", Kernel(op, ("cpu",), "1e-5", lambda: print, print, swap), True, "avx9")


@pytest.fixture
def replacing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for four kinds of layers, which do nothing."""
    monkeypatch.setattr(kernels, "candidates", lambda *_: [candidate(*kind) for kind in KINDS.items()])
    monkeypatch.setenv("MLX_SPEC_KERNELS", "on")
    reset_settings()


@pytest.mark.parametrize("options", [{}, {"wrapper": True}, {"variant": "moe"}, {"bits": 4}, {"raw": True}], ids=str)
def test_the_layers_on_kernels_are_those_of_the_loaded_target(
    checkpoint: Callable[..., Path], replacing: None, options: dict[str, Any]
) -> None:
    path = str(checkpoint(**options))
    report = inspect(path)
    assert report.kernels is not None
    assert report.kernels.use.layers == load(path).plan.kernels.layers
    assert report.kernels.use.layers["acme avx9"]["gated-delta"] == 3
    assert "GatedDelta" not in report.kernels.rest
