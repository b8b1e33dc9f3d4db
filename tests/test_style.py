"""House style that a machine can check: sizes, annotations, docstrings, no environment reads, no bare assert."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE, MAX_FUNCTION, MAX_P90, MAX_FIRST_LINE = 400, 60, 35, 100
SOURCES = sorted(
    [*(ROOT / "core" / "src").rglob("*.py"), *ROOT.glob("plugins/*/src/**/*.py"), *ROOT.glob("examples/*/src/**/*.py")]
)
SCRIPTS = sorted({path for name in ("bench", "examples", "tools") for path in (ROOT / name).rglob("*.py")} - {*SOURCES})
TESTS = sorted(
    path
    for pattern in ("tests", "core/tests", "plugins/*/tests", "examples/*/tests")
    for folder in ROOT.glob(pattern)
    for path in folder.rglob("*.py")
    if path != Path(__file__).resolve()
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree(path)) if isinstance(node, Function)]


def lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def offences(paths: list[Path], rule: Callable[[Path], Iterator[object]]) -> list[str]:
    """ "file: what" of everything a rule objects to."""
    return [f"{path.relative_to(ROOT)}: {what}" for path in paths for what in rule(path)]


def test_there_is_something_to_check():
    assert len(SOURCES) > 40 and SCRIPTS
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == {"core", "plugins", "examples"}


def test_sizes():
    def too_long(path: Path) -> Iterator[object]:
        count = len(path.read_text().splitlines())
        if count > MAX_FILE:
            yield f"{count} lines"
        yield from (f"{node.name} has {lines(node)} lines" for node in functions(path) if lines(node) > MAX_FUNCTION)

    assert offences([*SOURCES, *SCRIPTS], too_long) == []


def test_most_functions_are_small():
    sizes = sorted(lines(node) for path in SOURCES for node in functions(path))
    assert sizes[int(len(sizes) * 0.9)] <= MAX_P90


def test_nothing_is_left_for_later():
    """No stub, no note to self: what is not there is refused with a message or not offered."""
    words = re.compile(r"NotImplementedError|\b(TODO|FIXME|XXX)\b")

    def unfinished(path: Path) -> Iterator[object]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if words.search(line):
                yield f"line {number}: {line.strip()}"

    assert offences([*SOURCES, *SCRIPTS, *TESTS], unfinished) == []


def test_tests_skip_nothing():
    """Nor does one promise to fail: marks and calls of pytest that let a test pass unrun."""

    def skipped(path: Path) -> Iterator[object]:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and node.attr in ("skip", "skipif", "xfail", "importorskip"):
                yield f"line {node.lineno}: {ast.unparse(node)}"

    assert offences(TESTS, skipped) == []


def test_who_catches_everything_says_why():
    """A handler of Exception or of anything has its reason beside it."""

    def silent(path: Path) -> Iterator[object]:
        text = path.read_text().splitlines()
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            kind = "" if node.type is None else ast.unparse(node.type)
            if kind in ("", "Exception", "BaseException") and "  # " not in text[node.lineno - 1]:
                yield f"line {node.lineno}: except {kind}"

    assert offences([*SOURCES, *SCRIPTS, *TESTS], silent) == []


def test_who_drops_an_exception_says_why():
    """A handler that neither raises nor looks at what it caught has its reason within it."""

    def dropped(path: Path) -> Iterator[object]:
        text = path.read_text().splitlines()
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            inside = [part for statement in node.body for part in ast.walk(statement)]
            if any(
                isinstance(part, ast.Raise) or (isinstance(part, ast.Name) and part.id == node.name) for part in inside
            ):
                continue
            if not any(
                "  # " in line or line.lstrip().startswith("# ")
                for line in text[node.lineno - 1 : node.body[-1].end_lineno]
            ):
                yield f"line {node.lineno}: {text[node.lineno - 1].strip()}"

    assert offences([*SOURCES, *SCRIPTS], dropped) == []


def test_everything_is_annotated():
    def bare(path: Path) -> Iterator[object]:
        for node in functions(path):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            arguments += [a for a in (node.args.vararg, node.args.kwarg) if a is not None]
            missing = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
            if missing or (node.returns is None and node.name != "__init__"):
                yield f"{node.name}({', '.join(missing)})"

    assert offences(SOURCES, bare) == []


def test_docstrings():
    def wrong(path: Path) -> Iterator[object]:
        if not ast.get_docstring(tree(path)):
            yield "no module docstring"
        for node in ast.walk(tree(path)):
            if isinstance(node, Function | ast.ClassDef | ast.Module):
                first = (ast.get_docstring(node) or "").partition("\n")[0]
                if len(first) > MAX_FIRST_LINE:
                    yield f"{len(first)} characters: {first}"

    assert offences([*SOURCES, *SCRIPTS], wrong) == []


def test_no_bare_assert():
    def asserts(path: Path) -> Iterator[object]:
        return (node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.Assert))

    assert offences(SOURCES, asserts) == []


def test_the_environment_is_read_in_settings_alone():
    def reads(path: Path) -> Iterator[object]:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv"):
                yield node.lineno

    settings = ROOT / "core" / "src" / "mlx_spec" / "settings.py"
    assert offences([settings], reads) != []
    assert offences([path for path in SOURCES if path != settings], reads) == []


def test_temporary_folders_are_gone_when_their_work_is_done():
    """A `with` block removes its folder; what `mkdtemp` makes stays, so one place alone calls it."""

    def stays(path: Path) -> Iterator[object]:
        for node in ast.walk(tree(path)):
            if "mkdtemp" in (getattr(node, "attr", ""), getattr(node, "id", "")):
                yield node.lineno

    common = ROOT / "bench" / "common.py"  # removed as the process ends
    assert len(offences([common], stays)) == 1
    others = [path for path in [*SOURCES, *SCRIPTS, *TESTS, ROOT / "conftest.py"] if path != common]
    assert offences(others, stays) == []


def test_no_swallowed_exceptions():
    def silent(path: Path) -> Iterator[object]:
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ExceptHandler) or not all(isinstance(s, ast.Pass) for s in node.body):
                continue
            if node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"):
                yield node.lineno

    assert offences(SOURCES, silent) == []
