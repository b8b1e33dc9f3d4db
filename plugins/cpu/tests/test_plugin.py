"""What the plugin registers, when it says it cannot run, and which layers it replaces."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_spec.errors import RefusedError
from mlx_spec.registry import Register
from mlx_spec.testing import PluginContract
from mlx_spec_cpu import native, plugin


class TestPlugin(PluginContract):
    plugin = "mlx_spec_cpu.plugin"
    entry_point = "cpu"


def test_every_kernel_is_for_cpu_and_is_used_by_layers() -> None:
    register = Register("cpu", "mlx-spec-cpu")
    plugin.spec_register(register)
    ops = ["linear", "experts", "embedding", "rope", "rms-norm", "attention", "packed-attention"]
    ops += ["gated-delta", "replay-delta", "activation", "short-convolution", "greedy", "soft-cap", "layers"]
    assert [kernel.op for kernel in register.kernels] == ops
    assert all(kernel.backends == ("cpu",) and kernel.ready for kernel in register.kernels)
    within = [kernel.op for kernel in register.kernels if not kernel.swap]
    assert within == ["embedding", "packed-attention", "replay-delta"]  # in layers that others of them replace


@pytest.mark.parametrize(
    "built, found, words",
    [
        ("0.32.4", "0.32.4", ""),
        ("0.32.4", "0.32.9.dev20260101+abc", ""),
        ("0.31.0", "0.32.4", "a library built for MLX 0.31.0, while MLX 0.32.4 runs"),
        ("0.32.4", "1.32.4", "a library built for MLX 0.32.4, while MLX 1.32.4 runs"),
    ],
)
def test_only_the_minor_version_must_agree(built: str, found: str, words: str) -> None:
    assert native.mismatch(built, found) == words


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "mlx_spec_cpu._native", None)
    native._library.cache_clear()
    yield
    native._library.cache_clear()


@pytest.mark.usefixtures("without_library")
def test_a_missing_library_is_said_in_one_sentence() -> None:
    import mlx.nn as nn

    from mlx_spec_cpu import swap

    assert native.ready() == (False, "no library: it was installed without a C++ compiler")
    with pytest.raises(
        RefusedError, match=r"found no library.*Install a C\+\+20 compiler, then in a clone: pip install"
    ) as refused:
        swap(nn.Linear(4, 4))
    assert refused.value.code == "CP01"


@pytest.fixture
def with_library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """function(**attributes): the library is a module that has these alone."""

    def install(**attributes: object) -> None:
        monkeypatch.setattr(native, "import_module", lambda *_: SimpleNamespace(**attributes))
        native._library.cache_clear()

    yield install
    native._library.cache_clear()


def test_a_library_of_another_mlx_is_not_used(with_library: Any) -> None:
    with_library(built_for="0.30.1", interface=native.INTERFACE)
    ok, reason = native.ready()
    assert not ok and reason.startswith("a library built for MLX 0.30.1, while MLX ")


@pytest.mark.parametrize("interface", [{}, {"interface": native.INTERFACE - 1}, {"interface": native.INTERFACE + 1}])
def test_a_library_of_another_version_of_the_package_is_not_used(with_library: Any, interface: dict[str, int]) -> None:
    import mlx.core as mx

    with_library(built_for=mx.__version__, **interface)  # and no function at all: none is called
    reason = "a compiled library that belongs to another version of the package; reinstall mlx-spec-cpu"
    assert native.ready() == (False, reason)
    with pytest.raises(RefusedError, match=reason) as refused:
        native.library()
    assert refused.value.code == "CP01"


def test_both_sides_name_the_same_interface() -> None:
    source = Path(__file__).parents[1] / "native" / "bindings.cpp"
    assert re.findall(r'm\.attr\("interface"\) = (\d+);', source.read_text()) == [str(native.INTERFACE)]
