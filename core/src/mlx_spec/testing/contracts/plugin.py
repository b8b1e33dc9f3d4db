"""PluginContract: the plugin module loads beside core alone, cheaply, and its hooks are hooks."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from ...errors import SpecError
from ..faults import broken, require
from .base import Contract, needs_given

if TYPE_CHECKING:
    from ...plugins import PluginRecord
    from ...registry import Register

HEAVY = ("mlx", "mlx_lm", "numpy", "pydantic", "transformers", "torch", "huggingface_hub", "safetensors")
"""Packages a plugin module may not import before a hook needs them: `spec --help` loads every plugin."""


class PluginContract(Contract):
    """What core relies on in a plugin module.

    Attributes:
        plugin: import path of the module the entry point names, e.g. "mlx_spec_gemma4.plugin".
        entry_point: its entry-point name; None when the tests run before anything is installed.
    """

    plugin: ClassVar[str] = ""
    entry_point: ClassVar[str | None] = None
    capabilities: ClassVar[frozenset[str] | set[str] | None] = frozenset()

    @pytest.fixture
    def record(self) -> PluginRecord:
        """What core makes of the module when it is the only plugin."""
        return load_alone(self.entry_point or "under-test", self.plugin)

    def test_it_loads_with_only_core_installed(self, record: PluginRecord) -> None:
        """Imported, checked and registered beside core's own hooks; core's complaint is the message."""
        require(
            record.loaded and not record.errors,
            f"plugin {self.plugin}",
            found="; ".join(str(error) for error in record.errors) or "it not loaded",
            expected="it to load without errors",
            look=f"the module {self.plugin} and its spec_register",
        )

    def test_no_hook_is_misspelt(self) -> None:
        """Every function of the module named spec_... is one of core's hooks."""
        hooks = hook_names()
        for name in public_functions(self.plugin):
            if not name.startswith("spec_") or name in hooks:
                continue
            close = get_close_matches(name, hooks, n=1)
            broken(
                f"function {name} of {self.plugin}",
                found="a name that is no hook: it is never called",
                expected=f"one of {', '.join(hooks)}",
                look=f"did you mean {close[0]}?" if close else "the hooks in mlx_spec.hookspecs",
            )

    def test_hooks_are_marked_and_have_no_defaults(self) -> None:
        """Each is decorated with hookimpl, takes core's argument names, and gives none a default value."""
        module = import_module(self.plugin)
        specs = hook_names()
        for name, function in public_functions(self.plugin).items():
            if name not in specs:
                continue
            require(
                hasattr(function, "mlx_spec_impl"),
                f"function {name} of {self.plugin}",
                found="it without @hookimpl: it is never called",
                expected="a marked hook",
                look="from mlx_spec import hookimpl; @hookimpl above the function",
            )
            allowed = inspect.signature(specs[name]).parameters
            for argument in inspect.signature(getattr(module, name)).parameters.values():
                require(
                    argument.default is argument.empty,
                    f"hook {name} of {self.plugin}",
                    found=f"argument {argument} with a default value",
                    expected=f"{argument.name} without one",
                    look="the function's signature: core always passes every argument, "
                    "a default would only hide a misspelling",
                )
                require(
                    argument.name in allowed,
                    f"hook {name} of {self.plugin}",
                    found=f"argument {argument.name!r}",
                    expected=f"some of {', '.join(allowed)}",
                    look="the spelling of the argument",
                )

    def test_start_up_imports_nothing_heavy(self) -> None:
        """Importing the module and running spec_register leaves mlx and its like unimported."""
        code = (
            "import sys, json\n"
            "from mlx_spec.registry import Register\n"
            f"import {self.plugin} as plugin\n"
            "register = Register('under-test', 'under-test')\n"
            "getattr(plugin, 'spec_register', lambda register: None)(register=register)\n"
            f"print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        require(
            done.returncode == 0,
            f"import of {self.plugin} in a fresh process",
            found=(done.stderr.strip().splitlines() or ["no output"])[-1],
            expected="a clean import",
            look=f"the module level of {self.plugin}",
        )
        found = json.loads(done.stdout.splitlines()[-1])
        require(
            not found,
            f"imports of {self.plugin} at start-up",
            found=", ".join(found),
            expected="none of " + ", ".join(HEAVY),
            look="imports at module level: move them into the hook that needs them, types under TYPE_CHECKING",
        )

    @needs_given("entry_point", "whether an installed distribution offers the plugin is not tested")
    def test_its_entry_point_names_it(self) -> None:
        """The installed distribution offers this module in the group mlx_spec, under a name nobody else has."""
        from ...discovery import discover

        entry = discover([self.entry_point or ""])[0]
        require(
            entry.error is None and entry.value == self.plugin,
            f"entry point {self.entry_point!r} of group mlx_spec",
            found=str(entry.error) if entry.error is not None else entry.value,
            expected=f"{self.plugin} in exactly one installed distribution",
            look="[project.entry-points.mlx_spec] in pyproject.toml; reinstall after changing it",
        )

    def test_what_it_does_not_know_it_leaves_to_others(self, tmp_path: Path) -> None:
        """Load and pairing hooks answer None (or no findings) for a model_type nobody ever claimed."""
        from ...types import DrafterCard, ModelRef

        (tmp_path / "config.json").write_text('{"model_type": "nobody_has_this"}')
        ref = ModelRef("stranger", tmp_path, {"model_type": "nobody_has_this"})
        card = DrafterCard("nobody-has-this", "nobody_has_this")
        calls: dict[str, dict[str, Any]] = {
            "spec_load_target": {"ref": ref, "config": ref.config},
            "spec_load_drafter": {"ref": ref, "card": card, "target": None},
            "spec_validate_pair": {"target": ref, "drafter": ref, "card": card},
        }
        functions = public_functions(self.plugin)
        for name, arguments in calls.items():
            if name not in functions:
                continue
            taken = inspect.signature(functions[name]).parameters
            try:
                answer = functions[name](**{k: v for k, v in arguments.items() if k in taken})
            except Exception as error:  # the author's code: what it raised is what is reported
                answer = f"{type(error).__name__}: {error}"
            require(
                not answer,
                f"{name} of {self.plugin}, asked about a model_type that is not its own",
                found=answer,
                expected="None",
                look=f"the first lines of {name}: return None unless the model_type or the card's kind is yours",
            )

    def test_its_families_write_tiny_checkpoints(self, record: PluginRecord, tmp_path: Path) -> None:
        """Who claims model_types registers a writer: its seed decides the files, unknown options are refused."""
        claims = record.claims
        if claims is None or not (claims.targets or any(c.model_types for c in claims.drafters)):
            return
        require(
            bool(claims.tinies),
            f"tiny checkpoints of {self.plugin}",
            found="no writer",
            expected="one per family, so that users of your family can be tested",
            look='register.tiny("family", "your_package.tiny:write_tiny") in spec_register',
        )
        for family, place in claims.tinies:
            check_writer(family, place, claims, tmp_path / family)


