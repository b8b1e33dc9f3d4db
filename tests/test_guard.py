"""The guard of the test suite itself: nothing leaves this machine, nothing of the person's own leaks in."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
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


def test_temporary_folders_are_the_sessions_own(own_scratch):
    with tempfile.TemporaryDirectory() as name:
        assert Path(name).parent == own_scratch
    shown = subprocess.run(
        [sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"], capture_output=True, text=True
    )
    assert shown.stdout.strip() == str(own_scratch)


def test_measurements_leave_no_folder_behind(root, tmp_path):
    """Neither when all went well nor when a script failed in the middle, or was stopped."""
    script = "from common import scratch, tiny_llama; (scratch() / 'x').mkdir(); print(tiny_llama().target.is_dir())"
    told = "; import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    for end, code in (("", 0), ("; raise RuntimeError('in the middle')", 1), (told, 143)):
        done = subprocess.run(
            [sys.executable, "-c", script + end],
            cwd=root / "bench",
            env={**os.environ, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout.strip()) == (code, "True"), done.stderr
        assert [path.name for path in tmp_path.iterdir() if "mlx-spec" in path.name] == []
