"""What core does with the plugin's module classes: counting layers for kernels, converting what mlx-lm lacks."""

from __future__ import annotations

from pathlib import Path

import mlx.nn as nn
import pytest

import mlx_spec
from mlx_spec import kernels
from mlx_spec.conversion.checkpoint import Options, convert
from mlx_spec.conversion.quantise import read_quantisation
from mlx_spec.inspection import inspect
from mlx_spec.kernels import Candidate
from mlx_spec.loading import open_ref
from mlx_spec.registry import Kernel
from mlx_spec.settings import reset_settings
from mlx_spec_gemma4.tiny import VARIANTS, write_tiny

PROMPT = [65, 66, 67, 68]


class Replaced(nn.Module):
    """Stands for a kernel's layer."""


def replace(module: nn.Module) -> nn.Module | None:
    return Replaced() if isinstance(module, nn.RMSNorm | nn.Linear | nn.QuantizedLinear) else None


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_layers_on_kernels_are_those_of_the_loaded_target(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel("all", ("cpu",), "1e-5", lambda: print, print, replace)
    monkeypatch.setattr(kernels, "candidates", lambda *_: [Candidate("acme", kernel, True, "avx9")])
    monkeypatch.setenv("MLX_SPEC_KERNELS", "on")
    reset_settings()
    target = str(write_tiny(tmp_path, variant)[0])
    report = inspect(target)
    assert report.kernels is not None
    assert report.kernels.use.layers == mlx_spec.load(target).plan.kernels.layers != {}


@pytest.mark.parametrize("packed", [False, True])
def test_the_flat_unified_type_which_mlx_lm_does_not_define_is_converted(packed: bool, tmp_path: Path) -> None:
    source, assistant = write_tiny(tmp_path, "UNITEXT")
    how = Options(read_quantisation(4, 32, None) if packed else None)
    out = convert(open_ref(str(source)), tmp_path / "out", how).out
    before, after = (
        mlx_spec.generate(mlx_spec.load(str(path), str(assistant), probe=False), PROMPT, None, 24, True)
        for path in (source, out)
    )
    assert len(after.token_ids) == 24 and after.speculation.active
    assert packed or before.token_ids == after.token_ids
