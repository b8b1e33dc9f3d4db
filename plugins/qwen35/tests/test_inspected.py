"""What `spec inspect` tells from files is what loads: layers on kernels, state of a request, a head's own size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from click.testing import CliRunner

from mlx_spec import kernels, load
from mlx_spec.cli import cli
from mlx_spec.errors import NoEmbeddedMtpHead
from mlx_spec.gated_delta import GatedDelta
from mlx_spec.inspection import inspect
from mlx_spec.kernels import Candidate
from mlx_spec.registry import Kernel
from mlx_spec.settings import reset_settings
from mlx_spec.state import DeltaState
from mlx_spec_qwen35.tiny import write_tiny

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
    assert "GatedDeltaNet" not in report.kernels.rest  # its vectors are read between layers that are counted


@pytest.mark.parametrize("options", [{}, {"wrapper": True, "dtype": "bfloat16"}, {"variant": "moe"}], ids=str)
def test_the_state_of_a_request_is_what_a_loaded_target_holds(
    checkpoint: Callable[..., Path], options: dict[str, Any]
) -> None:
    path = str(checkpoint(**options))
    need = inspect(path, context=7).memory
    assert need is not None
    target = load(path).target
    states = target.make_states()
    target.prefill(mx.array([[5, 6, 7, 8, 9, 10, 11]], dtype=mx.int32), states)
    held = [state.nbytes for state in states if isinstance(state, DeltaState)]
    assert (need.state_layers, need.state_bytes) == (len(held), sum(held)) and len(held) == 3
    assert need.total_bytes == need.weights_bytes + need.kv_bytes + need.state_bytes
    assert "recurrent state" in CliRunner().invoke(cli, ["inspect", path]).stdout


@pytest.mark.parametrize("layers", [4, 8])
def test_a_head_directory_has_its_own_layers_and_memory(checkpoint: Callable[..., Path], layers: int) -> None:
    """Its config.json describes the trunk."""
    path = checkpoint(drafter="mtp", num_hidden_layers=layers).parent / "drafter"
    text = json.loads((path / "config.json").read_text())["text_config"]
    report = inspect(str(path), context=100)
    assert text["num_hidden_layers"] == layers and report.layers == 1
    assert report.memory is not None and (report.memory.kv_layers, report.memory.state_layers) == (1, 0)
    assert report.memory.kv_bytes == 100 * 2 * text["num_key_value_heads"] * text["head_dim"] * 4


def test_a_tiny_checkpoint_declares_the_head_it_has(tmp_path: Path) -> None:
    def declared(name: str, **options: Any) -> int:
        target, _ = write_tiny(tmp_path / name, **options)
        return json.loads((target / "config.json").read_text())["mtp_num_hidden_layers"]

    assert (declared("none"), declared("own", drafter="own"), declared("apart", drafter="mtp")) == (0, 1, 0)
    assert declared("promise", mtp_num_hidden_layers=1) == 1
    assert inspect(str(tmp_path / "none" / "target")).stages == []
    with pytest.raises(NoEmbeddedMtpHead, match=r"config.json declares 1 layer\)"):
        load(str(tmp_path / "promise" / "target"), kind="mtp")
