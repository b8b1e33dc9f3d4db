"""What the plugin registers, when it says it cannot run, and which layers it replaces."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from mlx_spec.errors import RefusedError
from mlx_spec.registry import Register
from mlx_spec.testing import PluginContract
from mlx_spec_cpu import native, plugin


class TestPlugin(PluginContract):
    plugin = "mlx_spec_cpu.plugin"
    entry_point = "cpu"


def test_every_kernel_is_for_cpu_and_replaces_layers() -> None:
    register = Register("cpu", "mlx-spec-cpu")
    plugin.spec_register(register)
    assert [kernel.op for kernel in register.kernels] == ["linear", "experts", "rms-norm", "attention"]
    assert all(kernel.backends == ("cpu",) and kernel.swap and kernel.ready for kernel in register.kernels)


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
        RefusedError, match=r"found no library.*Install a C\+\+ compiler and run: pip install"
    ) as refused:
        swap(nn.Linear(4, 4))
    assert refused.value.code == "CP01"


def test_a_library_of_another_mlx_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        built_for = "0.30.1"

    monkeypatch.setattr(native, "import_module", lambda *_: Old())
    native._library.cache_clear()
    try:
        ok, reason = native.ready()
    finally:
        native._library.cache_clear()
    assert not ok and reason.startswith("a library built for MLX 0.30.1, while MLX ")
