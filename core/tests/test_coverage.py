"""Which layers kernels would run, told before weights are loaded."""

from __future__ import annotations

import json
from types import SimpleNamespace

import mlx.nn as nn
import pytest
from click.testing import CliRunner
from mlx_lm.utils import load_model, quantize_model, save_model

from mlx_spec import kernels
from mlx_spec.checkpoint import read_config, tensor_index
from mlx_spec.cli import cli
from mlx_spec.coverage import Coverage, kernel_coverage
from mlx_spec.registry import Kernel
from mlx_spec.settings import reset_settings
from mlx_spec.testing.tiny import write_llama
from mlx_spec.types import ModelRef


class Replaced(nn.Module):
    """Stands for a kernel's layer."""


def swapper(*kinds: type):
    return lambda module: Replaced() if type(module) in kinds else None


@pytest.fixture
def bring(monkeypatch: pytest.MonkeyPatch):
    """function(*kernels, device): these and no others exist."""

    def install(*found: Kernel, device: str = "cpu") -> None:
        found_all = [("acme", kernel) for kernel in found]
        registry = SimpleNamespace(kernels=lambda: found_all, target_owner=lambda model_type: None)
        monkeypatch.setattr("mlx_spec.plugins.get_manager", lambda: SimpleNamespace(registry=registry))
        monkeypatch.setattr(kernels, "device_kind", lambda: device)
        monkeypatch.setenv("MLX_SPEC_KERNELS", "on")
        reset_settings()

    return install


def kernel(op: str, *kinds: type, ok: bool = True) -> Kernel:
    state = (ok, "avx9" if ok else "no library")
    return Kernel(op, ("cpu",), "1e-5", lambda: print, print, swapper(*kinds), lambda: state)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> ModelRef:
    """A tiny llama whose layers are packed except the attention outputs."""
    path, _ = write_llama(tmp_path_factory.mktemp("packed"), seed=1, hidden_size=64, intermediate_size=96)
    model, config = load_model(path)
    skip = lambda name, module: hasattr(module, "to_quantized") and "o_proj" not in name  # noqa: E731
    model, config = quantize_model(model, config, group_size=32, bits=4, quant_predicate=skip)
    save_model(path, model)
    (path / "config.json").write_text(json.dumps(config))
    return ModelRef(str(path), path, read_config(path))


def covered(ref: ModelRef) -> Coverage:
    found = kernel_coverage(ref, tensor_index(ref.path))
    assert found is not None
    return found


def test_layers_are_counted_by_what_runs_them(packed: ModelRef, bring) -> None:
    bring(kernel("linear", nn.QuantizedLinear, nn.QuantizedEmbedding), kernel("norm", nn.RMSNorm))
    found = covered(packed)
    layers = packed.config["num_hidden_layers"]
    assert found.use.layers == {"acme avx9": {"linear": 6 * layers + 2, "norm": 2 * layers + 1}}
    assert found.rest == {"Linear": layers}  # the attention outputs
    assert found.line() == (
        f"acme avx9 (linear {6 * layers + 2}, norm {2 * layers + 1}); Linear {layers} on mlx's own operations"
    )


def test_nothing_is_left_over(packed: ModelRef, bring) -> None:
    bring(kernel("all", nn.QuantizedLinear, nn.QuantizedEmbedding, nn.RMSNorm, nn.Linear))
    assert covered(packed).line().endswith("; no layer on mlx's own operations")


def test_kernels_that_cannot_run_are_said(packed: ModelRef, bring, monkeypatch: pytest.MonkeyPatch) -> None:
    bring(kernel("linear", nn.Linear, ok=False))
    assert covered(packed).line() == "mlx (plugin acme: no library)"
    bring(kernel("linear", nn.Linear), device="cuda")
    assert covered(packed).line() == "mlx (no kernels for cuda)"
    monkeypatch.setenv("MLX_SPEC_KERNELS", "off")
    reset_settings()
    assert covered(packed).line() == "mlx (MLX_SPEC_KERNELS=off)"


def test_what_mlx_lm_does_not_know_is_left_open(packed: ModelRef) -> None:
    strange = ModelRef("x", packed.path, {**packed.config, "model_type": "strange"})
    assert kernel_coverage(strange, ()) is None


def test_the_command_says_it(packed: ModelRef) -> None:
    done = CliRunner().invoke(cli, ["inspect", str(packed.path), "--json"])
    report = json.loads(done.stdout)
    assert done.exit_code == 0 and set(report["kernels"]) == {"use", "rest"}
    assert "kernels" in CliRunner().invoke(cli, ["inspect", str(packed.path)]).stdout
