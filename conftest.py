"""What holds for every test of the workspace: no network, no settings of the person running them, no shared cache."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

for name in [n for n in os.environ if n.startswith(("MLX_SPEC_", "LLAMA_ARG_"))]:
    del os.environ[name]
os.environ["HF_HUB_OFFLINE"] = "1"

LOCAL = {"localhost", "127.0.0.1", "::1", ""}


class NetworkBlocked(RuntimeError):
    """A test tried to leave this machine."""


def _guard(method: Callable[..., Any]) -> Callable[..., Any]:
    def connect(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in LOCAL:
            raise NetworkBlocked(f"connection to {address[0]}:{address[1]} from a test")
        return method(self, address)

    return connect


def _guard_lookup(lookup: Callable[..., Any]) -> Callable[..., Any]:
    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host is not None and host not in LOCAL:
            raise NetworkBlocked(f"name lookup of {host!r} from a test")
        return lookup(host, *args, **kwargs)

    return getaddrinfo


socket.socket.connect = _guard(socket.socket.connect)  # type: ignore[method-assign]
socket.socket.connect_ex = _guard(socket.socket.connect_ex)  # type: ignore[method-assign]
socket.getaddrinfo = _guard_lookup(socket.getaddrinfo)


@pytest.fixture(scope="session", autouse=True)
def own_scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Temporary folders of this session and of processes it starts; none of ours may be left when it ends."""
    folder = tmp_path_factory.mktemp("scratch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder
    left = sorted(path.name for path in folder.iterdir() if "mlx-spec" in path.name)
    assert not left, f"left behind by the code under test: {left}"


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has its own cache folder and reads the environment afresh.

    Many compare bytes with mlx-lm's, so kernels are off; the tests of kernels turn them on.
    """
    monkeypatch.setenv("MLX_SPEC_CACHE_DIR", str(tmp_path / "mlx-spec-cache"))
    monkeypatch.setenv("MLX_SPEC_KERNELS", "off")
    _forget_settings()
    yield
    monkeypatch.undo()
    _forget_settings()


def _forget_settings() -> None:
    module = sys.modules.get("mlx_spec.settings")
    if module is not None:
        module.reset_settings()
