"""`spec new`: names, refusals, and that nothing half-written is left. tests/test_scaffold.py runs what it writes."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from mlx_spec import __version__, scaffold
from mlx_spec.errors import UsageError
from mlx_spec.scaffold import KINDS, plugin_files, write_plugin

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = """
from mlx_spec import hookimpl

@hookimpl
def spec_register(register):
    register.target("fake_type")
"""


def everything(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("kind", KINDS)
def test_all_files_are_written(kind, tmp_path):
    folder = write_plugin(kind, "two-words2", tmp_path / "deep" / "er")
    assert folder == tmp_path / "deep" / "er" / "mlx-spec-two-words2"
    assert everything(folder) == plugin_files(kind, "two-words2")
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]
    package = "src/mlx_spec_two_words2"
    wanted = {"LICENSE", "README.md", ".gitignore", ".github/workflows/test.yml", "tests/test_conformance.py"}
    wanted |= {f"{package}/{name}" for name in ("__init__.py", "plugin.py", "drafter.py", "py.typed")}
    assert wanted <= everything(folder).keys()


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_filled_in_everywhere(kind):
    files = plugin_files(kind, "two-words2")
    for path, text in files.items():
        assert not scaffold._MARK.search(text), path
        if path.endswith(".py"):
            assert ast.parse(text).body and ast.get_docstring(ast.parse(text)), path
    project = tomllib.loads(files["pyproject.toml"])
    assert project["project"]["name"] == "mlx-spec-two-words2"
    assert project["project"]["entry-points"] == {"mlx_spec": {"two-words2": "mlx_spec_two_words2.plugin"}}
    assert project["tool"]["flit"]["module"]["name"] == "mlx_spec_two_words2"
    major, minor = __version__.split(".")[:2]
    assert project["project"]["dependencies"] == [f"mlx-spec>={major}.{minor},<{major}.{int(minor) + 1}"]
    assert project["project"]["optional-dependencies"]["testing"][0].startswith("mlx-spec[testing]>=")
    assert files["LICENSE"] == (ROOT / "LICENSE").read_text()
    assert "${{ matrix.python }}" in files[".github/workflows/test.yml"]


def test_the_conformance_tests_are_short():
    sizes = {kind: len(plugin_files(kind, "x")["tests/test_conformance.py"].splitlines()) for kind in KINDS}
    assert sizes["drafter"] <= 25 and sizes["family"] <= 35


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        "",
        "-",
        "Upper",
        "under_score",
        "two--dashes",
        "-lead",
        "trail-",
        "9digit",
        "a b",
        "a/b",
        "../up",
        "é",
        "a\n",
        "x" * 41,
    ],
)
def test_misspelt_names_are_refused(kind, name, tmp_path):
    with pytest.raises(UsageError, match="expected lower-case words of letters and digits joined by single dashes"):
        write_plugin(kind, name, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_the_prefix_is_not_given_twice(tmp_path):
    for name in ("mlx-spec-thing", "mlx_spec_thing"):
        with pytest.raises(UsageError, match=f"found '{name}', with the prefix every plugin gets"):
            write_plugin("drafter", name, tmp_path)


@pytest.mark.parametrize(
    ("kind", "name", "found"),
    [
        ("drafter", "full-model", "a drafter kind that an installed plugin serves"),
        ("drafter", "prompt-lookup", "a drafter kind that an installed plugin serves"),
        ("drafter", "none", "a drafter kind that an installed plugin serves"),
        ("drafter", "core", "the name of a plugin that is installed"),
        ("drafter", "fake-one", "the name of a plugin that is installed (fake-dist)"),
        ("family", "fake-one", "the name of a plugin that is installed (fake-dist)"),
        ("family", "fake-type", "a target model_type that an installed plugin serves"),
    ],
)
def test_taken_names_are_refused(kind, name, found, site, tmp_path):
    source = (
        "from mlx_spec import hookimpl\n@hookimpl\ndef spec_register(register):\n    register.target('fake_type')\n"
    )
    site.install("fake-dist", "fake-one", source)
    with pytest.raises(UsageError) as refused:
        write_plugin(kind, name, tmp_path / "out")
    assert str(refused.value.found).startswith(found) and refused.value.code == "U60"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("there", ["folder", "full folder", "file", "dangling link"])
def test_what_is_there_already_is_left_alone(there, tmp_path):
    place = tmp_path / "mlx-spec-thing"
    if there == "file":
        place.write_text("mine")
    elif there == "dangling link":
        place.symlink_to(tmp_path / "nowhere")
    else:
        place.mkdir()
        if there == "full folder":
            (place / "mine").write_text("mine")
    before = (sorted(tmp_path.iterdir()), everything(tmp_path))
    with pytest.raises(UsageError, match="expected nothing there yet") as refused:
        write_plugin("drafter", "thing", tmp_path)
    assert refused.value.code == "U61"
    assert (sorted(tmp_path.iterdir()), everything(tmp_path)) == before


def test_a_failure_in_the_middle_leaves_nothing(tmp_path, monkeypatch):
    written = []

    def fail(self: Path, text: str, **options: object) -> None:
        written.append(self.name)
        if len(written) == 4:
            raise OSError(28, "No space left on device")
        self.write_bytes(text.encode())

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(UsageError, match="found No space left on device") as refused:
        write_plugin("family", "thing", tmp_path)
    assert refused.value.code == "U62"
    assert len(written) == 4 and list(tmp_path.iterdir()) == []


def test_a_parent_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="a place that can be written to"):
        write_plugin("drafter", "thing", tmp_path / "file")


def test_a_mark_that_means_nothing_is_an_error():
    with pytest.raises(KeyError, match="template a has the mark @nobody@"):
        scaffold._fill("x @nobody@ y", {"name": "n"}, "a")
    assert scaffold._fill("a@b.c @hookimpl\n@name@", {"name": "n"}, "a") == "a@b.c @hookimpl\nn"


def test_the_command_lists_what_it_wrote_and_what_comes_next(spec, tmp_path):
    done = spec("new", "drafter", "thing")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "mlx-spec-thing/src/mlx_spec_thing/drafter.py" in lines
    assert lines[-3:] == [
        "Next:",
        "  pip install -e 'mlx-spec-thing[testing]'",
        "  cd mlx-spec-thing && python -m pytest",
    ]
    again = spec("new", "drafter", "thing")
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.count("\n") == 1 and "expected nothing there yet" in again.stderr


def test_the_command_without_a_name_is_bad_usage(spec):
    for arguments in ((), ("drafter",), ("plugin", "x")):
        assert spec("new", *arguments).returncode == 2
