"""The guard of the test suite itself: nothing leaves this machine, nothing of the person's own leaks in."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest


def test_connections_outside_are_refused():
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        with pytest.raises(RuntimeError, match="192.0.2.1:443"):
            sock.connect(("192.0.2.1", 443))
        with pytest.raises(RuntimeError, match="192.0.2.1"):
            sock.connect_ex(("192.0.2.1", 443))
    with pytest.raises(RuntimeError, match=r"example\.invalid"):
        socket.create_connection(("example.invalid", 80))


def test_loopback_and_unix_sockets_work(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert client.getpeername() == server.getsockname()
    path = Path("s")
    monkeypatch.chdir(tmp_path)  # unix socket paths are short
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(path))
        server.listen()
        client.connect(str(path))


def test_settings_are_the_tests_own(tmp_path):
    from mlx_spec.settings import get_settings

    assert get_settings().cache_dir == tmp_path / "mlx-spec-cache"
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    ours = {name for name in os.environ if name.startswith(("LLAMA_ARG_", "MLX_SPEC_"))}
    assert ours == {"MLX_SPEC_CACHE_DIR", "MLX_SPEC_KERNELS"} and get_settings().kernels == ()
