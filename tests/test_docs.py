"""The documentation tells the truth: generated blocks are fresh, code runs, commands parse, links lead somewhere."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import docblocks  # noqa: E402
import docs  # noqa: E402
import snippets  # noqa: E402

HAND_WRITTEN = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES = {path.name: path for path in [*docs.PAGES, *HAND_WRITTEN]}
READMES = [
    path
    for pattern in ("core/README.md", "plugins/*/README.md", "plugins/*/training/README.md", "examples/*/README.md")
    for path in sorted(ROOT.glob(pattern))
]
PLUGIN = re.compile(r"(src|tests)/.*|pyproject\.toml")


@pytest.fixture(autouse=True)
def workspace_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only the plugins of this repository; forgotten afterwards."""
    from mlx_spec import plugins

    monkeypatch.setenv("MLX_SPEC_PLUGINS", ",".join(docblocks.plugin_names()))
    plugins.reset()
    yield
    plugins.reset()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the names the pages use: target-dir and drafter-dir, a tiny Gemma 4 pair."""
    from mlx_spec_gemma4.tiny import write_tiny

    out = tmp_path_factory.mktemp("docs")
    target, drafter = write_tiny(out, "E", 3)
    target.rename(out / "target-dir")
    drafter.rename(out / "drafter-dir")
    (out / "notes.txt").write_text("one two three, one two three\n")
    return out


@pytest.fixture
def workplace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That folder as the current one, with one cache for all pages, so that the pair is probed once."""
    from mlx_spec.settings import reset_settings

    monkeypatch.chdir(folder)
    monkeypatch.setenv("MLX_SPEC_CACHE_DIR", str(folder / "cache"))
    reset_settings()
    return folder


# -- generated blocks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [path.name for path in docs.PAGES])
def test_generated_blocks_are_fresh(name):
    text = PAGES[name].read_text()
    assert docs.render(text) == text, "stale; run make docs-update"


def entries(maker: str) -> list[str]:
    """Arguments of every block of one maker, over all pages."""
    return [argument for page in docs.PAGES for name, argument in docs.blocks(page) if name == maker]


def test_every_maker_is_used_and_every_block_is_closed():
    assert {name for page in docs.PAGES for name, _ in docs.blocks(page)} == set(docblocks.MAKERS)
    for page in docs.PAGES:
        text = page.read_text()
        assert text.count("<!-- generated: ") == text.count("<!-- end -->") == len(docs.blocks(page)), page.name


def test_every_hook_has_one_entry():
    assert sorted(entries("hook")) == sorted(docblocks.hook_specs())
    headings = re.findall(r"^### (spec_\w+)$", PAGES["hooks.md"].read_text(), re.MULTILINE)
    assert headings == list(docblocks.hook_specs())


def test_hook_entries_show_the_real_signature():
    text = PAGES["hooks.md"].read_text()
    for name, function in docblocks.hook_specs().items():
        shown = re.search(rf"def {name}\((.*?)\)", text, re.DOTALL)
        assert re.findall(r"(\w+): ", shown[1]) == list(inspect.signature(function).parameters)


def test_every_command_has_its_help():
    assert sorted(entries("cli")) == sorted(["", *docblocks.command_names()])


def test_every_code_has_an_entry():
    asked = entries("errors")
    letters = {argument.partition(":")[2] for argument in asked if argument.startswith("mlx_spec:")}
    assert {code.code[0] for code in docblocks.error_tables()["mlx_spec"]} == letters
    assert set(docblocks.error_tables()) - {"mlx_spec"} == {argument for argument in asked if ":" not in argument}


