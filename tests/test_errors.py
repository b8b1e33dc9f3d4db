"""Every error and finding: a code from the table, used where the table says, with found, expected and next step."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import docblocks  # noqa: E402

EXAMPLES = {path.parent.name: path.parent for path in sorted(ROOT.glob("examples/*/src/*/plugin.py"))}
sys.path.extend(str(folder.parent) for folder in EXAMPLES.values())
PACKAGES = docblocks.packages() | EXAMPLES
TABLES = {name: import_module(f"{name}.codes").CODES for name in PACKAGES}
CODE = re.compile(r"[A-Z]{1,2}\d{2}")
PARTS = {"found", "expected", "next_step"}
FINDING = ("code", "severity", "subject", "found", "expected", "next_step")


class Use(NamedTuple):
    """One place a code is written: package, module, line, code."""

    package: str
    module: str
    line: int
    code: str


@cache
def modules() -> tuple[tuple[str, str, list[ast.AST]], ...]:
    """(package, module, all its nodes) of every source file but the tables themselves."""
    return tuple(
        (package, name, list(ast.walk(ast.parse(path.read_text()))))
        for package, folder in PACKAGES.items()
        for path in sorted(folder.rglob("*.py"))
        if (name := path.relative_to(folder).with_suffix("").as_posix()) != "codes"
    )


@cache
def error_classes() -> frozenset[str]:
    """Names of SpecError and its subclasses, also those plugins define."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for _, _, nodes in modules()
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }
    found = {"SpecError"}
    while True:
        more = {name for name, parents in bases.items() if parents & found} - found
        if not more:
            return frozenset(found - {"PairError"})  # takes findings
        found |= more


def called(node: ast.Call) -> str:
    """Name of what is called, "" for attributes of anything but mlx_spec (click has a UsageError too)."""
    if isinstance(node.func, ast.Name):
        return node.func.id
    return node.func.attr if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "mlx_spec" else ""


def calls(*names: str) -> Iterator[tuple[str, str, ast.Call]]:
    for package, module, nodes in modules():
        for node in nodes:
            if isinstance(node, ast.Call) and called(node) in names:
                yield package, module, node


@cache
def uses() -> tuple[Use, ...]:
    """Every code literal: in calls and class attributes, as default, in tables of codes."""
    return tuple(
        Use(package, module, node.lineno, node.value)
        for package, module, nodes in modules()
        for node in written(nodes)
        if isinstance(node.value, str) and CODE.fullmatch(node.value) and not dtype(node.value)
    )


def dtype(text: str) -> bool:
    """F32 and the like have the shape of a code."""
    from mlx_spec.tensorfiles import DTYPE_BITS

    return text in DTYPE_BITS


def written(nodes: list[ast.AST]) -> Iterator[ast.Constant]:
    """Constants that are given as a code: not the ones that are only compared with, nor keys of other tables."""
    left_out: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Compare):
            left_out |= {id(side) for side in [node.left, *node.comparators]}
        if isinstance(node, ast.Dict):
            left_out |= {id(key) for key in node.keys if key is not None}
    yield from (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in left_out)


# -- the tables ----------------------------------------------------------------------------------------


def test_there_is_something_to_check():
    assert {"mlx_spec", "mlx_spec_gemma4"} <= set(TABLES)
    assert len(uses()) > 100 and len(error_classes()) > 6


def test_codes_are_unique_over_all_packages():
    codes = [entry.code for table in TABLES.values() for entry in table]
    assert sorted(codes) == sorted(set(codes)) and not any(map(dtype, codes))
    meanings = [entry.meaning for table in TABLES.values() for entry in table]
    assert sorted(meanings) == sorted(set(meanings))


@pytest.mark.parametrize("package", TABLES)
def test_tables_are_well_formed(package):
    from mlx_spec.codes import STEPS

    letters = {re.sub(r"\d", "", entry.code) for entry in TABLES[package]}
    assert letters <= set("UELCPGRX") if package == "mlx_spec" else len(letters) == 1 and len(letters.pop()) == 2
    for entry in TABLES[package]:
        assert CODE.fullmatch(entry.code) and entry.step in STEPS and entry.where
        assert entry.meaning[0].isupper() and not entry.meaning.endswith(".") and len(entry.meaning) <= 90


@pytest.mark.parametrize("package", TABLES)
def test_codes_are_used_where_the_table_says_and_nowhere_else(package):
    real: dict[str, set[str]] = {}
    for use in uses():
        if use.package == package:
            real.setdefault(use.code, set()).add(use.module)
    assert {entry.code: set(entry.where) for entry in TABLES[package]} == real


# -- what is raised ------------------------------------------------------------------------------------


def test_every_error_says_found_expected_and_next_step():
    bare = []
    for package, module, node in calls(*error_classes()):
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        empty = [name for name in PARTS & set(given) if isinstance(given[name], ast.Constant) and not given[name].value]
        if not set(given) >= PARTS or empty or not node.args:
            bare.append(f"{package} {module}:{node.lineno}")
    assert bare == []


def test_every_error_has_a_code_of_its_own():
    bare = [
        f"{package} {module}:{node.lineno}"
        for package, module, node in calls(*error_classes())
        if not any(keyword.arg == "code" for keyword in node.keywords)
    ]
    assert bare == []


def test_every_finding_is_complete():
    short = []
    for package, module, node in calls("Finding"):
        given = dict(zip(FINDING, node.args, strict=False)) | {k.arg: k.value for k in node.keywords}
        empty = [name for name, value in given.items() if isinstance(value, ast.Constant) and value.value in ("", None)]
        if set(given) != set(FINDING) or empty:
            short.append(f"{package} {module}:{node.lineno}")
    assert short == []


def test_next_steps_are_sentences():
    """A literal next step starts with a capital: it follows a full stop in the message."""
    wrong = []
    for package, module, node in calls(*error_classes()):
        for keyword in node.keywords:
            text = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if keyword.arg == "next_step" and isinstance(text, str) and not text[0].isupper():
                wrong.append(f"{package} {module}:{node.lineno}: {text}")
    assert wrong == []


def test_the_message_has_one_shape():
    import mlx_spec

    error = mlx_spec.LoadError("weights in x", found="none", expected="one file", next_step="Check it", code="L10")
    assert str(error) == "weights in x: found none, expected one file. Check it."
    assert (error.code, error.exit_code) == ("L10", 1)
    finding = mlx_spec.Finding("P22", "error", "vocabulary", "9 entries", "at most 5", "Use another")
    assert str(finding) == "vocabulary: found 9 entries, expected at most 5. Use another."
    note = mlx_spec.Finding("P26", "note", "context", "9", "99", "Nothing")
    refused = mlx_spec.PairError([note, finding])
    assert refused.code == "P22" and refused.findings == [finding, note] and "context" not in str(refused)


@pytest.mark.parametrize(
    ("found", "shown"), [("", "''"), (" ", "' '"), ("\n", "'\\n'"), (0, "0"), ([], "[]"), ("x", "x")]
)
def test_a_value_of_which_nothing_is_seen_is_quoted(found, shown):
    import mlx_spec

    error = mlx_spec.LoadError("x", found=found, expected="y", next_step="")
    assert str(error) == f"x: found {shown}, expected y."


def test_every_class_has_a_default_code_in_the_table():
    from mlx_spec import errors

    known = {entry.code for entry in TABLES["mlx_spec"]}
    classes = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, errors.SpecError)]
    assert len(classes) > 8 and {cls.code for cls in classes} <= known
