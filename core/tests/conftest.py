"""Fixtures for the tests of core."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helper modules beside the tests, e.g. tinymodels


@pytest.fixture(scope="session", autouse=True)
def pairs_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What `pairs` writes once per session goes where pytest tidies up."""
    import pairs

    pairs.folder = tmp_path_factory.mktemp("pairs")


class Site:
    """A folder of fake installed distributions, put on sys.path."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()

    def install(self, distribution: str, entry: str, source: str, *, module: str = "", version: str = "1.0") -> str:
        """Write a module and the dist-info that offers it as entry point `entry`; returns the module's name."""
        module = module or distribution.replace("-", "_") + "_plugin"
        (self.folder / f"{module}.py").write_text(source)
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[mlx_spec]\n{entry} = {module}\n")
        return module


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An empty `Site`; its modules are forgotten and the plugin manager rebuilt after the test."""
    from mlx_spec import plugins

    site = Site(tmp_path / "site")
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(site.folder))
    plugins.reset()
    yield site
    plugins.reset()
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(site.folder)):
            del sys.modules[name]


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `spec` in a process of its own, with the test's Site (if any) on its path."""

    def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
        return subprocess.run(
            [sys.executable, "-m", "mlx_spec", *args],
            env={**os.environ, "PYTHONPATH": path, **env},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run
