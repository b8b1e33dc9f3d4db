"""Makers of generated documentation blocks: each reads the code and returns Markdown."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from docbase import CORE, WIDTH, code, packages, plugin_names, prose, records, signature, table, use_workspace_plugins

__all__ = ["MAKERS", "packages", "plugin_names", "use_workspace_plugins"]


# -- hooks ---------------------------------------------------------------------------------------------


@cache
def hook_specs() -> dict[str, Callable[..., Any]]:
    """Hook name -> specification, in the order of hookspecs.py."""
    from mlx_spec import hookspecs

    return {name: value for name, value in vars(hookspecs).items() if hasattr(value, f"{hookspecs.PROJECT}_spec")}


def first_result(name: str) -> bool:
    """Whether the first answer that is not None counts."""
    return bool(hook_specs()[name].mlx_spec_spec["firstresult"])


def hook(name: str) -> str:
    """One hook: signature, who is asked, who implements it here, docstring."""
    function = hook_specs()[name]
    asked = "The first answer that is not `None` counts." if first_result(name) else "Every plugin is asked."
    owners = [record.name for record in records() if name in record.hooks]
    doc = inspect.getdoc(function) or ""
    return (
        f"```python\n{signature(function, name)}\n```\n\n{prose(doc)}\n\n"
        f"{asked} Implemented by {code(owners) or 'nobody yet'}."
    )


def api_surface() -> dict[str, dict[str, list[str]]]:
    """What other people build on: exported names, and the arguments of every hook in order."""
    import mlx_spec
    from mlx_spec import state, testing

    hooks = {name: list(inspect.signature(f).parameters) for name, f in hook_specs().items()}
    names = {name: [] for name in mlx_spec.__all__}
    more = {module.__name__: {name: [] for name in module.__all__} for module in (state, testing)}
    return {"hooks": hooks, "mlx_spec": names, **more}


# -- command line --------------------------------------------------------------------------------------


def command_names() -> list[str]:
    """Built-in commands of `spec`, in the order of its help."""
    from mlx_spec.cli import COMMANDS

    return list(COMMANDS)


def cli(name: str) -> str:
    """Help of one command, or of `spec` itself when no name is given."""
    from click.testing import CliRunner

    from mlx_spec.cli import cli as group

    arguments = [name, "--help"] if name else ["--help"]
    result = CliRunner().invoke(group, arguments, prog_name="spec", terminal_width=WIDTH, max_content_width=WIDTH)
    if result.exit_code:
        raise SystemExit(f"spec {name} --help: found exit {result.exit_code} ({result.output}), expected 0.")
    return f"```text\n$ {' '.join(['spec', *arguments])}\n{result.output.strip()}\n```"


# -- errors --------------------------------------------------------------------------------------------


def error_tables() -> dict[str, tuple[Any, ...]]:
    """Package -> its table of codes."""
    return {
        name: import_module(f"{name}.codes").CODES
        for name, folder in packages().items()
        if (folder / "codes.py").exists()
    }


def errors(argument: str) -> str:
    """Codes of one package; `mlx_spec:U` keeps those that start with U."""
    from mlx_spec.codes import STEPS

    package, _, prefix = argument.partition(":")
    rows = [
        (f"`{entry.code}`", entry.meaning, STEPS[entry.step], code(entry.where))
        for entry in error_tables()[package]
        if entry.code.startswith(prefix)
    ]
    return table(("code", "meaning", "way out", "raised in"), rows)


# -- plugins -------------------------------------------------------------------------------------------


def families(argument: str) -> str:
    """One row per plugin of this repository, core included, from what it registers."""
    rows = []
    for record in records():
        claims = record.claims
        drafters = [
            f"{code([c.kind])}{' (' + code(c.model_types) + ')' if c.model_types else ''}" for c in claims.drafters
        ]
        targets = code(claims.targets) or "every other causal LM of mlx-lm whose caches roll back"
        kernels = ", ".join(f"`{k.op}` ({'/'.join(k.backends)})" for k in claims.kernels) or "-"
        demo = ", ".join(d.name for d in claims.demos) or "-"
        rows.append((record.distribution, targets, ", ".join(drafters) or "-", kernels, demo))
    return table(("distribution", "target model_types", "drafters", "kernels", "demo pair"), rows)


def capability_flags(argument: str) -> str:
    """The flags of `Capabilities`: default, and the comment beside each."""
    from mlx_spec.types import Capabilities

    source = (CORE / "types.py").read_text()
    body = source.partition("class Capabilities:")[2].partition("\n\n\n")[0]
    comments = dict(re.findall(r"^    (\w+):[^#\n]*?#\s*(.+)$", body, re.MULTILINE))
    rows = [(f"`{f.name}`", f"`{f.default!r}`", comments.get(f.name, "")) for f in fields(Capabilities)]
    return table(("flag", "default", "meaning"), rows)


def capabilities(argument: str) -> str:
    """What every target and drafter class of this repository declares."""
    rows = [
        (
            f"`{cls.__name__}`",
            cls.__module__.partition(".")[0],
            _declared(cls),
            code(cls.taps if kind == "drafter" else cls.tap_names)
            if not _computed(cls, kind)
            else "depends on the model",
        )
        for kind, cls in _sides()
    ]
    return table(("class", "package", "declares beyond the defaults", "taps (wanted or offered)"), rows)


def _computed(cls: Any, kind: str) -> bool:
    return isinstance(inspect.getattr_static(cls, "taps" if kind == "drafter" else "tap_names"), property)


def _declared(cls: Any) -> str:
    shown = [f"{f.name}={getattr(cls.capabilities, f.name)!r}" for f in fields(cls.capabilities) if _differs(cls, f)]
    return code(shown) or "-"


def _differs(cls: Any, field: Any) -> bool:
    return bool(getattr(cls.capabilities, field.name) != field.default)


def _sides() -> list[tuple[str, Any]]:
    """("target" or "drafter", class) of every concrete side in the packages of this repository."""
    from mlx_spec.models import Drafter, Target

    found = []
    for package, folder in packages().items():
        for path in sorted(folder.glob("*.py")):
            tree = ast.parse(path.read_text())
            names = [
                n.name for n in tree.body if isinstance(n, ast.ClassDef) and n.name.endswith(("Target", "Drafter"))
            ]
            if not names or path.stem == "models":
                continue
            module = import_module(f"{package}.{path.stem}")
            for name in names:
                cls = getattr(module, name)
                if issubclass(cls, Target | Drafter) and not inspect.isabstract(cls):
                    found.append(("target" if issubclass(cls, Target) else "drafter", cls))
    return found


# -- settings ------------------------------------------------------------------------------------------


def settings(argument: str) -> str:
    """Environment variables: names, type, default, meaning."""
    from mlx_spec.settings import variables
    from mlx_spec.settings_model import Settings

    rows = []
    for name, field in Settings.model_fields.items():
        own, *twins = variables(name)
        default = (
            "`$XDG_CACHE_HOME/mlx-spec`, else `~/.cache/mlx-spec`" if name == "cache_dir" else _shown(field.default)
        )
        rows.append((f"`{own}`", default, f"{field.description}" + "".join(f"; also `{twin}`" for twin in twins)))
    return table(("variable", "default", "meaning"), rows)


def _shown(value: object) -> str:
    if value in (None, ()):
        return "unset"
    return f"`{int(value)}`" if isinstance(value, bool) else f"`{value}`"


# -- conformance kit -----------------------------------------------------------------------------------


def contract_names() -> list[str]:
    """The contract classes of the kit."""
    from mlx_spec import testing

    return [name for name in testing.__all__ if name.endswith("Contract")]


def contract(name: str) -> str:
    """One contract: what it is for, and the tests a subclass inherits."""
    from mlx_spec import testing

    cls = getattr(testing, name)
    shared = set(dir(cls.__mro__[1]))
    tests = [(n, getattr(cls, n)) for n in dir(cls) if n.startswith("test") and n not in shared]
    tests.sort(key=lambda item: item[1].__code__.co_firstlineno)
    rows = [(f"`{n}`", _needs(f), (inspect.getdoc(f) or "").partition("\n\n")[0]) for n, f in tests]
    return f"{prose(_own_doc(cls))}\n\n" + table(("test", "runs with", "what it proves"), rows)


def _needs(function: Any) -> str:
    given = getattr(function, "mlx_spec_needs_given", "")
    if given:
        return f"`{given}` given"
    return " or ".join(f"`{name}`" for name in getattr(function, "mlx_spec_needs", ())) or "always"


def contract_capabilities(argument: str) -> str:
    """Names a contract subclass may declare."""
    from mlx_spec.testing import CAPABILITIES

    return table(("capability", "meaning"), [(f"`{name}`", text) for name, text in CAPABILITIES.items()])


# -- Python API ----------------------------------------------------------------------------------------


def api(name: str) -> str:
    """One public name: signature and docstring."""
    import mlx_spec

    value = getattr(import_module(name.rpartition(".")[0]) if "." in name else mlx_spec, name.rpartition(".")[2])
    if inspect.isclass(value):
        return _class(value, name.rpartition(".")[2])
    if inspect.isfunction(value):
        return f"```python\n{signature(value, value.__name__)}\n```\n\n{prose(inspect.getdoc(value) or '')}"
    shown = re.sub(r"^typing\.", "", str(value)) if not isinstance(value, str) else repr(value)
    return f"`{shown}`"


def _class(cls: type, name: str) -> str:
    parts = [prose(_own_doc(cls))]
    rows = [
        # a bound class method: of another, inspect does not find the docstring it inherits
        (f"`{n}{_arguments(v)}`", " ".join((inspect.getdoc(getattr(cls, n) if isinstance(v, classmethod) else v) or "").split()))
        for n, v in ((n, inspect.getattr_static(cls, n)) for n in vars(cls) if not n.startswith("_"))
        if isinstance(v, property | classmethod | staticmethod) or inspect.isfunction(v)
    ]
    attributes = [
        (f"`{f.name}`", "" if f.default is MISSING and f.default_factory is MISSING else f"`{_default(f)}`")
        for f in (fields(cls) if hasattr(cls, "__dataclass_fields__") else ())
        if not f.name.startswith("_")
    ]
    if attributes and "Attributes:" not in _own_doc(cls):
        parts.append(table(("field", "default"), attributes))
    if rows:
        parts.append(table(("method or property", "what it does"), rows))
    bases = [base.__name__ for base in cls.__bases__ if base.__module__.startswith("mlx_spec")]
    if bases:
        parts.insert(0, f"A subclass of {code(bases)}.")
    return "\n\n".join(part for part in parts if part)


def _own_doc(cls: type) -> str:
    """The class docstring, "" for the signature a dataclass makes of itself."""
    doc = inspect.cleandoc(cls.__doc__ or "")
    return "" if doc.startswith(f"{cls.__name__}(") else doc


def _default(field: Any) -> str:
    return repr(field.default) if field.default is not MISSING else f"{field.default_factory.__name__}()"


def _arguments(value: Any) -> str:
    if isinstance(value, property):
        return ""
    function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    names = [n for n in inspect.signature(function).parameters if n not in ("self", "cls")]
    return f"({', '.join(names)})"


# -- figures -------------------------------------------------------------------------------------------

RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results"


def cpu(argument: str) -> str:
    """What `bench/cpu.py` found in both dtypes, with activations as they are and rounded, side by side."""
    forms = ("", "_int16", "_int8")
    names = [f"cpu{dtype}{form}" for dtype in ("", "_bfloat16") for form in forms]
    found = [json.loads((RESULTS / f"{name}.json").read_text()) for name in names]
    first = found[0]
    cells: dict[str, Callable[[Any], str]] = {
        "one token": lambda d: _block(d, "1"),
        "a block of 4 rows": lambda d: _block(d, "4"),
        "a block of 8 rows": lambda d: _block(d, "8"),
        "plain decoding": lambda d: _spread(d["decode"]["per_second"]["ours"], "{:.0f}") + " tokens/s",
        "the same by llama.cpp": lambda d: _spread(d["decode"]["per_second"]["llama"], "{:.0f}") + " tokens/s",
        f"after {first['far']['before']:,} tokens": lambda d: (
            _spread(d["far"]["per_second"]["ours"], "{:.0f}") + " tokens/s"
        ),
        "that by llama.cpp": lambda d: _spread(d["far"]["per_second"]["llama"], "{:.0f}") + " tokens/s",
        "prompt-lookup over plain, where replies repeat the prompt": lambda d: (
            _spread(d["lookup"]["adaptive"]["over_plain"], "{:.2f}") + " times"
        ),
        f"a prompt of {first['prompt']['tokens']} tokens": lambda d: _spread(d["prompt"]["ms"], "{:.0f}") + " ms",
    }
    kinds = (data["dtype"] + f" {data['activations']}".removesuffix(" full") for data in found)
    titles = (f"{first['model'].removesuffix('.gguf')}, {first['threads']} cores", *kinds)
    machine = f"{first['machine']['device_info']['device_name']}, {first['kernels'].partition(' (')[0]}"
    return (
        f"{table(titles, [(label, *map(cell, found)) for label, cell in cells.items()])}\n\n"
        f"Measured on {machine}; every run is in `bench/results`, in {', '.join(f'`{name}.json`' for name in names)}."
    )


def _spread(values: dict[str, Any], form: str) -> str:
    low, high = (form.format(value) for value in values["quartiles"])
    return f"{form.format(values['median'])} ({low}-{high})"


def _block(data: dict[str, Any], rows: str) -> str:
    """Milliseconds of a forward and, of several rows, its time in single tokens."""
    cell = data["verify"]["rows"][rows]
    over = "" if rows == "1" else f", as long as {cell['over_one_row']['median']:.2f} single ones"
    return f"{_spread(cell['ms'], '{:.1f}')} ms{over}"


MAKERS: dict[str, Callable[[str], str]] = {
    "api": api,
    "capabilities": capabilities,
    "capability-flags": capability_flags,
    "cli": cli,
    "cpu": cpu,
    "contract": contract,
    "contract-capabilities": contract_capabilities,
    "errors": errors,
    "families": families,
    "hook": hook,
    "settings": settings,
}