def test_every_line_of_the_governor_is_explained():
    """Every text that its `state` is made of stands in the table; figures in between are left out."""
    told = set()
    for name in ("governor", "pilot"):
        tree = ast.parse((ROOT / f"core/src/mlx_spec/{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == "state":
                body = ast.walk(ast.Module(node.body[1:], []))  # without the docstring
                told |= {part.value for part in body if isinstance(part, ast.Constant) and isinstance(part.value, str)}
    texts = {text.strip(" ();") for text in told if re.search(r"[a-z]{4}", text)}
    assert {"not started", "probing now", "times in a row", "plain steps", "x plain estimated"} <= texts
    page = PAGES["benchmarking.md"].read_text()
    assert [text for text in sorted(texts) if text not in page] == []


def test_every_method_says_what_it_does():
    """Docstrings that are inherited too; fields of data classes (no brackets) may go by their names."""
    silent = re.findall(r"^\| `\w+\(.*\)` \|\s*\|$", PAGES["python-api.md"].read_text(), re.M)
    assert silent == []


def test_every_public_name_is_documented():
    import mlx_spec
    from mlx_spec import state

    text = PAGES["python-api.md"].read_text()
    headings = {name.strip("`") for name in re.findall(r"^### (\S+)$", text, re.MULTILINE)}
    assert headings >= set(mlx_spec.__all__) | set(state.__all__)
    documented = {name.rpartition(".")[2] for name in entries("api")} | {"hookimpl", "hookspec"}
    assert documented >= set(mlx_spec.__all__) | set(state.__all__)


@pytest.mark.parametrize("package", ["mlx_spec", "mlx_spec.state", "mlx_spec.testing"])
def test_public_names_are_all_there_and_hide_no_module(package):
    """A lazy name spelt like a submodule would become that module once somebody imports it."""
    module = importlib.import_module(package)
    names = module.__all__
    assert (len(names) == len(set(names)) and dir(module) == sorted(names)) or package == "mlx_spec.state"
    modules = {path.stem for path in Path(module.__file__).parent.iterdir()}
    assert set(names) & modules == set()
    for name in names:
        assert getattr(module, name) is not None


def test_hooks_speak_of_public_types_only():
    import mlx_spec

    named = {
        word
        for function in docblocks.hook_specs().values()
        for parameter in inspect.signature(function).parameters.values()
        for word in re.findall(r"[A-Z]\w+", str(parameter.annotation))
    }
    assert {"Lane", "Draft", "Target"} <= named
    assert named - set(mlx_spec.__all__) == {"Group", "Mapping", "Sequence", "Path"}


def test_the_kit_is_documented():
    from mlx_spec import testing

    text = PAGES["conformance.md"].read_text()
    assert entries("contract") == re.findall(r"^### (\w+Contract)$", text, re.MULTILINE)
    assert sorted(entries("contract")) == docblocks.contract_names()
    assert [name for name in testing.__all__ if name not in text] == []


def test_a_changed_block_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- generated: settings -->\nold\n<!-- end -->\nafter\n")
    new = docs.render(page.read_text())
    assert new.startswith("before\n") and new.endswith("<!-- end -->\nafter\n")
    assert "MLX_SPEC_CACHE_DIR" in new and "old" not in new and docs.render(new) == new


def test_nothing_was_taken_away_from_the_public_api():
    golden = json.loads(docs.GOLDEN.read_text())
    assert docs.lost(golden, docblocks.api_surface()) == []
    assert golden == docblocks.api_surface(), "something was added; run make docs-update"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda api: api["hooks"].pop("spec_verify"), ["hooks spec_verify"]),
        (lambda api: api["mlx_spec"].pop("load"), ["mlx_spec load"]),
        (lambda api: api["hooks"].update(spec_verify=["draft", "lane"]), ["hooks spec_verify: arguments lane, draft"]),
        (lambda api: api["hooks"].update(spec_verify=["lane"]), ["hooks spec_verify: arguments lane, draft"]),
        (lambda api: api["hooks"].update(spec_verify=["lane", "draft", "more"], spec_new=["lane"]), []),
    ],
)
def test_the_api_golden_only_takes_additions(change, found):
    golden, now = json.loads(docs.GOLDEN.read_text()), json.loads(docs.GOLDEN.read_text())
    change(now)
    assert docs.lost(golden, now) == found