def check_writer(family: str, place: str, claims: Register, out: Path) -> None:
    """A writer writes what its plugin claims, and nothing but its seed decides the bytes."""
    module, _, name = place.partition(":")
    writer = getattr(import_module(module), name)
    made = [writer(out / str(i), seed=seed) for i, seed in enumerate((3, 3, 4))]
    one, same, other = ([bytes_of(path) for path in pair if path is not None] for pair in made)
    look = f"{place}: draw from one generator made from `seed`, write nothing that depends on time or place"
    require(
        one == same, f"tiny {family} written twice with seed 3", found="other bytes", expected="the same", look=look
    )
    require(one != other, f"tiny {family} with seeds 3 and 4", found="the same bytes", expected="others", look=look)
    config = json.loads((made[0][0] / "config.json").read_text())
    require(
        not claims.targets or config.get("model_type") in claims.targets,
        f"model_type of tiny {family}",
        found=repr(config.get("model_type")),
        expected=f"one that the plugin claims: {', '.join(claims.targets)}",
        look=f"{place}, or register.target in spec_register",
    )
    try:
        writer(out / "unknown", seed=3, no_such_option=1)
    except (TypeError, SpecError) as refusal:
        require(
            "no_such_option" in str(refusal),
            f"tiny {family} with an option no_such_option",
            found=f"{type(refusal).__name__}: {refusal}",
            expected="a refusal that names the option",
            look=place,
        )
        return
    broken(
        f"tiny {family} with an option no_such_option",
        found="it written all the same",
        expected="a refusal: a misspelt --set must not go unnoticed",
        look=f"{place}: mlx_spec.testing.check_options(options, those it reads)",
    )


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Files of a checkpoint by name."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}


def load_alone(name: str, module: str) -> PluginRecord:
    """Load one plugin module beside core's own hooks and return its record."""
    from ...discovery import EntryRecord
    from ...plugins import PluginManager, core_entry

    require(
        bool(module),
        "plugin module under test",
        found="none",
        expected='the import path your entry point names, e.g. "my_package.plugin"',
        look='your test class: plugin = "my_package.plugin"',
    )
    entry = EntryRecord(name, "distribution under test", "0", module, load=lambda: import_module(module))
    return PluginManager([core_entry(), entry]).records[-1]


def hook_names() -> dict[str, Any]:
    """Core's hooks by name."""
    from ... import hookspecs

    return {name: value for name, value in vars(hookspecs).items() if hasattr(value, f"{hookspecs.PROJECT}_spec")}


def public_functions(module: str) -> dict[str, Any]:
    """Functions a module defines itself."""
    loaded = import_module(module)
    return {n: f for n, f in vars(loaded).items() if inspect.isfunction(f) and f.__module__ == loaded.__name__}
