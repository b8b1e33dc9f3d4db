"""The files that describe the workspace agree with each other."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import tomllib
from importlib import import_module
from pathlib import Path
from zipfile import ZipFile

import pytest

from mlx_spec.benchmark.workloads import NAMES

ROOT = Path(__file__).resolve().parent.parent
FILES = [
    ROOT / "core/pyproject.toml",
    *sorted(f for kind in ("plugins", "examples") for f in ROOT.glob(f"{kind}/*/pyproject.toml")),
]
PROJECTS = {path.parent: tomllib.loads(path.read_text()) for path in FILES}
PLUGINS = {folder: data for folder, data in PROJECTS.items() if folder.name != "core"}
CORE = PROJECTS[ROOT / "core"]["project"]


def pins(name: str) -> dict[str, str]:
    """Requirement lines of a file: name -> pin."""
    text = (ROOT / name).read_text()
    return dict(re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)$", text, re.MULTILINE))


def words(text: str) -> str:
    """A distribution name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", text).lower()


def requirement(text: str) -> str:
    """The bare name in a requirement."""
    return words(re.split(r"[\[<>=!~; ]", text, maxsplit=1)[0])


def ids(value: object) -> str | None:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else None


def module_name(data: dict) -> str:
    """The package a project installs, however it is built."""
    if "flit" in data["tool"]:
        return data["tool"]["flit"]["module"]["name"]
    (package,) = data["tool"]["scikit-build"]["wheel"]["packages"]
    return Path(package).name


@pytest.mark.parametrize("folder", PROJECTS, ids=ids)
def test_every_project_has_the_same_shape(folder):
    data = PROJECTS[folder]
    project = data["project"]
    compiled = (folder / "CMakeLists.txt").is_file()
    same_backend = data["build-system"] == PROJECTS[ROOT / "core"]["build-system"]
    assert same_backend is not compiled
    assert project["requires-python"] == CORE["requires-python"] and project["license"] == CORE["license"]
    module = module_name(data)
    assert module == project["name"].replace("-", "_")
    assert (folder / "src" / module / "__init__.py").is_file()
    assert (folder / project["readme"]).read_text().startswith(f"# {project['name']}\n")
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("folder", PROJECTS, ids=ids)
def test_versions_agree(folder):
    data = PROJECTS[folder]
    module = import_module(module_name(data))
    stated = [
        node.value.value
        for node in ast.parse(Path(module.__file__).read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert stated == [data["project"]["version"]]


@pytest.mark.parametrize("folder", PLUGINS, ids=ids)
def test_plugins_declare_core_and_one_entry_point(folder):
    project = PLUGINS[folder]["project"]
    assert "mlx-spec>=0.1,<0.2" in project["dependencies"]
    (value,) = project["entry-points"]["mlx_spec"].values()
    assert project["entry-points"]["mlx_spec"] == {folder.name: f"{project['name'].replace('-', '_')}.plugin"}
    assert import_module(value)


@pytest.mark.parametrize("folder", PLUGINS, ids=ids)
def test_installed_plugins_load_without_errors(folder):
    from mlx_spec.discovery import discover
    from mlx_spec.plugins import PluginManager, core_entry

    (name,) = PLUGINS[folder]["project"]["entry-points"]["mlx_spec"]
    core, plugin = PluginManager([core_entry(), *discover([name])]).records
    assert plugin.errors == [] and core.errors == []
    assert plugin.distribution == PLUGINS[folder]["project"]["name"]


def test_the_script_is_what_the_docs_say():
    assert CORE["scripts"] == {"spec": "mlx_spec.cli:main"}
    module, _, name = CORE["scripts"]["spec"].partition(":")
    assert callable(getattr(import_module(module), name))


def test_requirements_install_every_project():
    shipped = [folder for folder in PROJECTS if folder.parent.name != "examples"]
    for name, folders in (("requirements-dev.txt", PROJECTS), ("requirements-oracles.txt", shipped)):
        lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
        assert lines[0] == "-c constraints.txt"
        editable = {line.removeprefix("-e ./").split("[")[0] for line in lines if line.startswith("-e ")}
        assert editable == {str(folder.relative_to(ROOT)) for folder in folders}
        assert 'mlx[cpu]; sys_platform == "linux"' in lines


def test_constraints_pin_every_direct_dependency():
    pinned = {words(name) for name in pins("constraints.txt")}
    wanted = {requirement(d) for data in PROJECTS.values() for d in data["project"]["dependencies"]}
    wanted |= {requirement(d) for extra in CORE["optional-dependencies"].values() for d in extra}
    wanted -= {data["project"]["name"] for data in PROJECTS.values()}
    assert wanted - pinned == set()


def test_what_is_compiled_is_built_for_the_mlx_it_runs_with():
    for folder, data in PROJECTS.items():
        if not (folder / "CMakeLists.txt").is_file():
            continue
        ranges = {
            requirement.partition(";")[0].strip().replace("[cpu]", "").removeprefix("mlx")
            for requirement in [*data["build-system"]["requires"], *data["project"]["dependencies"]]
            if re.match(r"mlx(\[|[><=])", requirement)
        }
        assert len(ranges) == 1, f"{folder.name}: {ranges}"
        major, minor, _ = pins("constraints.txt")["mlx"].split(".")
        assert ranges.pop().endswith(f",<{major}.{int(minor) + 1}")


def test_constraints_hold_nothing_but_pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"#.*|[A-Za-z0-9_.-]+==[\w.+!]+", line)] == []


