"""The pytest plugin and the check of the contract, in inner runs; faults of plugins, pairs, kernels."""

# ruff: noqa: E501 - sources and messages of faulty plugins, as they are
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from kitrun import Outcome, run_pytest

HEAD = "import pytest\nfrom mlx_spec.testing import *\nfrom mlx_spec.testing import expected_failure\n"

# The source of weakened contracts, as text: each has one fault that the kit must find. Inner runs collect it. The
# skips and xfails in it are such faults; no test of this project carries one (tests/test_style.py).
META = '''
class Kernels(KernelContract):
    """A sound kernel, so that every other test passes."""

    @pytest.fixture
    def kernel(self):
        from mlx_spec import Kernel
        return Kernel("scale", ("metal",), "bitwise", lambda: None, lambda x: 2 * x)

    @pytest.fixture
    def arguments(self):
        import mlx.core as mx
        return lambda rows, seed: (mx.random.normal((rows, 3), key=mx.random.key(seed)),)


class TestSound(Kernels):
    pass


class TestOverrides(Kernels):
    def test_it_describes_itself(self):
        pass


class TestDeletes(Kernels):
    test_it_describes_itself = None


class TestSkips(Kernels):
    @pytest.mark.skip(reason="seeded: the kit refuses a skipped contract test")
    def test_it_describes_itself(self, kernel):
        pass


@pytest.mark.skipif(True, reason="seeded: the kit refuses a skipped class")
class TestSkipsItAll(Kernels):
    pass


class TestSkipsInAFixture(Kernels):
    @pytest.fixture
    def kernel(self):
        pytest.skip("seeded: the kit refuses a fixture that skips")


class TestLooseXfail(Kernels):
    @pytest.mark.xfail(reason="seeded: the kit refuses an xfail that is not strict")
    def test_it_describes_itself(self, kernel):
        raise AssertionError


class TestSilentXfail(Kernels):
    @pytest.mark.xfail(strict=True)  # seeded: the kit refuses an xfail without a reason
    def test_it_describes_itself(self, kernel):
        raise AssertionError


class TestNoSeeds(Kernels):
    seeds = ()


class TestUndeclared(DrafterContract):
    pass


class TestMisspelt(Kernels):
    capabilities = {"batsh"}


class TestTree(Kernels):
    capabilities = {"tree"}


class TestHardlyAnything(Kernels):
    tokens = 1


class TestAnotherLevel(Kernels):
    level = "roughly"


class TestByToken(Kernels):
    level = "greedy"


class TestKnownFault(Kernels):
    @pytest.fixture
    def kernel(self):
        from mlx_spec import Kernel
        return Kernel("scale", ("metal",), "about right", lambda: None, lambda x: 2 * x)

    rows_test = "test_the_reference_gives_each_row_what_it_gets_alone"
    test_it_describes_itself = expected_failure(KernelContract.test_it_describes_itself, "issue 12: claim")
    test_the_reference_gives_each_row_what_it_gets_alone = expected_failure(
        KernelContract.test_the_reference_gives_each_row_what_it_gets_alone, "issue 12: claim")


class TestFixedFault(Kernels):
    test_it_describes_itself = expected_failure(KernelContract.test_it_describes_itself, "issue 13")
'''

WHOLE = "test_the_contract_is_whole"
WEAKENED = {
    "TestOverrides": (WHOLE, "found test_it_describes_itself is overridden"),
    "TestDeletes": (WHOLE, "found test_it_describes_itself is deleted (it is None)"),
    "TestSkips": (WHOLE, "found test_it_describes_itself is skipped"),
    "TestSkipsItAll": (WHOLE, "found test_the_contract_is_whole skipped, expected every contract test to run"),
    "TestSkipsInAFixture": (
        "test_it_describes_itself",
        "found test_it_describes_itself skipped, expected every contract test",
    ),
    "TestLooseXfail": (WHOLE, "found test_it_describes_itself is an xfail that is not strict"),
    "TestSilentXfail": (WHOLE, "found test_it_describes_itself is an xfail without a reason"),
    "TestNoSeeds": ("test_the_reference_gives_each_row_what_it_gets_alone", "expected every contract test to run"),
    "TestUndeclared": ("test_the_declaration_is_known", "found no declaration, expected a set of batch, sampling"),
    "TestMisspelt": ("test_the_declaration_is_known", "found unknown 'batsh', expected names out of batch"),
    "TestTree": ("test_the_declaration_is_known", "expected chains: this version verifies no trees"),
    "TestHardlyAnything": (
        "test_its_settings_leave_something_to_test",
        "found 1, expected at least 6, for several rounds",
    ),
    "TestAnotherLevel": ("test_its_settings_leave_something_to_test", "found 'roughly', expected \"bitwise\" or"),
    "TestFixedFault": ("test_it_describes_itself", "issue 13"),
}


def written(folder: Path, body: str, name: str = "test_inner.py") -> Path:
    path = folder / name
    path.write_text(HEAD + body)
    return path


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("meta")
    kept = ["-k", "not TestUndeclared or declaration"]  # the rest of that contract has nothing to run on
    return run_pytest(folder, [written(folder, META)], *kept)