# -- code and commands ---------------------------------------------------------------------------------


def with_python() -> list[str]:
    return [n for n, p in PAGES.items() if any(s.language == "python" and not s.title for s in snippets.snippets(p))]


@pytest.mark.parametrize("name", with_python())
def test_python_blocks_run(name, workplace, request):
    if name == "tutorial-drafter.md":
        request.getfixturevalue("tutorial")
    snippets.run_python(snippets.snippets(PAGES[name]), {"__name__": "__docs__"})


def all_commands() -> list[tuple[str, list[str]]]:
    return [(name, words) for name, path in PAGES.items() for words in snippets.commands(snippets.snippets(path))]


def readme_commands() -> list[tuple[str, list[str]]]:
    """Those of the READMEs of packages."""
    return [
        (path.relative_to(ROOT).as_posix(), words)
        for path in READMES
        for words in snippets.commands(snippets.snippets(path))
    ]


def test_the_pages_show_commands():
    assert sum(words[0] == "spec" for _, words in all_commands()) > 15
    assert sum(words[0] == "make" for _, words in all_commands()) > 3
    assert {page for page, _ in readme_commands()} == {path.relative_to(ROOT).as_posix() for path in READMES}


@pytest.mark.parametrize(
    ("page", "words"),
    [c for c in [*all_commands(), *readme_commands()] if c[1][0] == "spec"],
    ids=lambda v: v if isinstance(v, str) else " ".join(v)[:60],
)
def test_spec_commands_parse(page, words):
    from mlx_spec.cli import cli

    context = cli.make_context("spec", list(words[1:]), resilient_parsing=False)
    name, command, rest = cli.resolve_command(context, [*context._protected_args, *context.args])
    if not rest or rest[-1] not in ("--help", "-h"):
        assert isinstance(command, click.Command)
        command.make_context(name, rest, parent=context)


SCRIPTS = [(page, word) for page, words in readme_commands() for word in words if word.endswith(".py")]


@pytest.mark.parametrize(("page", "script"), SCRIPTS)
def test_scripts_are_where_the_readmes_say(page, script):
    assert (ROOT / script).is_file()


@pytest.mark.parametrize(("page", "words"), [c for c in all_commands() if c[1][0] == "make"], ids=str)
def test_make_commands_exist(page, words):
    done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


KIT = ["python", "-m", "mlx_spec.testing"]


@pytest.mark.parametrize("words", [w for _, w in all_commands() if w[:3] == KIT], ids=lambda words: " ".join(words[3:]))
def test_kit_commands_run(words, workplace, capsys):
    from mlx_spec.testing.__main__ import main

    assert main(words[3:]) == 0
    assert capsys.readouterr().out


def test_messages_name_commands_that_exist():
    named = [
        (path.name, command)
        for folder in docblocks.packages().values()
        for path in sorted(folder.rglob("*.py"))
        for command in re.findall(r"(?:`|[Rr]un |[Ss]ee |with )spec ([a-z][a-z-]+)", path.read_text())
    ]
    assert named
    assert [(where, command) for where, command in named if command not in docblocks.command_names()] == []


# -- the tutorial's plugin -----------------------------------------------------------------------------


def tutorial_files() -> dict[str, str]:
    found = snippets.snippets(PAGES["tutorial-drafter.md"])
    return {s.title: s.text for s in found if s.title and PLUGIN.fullmatch(s.title)}


@pytest.fixture
def tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The tutorial's plugin, installed as its pages say: files, and metadata with the entry point."""
    from mlx_spec import plugins

    project = write_tutorial(tmp_path / "mlx-spec-suffix")
    monkeypatch.syspath_prepend(str(project / "src"))
    monkeypatch.setenv("MLX_SPEC_PLUGINS", ",".join([*docblocks.plugin_names(), "suffix"]))
    plugins.reset()
    yield project
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlx_spec_suffix"]:
        del sys.modules[name]