def test_ci_runs_the_documented_command():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "make test" in script.read_text().splitlines()[-1]
    assert "make test" in (ROOT / "README.md").read_text() and "make demo" in (ROOT / "README.md").read_text()


def test_ci_runs_the_native_tests_under_sanitizers():
    script = ROOT / ".ci" / "sanitize"
    assert script.stat().st_mode & 0o111 and script.read_text().splitlines()[-1] == "exec make sanitize"
    recipe = (ROOT / "Makefile").read_text().partition("\nsanitize:")[2].partition("\n\n")[0]
    assert "LD_PRELOAD" in recipe and recipe.endswith("plugins/cpu/tests")
    assert "-m pytest -p no:cacheprovider -p no:faulthandler" in recipe
    options = (ROOT / "plugins/cpu/CMakeLists.txt").read_text()
    assert "-fsanitize=address,undefined" in options and "-fno-sanitize-recover=all" in options


@pytest.mark.parametrize("target", ["demo", "test", "lint", "oracles", "sanitize", "neon"])
def test_make_targets_expand(target):
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_make_runs_what_it_says():
    def plan(target: str) -> str:
        # these tests may themselves run under make, whose flags would change what this one prints
        env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
        command = ["make", "-n", target]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout

    assert plan("test").splitlines()[-1] == ".venv/bin/python -m pytest"
    assert plan("demo").splitlines()[-1].startswith(".venv/bin/spec generate ")


@pytest.mark.parametrize(("target", "step"), [("demo", "-e ./plugins/cpu"), ("test", "-r requirements-dev.txt")])
@pytest.mark.parametrize("compiler", ["sh", ""])  # anything that is there will do: nothing is run
def test_make_says_what_is_compiled_before_it_is(target, step, compiler, tmp_path):
    for tool in ("make", "uname", "sh"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    command, env = ["make", "-n", "-B", target], {"PATH": str(tmp_path), "CXX": compiler}
    lines = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("echo ") and "plugins/cpu" in line)
    (install,) = (i for i, line in enumerate(lines) if step in line)
    assert at < install
    files = len(list((ROOT / "plugins/cpu/native").glob("*.cpp")))
    told = f"plugins/cpu ({files} C++ files) with {tmp_path}/sh: two minutes on two quick cores and up to seven on"
    assert (told if compiler else "no C++ compiler found.") in lines[at]


def test_the_wheel_of_core_holds_what_is_no_python(tmp_path, monkeypatch):
    """Prompt texts, templates of `spec new` and the marker of typed packages are read from the package."""
    from flit_core.buildapi import build_wheel

    monkeypatch.chdir(ROOT / "core")
    with ZipFile(tmp_path / build_wheel(str(tmp_path))) as wheel:
        inside = {name for name in wheel.namelist() if name.startswith("mlx_spec/")}
    source = ROOT / "core" / "src"
    data = {p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert inside == data
    assert {f"mlx_spec/benchmark/texts/{name}.toml" for name in NAMES} <= inside and "mlx_spec/py.typed" in inside


def test_nothing_of_ours_is_installed_from_an_index(root):
    """What is not published is installed from a clone: no page, message or template says otherwise."""
    pages = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("*/*/README.md"), root / "core" / "README.md"]
    sources = [file for name in ("core/src", "plugins", "examples") for file in (root / name).rglob("*.py")]
    templates = [*(root / "core/src/mlx_spec/scaffold/templates").rglob("*.tmpl")]
    assert len(templates) > 10
    command = re.compile(r"pip install ([^\n`]*)")
    ours = re.compile(r"""(?<![\w/.@])["']?(mlx-spec|@distribution@)(?![^"']* @ )""")
    found = [
        f"{file.relative_to(root)}: {match[0]}"
        for file in [*pages, *sources, *templates]
        if file.exists()
        for match in command.finditer(file.read_text())
        if ours.search(match[1].partition("#")[0])
    ]
    assert found == []


def test_no_download_addresses_or_machine_paths():
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    wrong = re.compile(r"https?://\S*(?:/simple|\.whl|\.tar\.gz)|(?<!\w)/(?:root|home/\w+)/", re.IGNORECASE)
    found = []
    for name in tracked.stdout.splitlines():
        path = ROOT / name
        if path.suffix in (".py", ".toml", ".txt", ".md", ".json", ".sh", "") and path.is_file():
            text = path.read_text(errors="replace")
            found += [name] if wrong.search(text) else []
    assert found == []