@pytest.mark.parametrize("cls", WEAKENED)
def test_a_weakened_contract_is_refused(meta: Outcome, cls: str) -> None:
    test, words = WEAKENED[cls]
    failures = meta.failures(cls)
    assert test in failures, meta.output[-3000:]
    assert words in failures[test]


def test_sound_and_declared_classes_pass(meta: Outcome) -> None:
    assert meta.outcomes("TestSound") == {"passed"}
    assert meta.failures("TestKnownFault") == {}
    assert meta.outcomes("TestKnownFault") == {"passed", "skipped"}  # an expected failure is reported as skipped
    assert meta.failures("TestFixedFault").keys() == {"test_it_describes_itself"}


def test_a_weaker_level_is_printed(meta: Outcome) -> None:
    assert "TestByToken: level greedy: blocks are compared by token, not by bytes" in meta.output
    assert meta.outcomes("TestByToken") == {"passed"}


def test_what_is_not_tested_is_printed(tmp_path: Path) -> None:
    body = "class TestMine(DrafterContract):\n    capabilities = {'sampling'}\n    least_acceptance = 0.5\n"
    done = run_pytest(tmp_path, [written(tmp_path, body)], "--collect-only")
    assert "mlx-spec contracts: not tested" in done.output
    assert "TestMine: batch not declared (several requests in one lane): 1 test left out" in done.output
    assert "TestMine: quantised_kv not declared (K/V stored in 4 or 8 bits): 2 tests left out" in done.output
    assert "TestMine: no reference_draft given (faults that cost only acceptance" in done.output
    assert "sampling not declared" not in done.output and "least_acceptance" not in done.output


def test_the_check_of_the_contract_cannot_be_removed(tmp_path: Path) -> None:
    body = "class TestMine(KernelContract):\n    test_the_contract_is_whole = None\n"
    done = run_pytest(tmp_path, [written(tmp_path, body)])
    assert done.code == 4
    assert (
        "TestMine removes test_the_contract_is_whole, the test that its contract is complete. Put it back."
        in done.output
    )


def test_without_the_plugin_the_contract_says_how_to_get_it(tmp_path: Path) -> None:
    done = run_pytest(
        tmp_path, [written(tmp_path, "class TestMine(PluginContract):\n    plugin = 'json'\n")], kit=False
    )
    assert {outcome for outcome, _ in done.tests.values()} == {"failed"}
    assert "expected -p mlx_spec.testing.plugin" in done.output