def write_tutorial(project: Path) -> Path:
    """Write the files, and beside the package what an installer would write."""
    import tomllib

    for name, text in tutorial_files().items():
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    data = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    info = project / "src" / f"mlx_spec_suffix-{data['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {data['name']}\nVersion: {data['version']}\n")
    entries = "".join(f"{name} = {value}\n" for name, value in data["entry-points"]["mlx_spec"].items())
    (info / "entry_points.txt").write_text(f"[mlx_spec]\n{entries}")
    return project


def test_the_tutorial_plugin_is_short_and_loads(tutorial):
    from mlx_spec.plugins import get_manager

    sources = [text for name, text in tutorial_files().items() if name.startswith("src/")]
    assert len(sources) == 4 and sum(len(text.splitlines()) for text in sources) < 150
    record = get_manager().record("suffix")
    assert record is not None and record.errors == [] and record.distribution == "mlx-spec-suffix"
    assert record.hooks == ("spec_load_drafter", "spec_register")
    assert get_manager().registry.kind_owner("suffix") == "suffix"


def test_the_tutorial_index_finds_the_longest_earlier_match(tutorial):
    import random

    from mlx_spec_suffix.automaton import SuffixAutomaton

    for seed in range(5):
        rng = random.Random(seed)
        tokens = [rng.randrange(3) for _ in range(60)]
        automaton = SuffixAutomaton()
        for n in range(1, len(tokens) + 1):
            automaton.extend(tokens[:n])
            end, length = automaton.match()
            assert length == longest_match(tokens[:n])
            assert tokens[end + 1 - length : end + 1] == tokens[n - length : n]


def longest_match(tokens: list[int]) -> int:
    """Length of the longest suffix that occurs earlier too, by trying every length."""
    n = len(tokens)
    starts = {length: range(n - length) for length in range(1, n)}
    return max((k for k in starts if any(tokens[i : i + k] == tokens[n - k :] for i in starts[k])), default=0)


def test_the_tutorial_plugin_passes_its_own_tests(tutorial):
    path = os.pathsep.join([str(tutorial / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tutorial,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[3-9]\d passed, \d+ deselected", done.stdout, re.MULTILINE), done.stdout


# -- prose ---------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """Heading anchors of a page, as mkdocs makes them."""
    found = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in found}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    path = PAGES[name]
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    assert sorted(re.findall(r": (\S+\.md)$", menu, re.MULTILINE)) == sorted(
        p.name for p in (ROOT / "docs").glob("*.md")
    )


def test_the_readme_tree_is_the_tree():
    block = next(s for s in snippets.snippets(PAGES["README.md"]) if s.language == "text" and "core/" in s.text)
    named = [line.split()[0] for line in block.text.splitlines() if line.strip()]
    assert [name for name in named if not (ROOT / name).exists()] == []
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    folders = {
        "/".join(name.split("/")[:2] if name.startswith("plugins/") else name.split("/")[:1])
        for name in tracked
        if "/" in name
    }
    assert {f for f in folders if not f.startswith(".")} == {name.strip("/") for name in named if name.endswith("/")}


def test_update_writes_what_is_stale_and_drops_no_promise(tmp_path, monkeypatch):
    page, golden = tmp_path / "page.md", tmp_path / "golden" / "api.json"
    page.write_text("<!-- generated: errors mlx_spec:X -->\n<!-- end -->\n")
    monkeypatch.setattr(docs, "PAGES", [page])
    monkeypatch.setattr(docs, "GOLDEN", golden)
    assert docs.update() == [page, golden] and "X00" in page.read_text()
    assert docs.update() == [] and json.loads(golden.read_text()) == docblocks.api_surface()
    golden.write_text(json.dumps({"mlx_spec": {"gone": []}}))
    with pytest.raises(SystemExit, match="mlx_spec gone"):
        docs.update()
    assert json.loads(golden.read_text()) == {"mlx_spec": {"gone": []}}
