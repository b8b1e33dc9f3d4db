"""`spec new` end to end: written, built into a wheel, installed beside a wheel of core, passing its own tests.

The environment is new and holds exactly what `mlx-spec[testing]` requires. To be quick and to need no index,
third-party packages are links to those of the environment that runs this test; what is ours comes from
wheels alone, and no editable install is visible.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = re.compile(r"mlx[-_]spec")
NAMES = {"drafter": "suffix-copy", "family": "small-lm"}


def run(*command: object, cwd: Path) -> str:
    """Output of a command that succeeds; no setting of the running process is passed on."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "SSL_CERT_FILE") if name in os.environ}
    env = {**kept, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def required(name: str, extras: tuple[str, ...] = ()) -> dict[str, metadata.Distribution]:
    """Distributions that `name[extras]` needs, itself included, by name, as they are installed here."""
    from packaging.requirements import Requirement

    found: dict[str, metadata.Distribution] = {}
    pending = [(name, extras)]
    seen = set()
    while pending:
        step = pending.pop()
        if step in seen:
            continue
        seen.add(step)
        found[step[0]] = dist = metadata.distribution(step[0])
        for requirement in map(Requirement, dist.requires or ()):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*step[1], "")):
                pending.append((requirement.name, tuple(sorted(requirement.extras))))
    return found


def link(dist: metadata.Distribution, site: Path) -> None:
    """Put a distribution's top-level files and folders into `site`, as links."""
    tops = {Path(file).parts[0] for file in dist.files or ()}
    for top in tops - {"..", "__pycache__"}:
        place = site / top
        if not place.exists():
            place.symlink_to(Path(str(dist.locate_file(top))).resolve())


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the requirements of mlx-spec[testing], and a wheel of core."""
    home = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", home / "venv", cwd=home)
    (site,) = (home / "venv" / "lib").glob("python*/site-packages")
    backend = {"linux": "mlx-cpu"}.get(sys.platform, "mlx-metal")
    needed = required("mlx-spec", ("testing",)) | required(backend)
    for name, dist in needed.items():
        if not OURS.match(name):
            link(dist, site)
    python = home / "venv" / "bin" / "python"
    install(build(ROOT / "core", home / "wheels"), python)
    assert run(python, "-c", "import mlx_spec; print(mlx_spec.__file__)", cwd=home).startswith(str(home))
    return python


def build(project: Path, out: Path) -> Path:
    """The wheel of a project, made by its build backend as pip makes it."""
    run(
        sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, project, cwd=project
    )
    name = project.name if project.name != "core" else "mlx-spec"
    (wheel,) = out.glob(f"{name.replace('-', '_')}-*.whl")
    return wheel


def install(wheel: Path, python: Path) -> None:
    """Install one wheel, nothing else, into the environment of `python`."""
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel, cwd=wheel.parent)


@pytest.fixture(scope="module")
def written(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """written(kind): the folder of a new plugin, without its source tree; its wheel is installed."""

    @cache
    def make(kind: str) -> Path:
        out = tmp_path_factory.mktemp(kind)
        run(python, "-m", "mlx_spec", "new", kind, NAMES[kind], "--out", out, cwd=out)
        folder = out / f"mlx-spec-{NAMES[kind]}"
        install(build(folder, out / "wheels"), python)
        (folder / "src").rename(out / "src")  # the wheel is tested, not the tree
        return folder

    return make


@pytest.mark.parametrize("kind", NAMES)
def test_a_new_plugin_passes_the_kit_from_its_wheel(kind: str, python: Path, written: Callable[[str], Path]) -> None:
    out = run(python, "-m", "pytest", "-p", "no:cacheprovider", cwd=written(kind))
    passed = re.search(r"(\d+) passed", out)
    assert passed and int(passed[1]) > 25 and not re.search(r"\d+ (failed|error|skipped)", out)


@pytest.mark.parametrize("kind", NAMES)
def test_a_new_plugin_is_found(kind: str, python: Path, written: Callable[[str], Path]) -> None:
    out = run(python, "-m", "mlx_spec", "plugins", cwd=written(kind))
    name = NAMES[kind]
    assert re.search(rf"^{name}\s+mlx-spec-{name}\s+0\.1\.0\s+ok", out, re.MULTILINE)


def test_a_new_family_generates_from_its_tiny_checkpoint(
    python: Path, written: Callable[[str], Path], tmp_path: Path
) -> None:
    """The commands its README shows."""
    written("family")
    run(python, "-m", "mlx_spec.testing", "tiny", NAMES["family"], "--out", "tiny", cwd=tmp_path)
    pair = ("-m", "tiny/target", "--draft-model", "tiny/drafter")
    drafted = run(python, "-m", "mlx_spec", "generate", *pair, "-p", "Hello", "-n", 20, "--json", cwd=tmp_path)
    assert '"draft_kind": "mtp"' in drafted and '"active": true' in drafted


def test_a_new_drafter_serves_any_target(python: Path, written: Callable[[str], Path], tmp_path: Path) -> None:
    written("drafter")
    run(python, "-m", "mlx_spec.testing", "tiny", "llama", "--out", "tiny", cwd=tmp_path)
    options = ("-m", "tiny/target", "--draft-kind", NAMES["drafter"], "-p", "one two one two one", "-n", 20, "--json")
    drafted = run(python, "-m", "mlx_spec", "generate", *options, cwd=tmp_path)
    assert f'"draft_kind": "{NAMES["drafter"]}"' in drafted and '"active": true' in drafted