def test_pytest_starts_without_heavy_imports() -> None:
    code = (
        "import sys, json\nimport mlx_spec.testing.plugin, mlx_spec.testing\n"
        "print(json.dumps([m for m in ('mlx', 'mlx_lm', 'numpy', 'pydantic', 'transformers') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_every_public_name_is_there() -> None:
    import mlx_spec.testing as kit

    assert sorted(kit.__all__) == sorted(kit._EXPORTS)
    assert all(getattr(kit, name) is not None for name in kit.__all__)


# -- plugin modules ------------------------------------------------------------------------------------------

HOOK = "from mlx_spec import hookimpl\n"
PLUGINS = {
    "with_default": (
        HOOK + "@hookimpl\ndef spec_validate_pair(target, drafter, card=None):\n    return None\n",
        "test_hooks_are_marked_and_have_no_defaults",
        "hook spec_validate_pair of with_default: found argument card=None with a default value, expected card without one",
    ),
    "misspelt": (
        HOOK + "def spec_validate_pairs(target, drafter, card):\n    return None\n",
        "test_no_hook_is_misspelt",
        "function spec_validate_pairs of misspelt: found a name that is no hook: it is never called",
    ),
    "misspelt_and_marked": (
        HOOK + "@hookimpl\ndef spec_propse(lane, budget):\n    return None\n",
        "test_it_loads_with_only_core_installed",
        "Did you mean spec_propose",
    ),
    "unmarked": (
        "def spec_validate_pair(target, drafter, card):\n    return None\n",
        "test_hooks_are_marked_and_have_no_defaults",
        "function spec_validate_pair of unmarked: found it without @hookimpl",
    ),
    "renamed": (
        HOOK + "@hookimpl\ndef spec_load_drafter(ref, card, model):\n    return None\n",
        "test_hooks_are_marked_and_have_no_defaults",
        "hook spec_load_drafter of renamed: found argument 'model', expected some of ref, card, target",
    ),
    "heavy": (
        "import numpy\n",
        "test_start_up_imports_nothing_heavy",
        "imports of heavy at start-up: found numpy, expected none of mlx, mlx_lm",
    ),
    "heavy_to_register": (
        HOOK + "@hookimpl\ndef spec_register(register):\n    import mlx.core\n",
        "test_start_up_imports_nothing_heavy",
        "imports of heavy_to_register at start-up: found mlx, expected none",
    ),
    "greedy": (
        HOOK + "@hookimpl\ndef spec_load_target(ref, config):\n    return object()\n",
        "test_what_it_does_not_know_it_leaves_to_others",
        "spec_load_target of greedy, asked about a model_type that is not its own",
    ),
    "writerless": (
        HOOK + "@hookimpl\ndef spec_register(register):\n    register.target('mine')\n",
        "test_its_families_write_tiny_checkpoints",
        "tiny checkpoints of writerless: found no writer, expected one per family",
    ),
    "unseeded": (
        HOOK
        + "@hookimpl\ndef spec_register(register):\n    register.target('mine')\n    register.tiny('mine', 'unseeded:write')\n"
        + "def write(out, seed):\n    out.mkdir(parents=True)\n    (out / 'config.json').write_text('{}')\n    return out, None\n",
        "test_its_families_write_tiny_checkpoints",
        "tiny mine with seeds 3 and 4: found the same bytes",
    ),
    "careless": (
        HOOK
        + "@hookimpl\ndef spec_register(register):\n    register.target('mine')\n    register.tiny('mine', 'careless:write')\n"
        + "def write(out, seed, **options):\n    out.mkdir(parents=True)\n"
        + '    (out / \'config.json\').write_text(\'{"model_type": "mine", "n": %d}\' % seed)\n    return out, None\n',
        "test_its_families_write_tiny_checkpoints",
        "tiny mine with an option no_such_option: found it written all the same",
    ),
    "brittle": (
        HOOK
        + "@hookimpl\ndef spec_register(register):\n    register.target('mine')\n    register.tiny('mine', 'brittle:write')\n"
        + "def write(out, seed, **options):\n    if options:\n        len(None)\n    out.mkdir(parents=True)\n"
        + '    (out / \'config.json\').write_text(\'{"model_type": "mine", "n": %d}\' % seed)\n    return out, None\n',
        "test_its_families_write_tiny_checkpoints",
        "tiny mine with an option no_such_option: found TypeError: object of type 'NoneType' has no len()",
    ),
    "newer": (
        HOOK + "MLX_SPEC_API = (0, 99)\n",
        "test_it_loads_with_only_core_installed",
        "found a plugin for 0.99, expected one for 0.1",
    ),
}


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("modules")
    for name, (source, _, _) in PLUGINS.items():
        (folder / f"{name}.py").write_text(source)
    body = "".join(f"class Test_{name}(PluginContract):\n    plugin = '{name}'\n" for name in PLUGINS)
    body += "class TestEntry(PluginContract):\n    plugin, entry_point = 'unmarked', 'not-installed'\n"
    nodes = [f"{written(folder, body)}::Test_{name}::{test}" for name, (_, test, _) in PLUGINS.items()]
    return run_pytest(
        folder, [*nodes, f"{folder / 'test_inner.py'}::TestEntry::test_its_entry_point_names_it"], path=[folder]
    )


@pytest.mark.parametrize("name", PLUGINS)
def test_a_fault_of_a_plugin_module_is_named(modules: Outcome, name: str) -> None:
    _, test, words = PLUGINS[name]
    failures = modules.failures(f"Test_{name}")
    assert test in failures, modules.output[-3000:]
    assert words in failures[test]


def test_an_entry_point_that_is_not_installed_is_named(modules: Outcome) -> None:
    (text,) = modules.failures("TestEntry").values()
    assert "entry point 'not-installed' of group mlx_spec" in text and "unmarked in exactly one installed" in text


# -- kernels -------------------------------------------------------------------------------------------------

KERNELS = """
import mlx.core as mx
from mlx_spec import Kernel

class Kernels(KernelContract):
    claim, reference = "bitwise", staticmethod(lambda x: 2 * x)

    @pytest.fixture
    def kernel(self):
        return Kernel("scale", ("metal",), type(self).claim, lambda: None, type(self).reference)

    @pytest.fixture
    def arguments(self):
        return lambda rows, seed: (mx.random.normal((rows, 3), key=mx.random.key(seed)),)

class TestMixesRows(Kernels):
    reference = staticmethod(lambda x: x - x.mean(axis=0, keepdims=True))

class TestDependsOnTheRowCount(Kernels):
    reference = staticmethod(lambda x: x * (1 + 1e-6 * (x.shape[0] > 4)))

class TestVagueClaim(Kernels):
    claim = "exact"

class TestWithinItsClaim(Kernels):
    claim = "1e-4"
    reference = staticmethod(lambda x: x * (1 + 1e-6 * (x.shape[0] > 4)))
"""


def test_kernels_that_depend_on_their_neighbours_are_found(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, [written(tmp_path, KERNELS)])
    rows = "test_the_reference_gives_each_row_what_it_gets_alone"
    assert "row 0 of 2 of the reference of kernel scale, against the row alone" in done.failures("TestMixesRows")[rows]
    assert "row 0 of 5 of the reference of kernel scale" in done.failures("TestDependsOnTheRowCount")[rows]
    assert "found 'exact', expected \"bitwise\"" in done.failures("TestVagueClaim")["test_it_describes_itself"]
    assert done.failures("TestWithinItsClaim") == {}
