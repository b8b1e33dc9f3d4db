"""Who may import whom: core no plugin, plugins not each other, the light modules nothing heavy."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "core" / "src" / "mlx_spec"
PLUGINS = {p.name: p for p in sorted((ROOT / "plugins").glob("*/src/*")) if p.name.startswith("mlx_spec_")}
HEAVY = {"mlx", "mlx_lm", "pydantic", "pydantic_settings", "rich", "transformers", "numpy", "huggingface_hub"}
LIGHT = [
    *("__init__", "types", "errors", "hookspecs", "lane", "models", "draft_state", "defaults"),
    *("registry", "plugins", "discovery", "settings", "cli/__init__", "cli/output", "cli/plugins", "cli/doctor"),
]


def imports(path: Path, *, module_level: bool = False) -> Iterator[str]:
    """Top-level packages a file imports; relative imports are left out, so are those under TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    nodes: Iterator[ast.AST] = iter(_run_at_import(tree)) if module_level else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").split(".")[0]


def _run_at_import(node: ast.AST) -> list[ast.AST]:
    """Statements that run when the module is imported."""
    found: list[ast.AST] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        found += [child, *_run_at_import(child)]
    return found


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def test_there_is_something_to_check():
    assert len(files(CORE)) > 20 and PLUGINS


def test_core_imports_no_plugin():
    assert {(p.name, i) for p in files(CORE) for i in imports(p) if i.startswith("mlx_spec_")} == set()


@pytest.mark.parametrize("name", PLUGINS)
def test_plugins_do_not_import_each_other(name):
    found = {i for path in files(PLUGINS[name]) for i in imports(path) if i.startswith("mlx_spec_")}
    assert found <= {name}


@pytest.mark.parametrize("name", PLUGINS)
def test_the_plugin_module_imports_nothing_heavy(name):
    folder = PLUGINS[name]
    for path in (folder / "__init__.py", folder / "plugin.py"):
        assert set(imports(path, module_level=True)) & HEAVY == set()


@pytest.mark.parametrize("name", LIGHT)
def test_light_modules_stay_light(name):
    assert set(imports(CORE / f"{name}.py", module_level=True)) & HEAVY == set()


def test_one_module_reads_entry_points():
    readers = {p.name for p in files(CORE) if {"importlib_metadata", "pkg_resources"} & set(imports(p))}
    assert readers == {"discovery.py"}
