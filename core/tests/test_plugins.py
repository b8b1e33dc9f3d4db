"""The manager: isolation of broken plugins, owner-bound calls, tracing."""

from __future__ import annotations

import json
import re
import types

import pytest
from click.testing import CliRunner
from tinymodels import write_model

from mlx_spec import hookimpl, plugins
from mlx_spec.cli import cli
from mlx_spec.demos import demo_pair
from mlx_spec.discovery import EntryRecord, discover
from mlx_spec.errors import LoadError, PluginError, UsageError
from mlx_spec.inspection import inspect
from mlx_spec.pair import load
from mlx_spec.plugins import PluginManager, get_manager
from mlx_spec.registry import CORE

GOOD = """
from mlx_spec import hookimpl

@hookimpl
def spec_register(register):
    register.target("good")
"""
HEAD = "from mlx_spec import hookimpl\n"
BROKEN = {
    "syntax": ("def broken(:\n", "SyntaxError"),
    "raises": ("raise RuntimeError('on import')\n", "RuntimeError: on import"),
    "exits": ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
    "missing": ("import surely_not_installed_here\n", "surely_not_installed_here"),
    "misspelt": (HEAD + "@hookimpl\ndef spec_propos(lane, budget):\n    return None\n", "Did you mean spec_propose?"),
    "unmarked": ("def spec_register(register):\n    pass\n", "Add @mlx_spec.hookimpl"),
    "default": (HEAD + "@hookimpl\ndef spec_propose(lane, budget=3):\n    return None\n", "default of 'budget'"),
    "argument": (HEAD + "@hookimpl\ndef spec_propose(lane, width):\n    return None\n", "argument 'width'"),
    "trylast": (HEAD + "@hookimpl(trylast=True)\ndef spec_propose(lane):\n    return None\n", "Remove trylast"),
    "newer": ("MLX_SPEC_API = (0, 99)\n", "a plugin for 0.99"),
    "other": ("MLX_SPEC_API = (1, 0)\n", "a plugin for 1.0"),
    "oddapi": ("MLX_SPEC_API = '0.1'\n", "a pair (major, minor)"),
    "registers": (HEAD + "@hookimpl\ndef spec_register(register):\n    register.target('x')\n    1 / 0\n", "division"),
    "wrongclaim": (HEAD + "@hookimpl\ndef spec_register(register):\n    register.target(3)\n", "a non-empty string"),
}


def module(name: str, **functions) -> types.ModuleType:
    """A plugin module made on the spot."""
    made = types.ModuleType(name)
    for key, function in functions.items():
        setattr(made, key, function)
    return made


def manager(*modules: types.ModuleType, trace: bool = False) -> PluginManager:
    """A manager of these modules; one called "core" takes the place of core's defaults."""
    entries = [
        EntryRecord(m.__name__, f"dist-{m.__name__}", "1", plugins.DEFAULTS, load=lambda m=m: m) for m in modules
    ]
    return PluginManager(entries, trace)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_is_reported_and_stops_nobody(site, name):
    source, reason = BROKEN[name]
    site.install("bad-dist", "bad", source)
    site.install("good-dist", "good", GOOD)
    made = PluginManager(discover(["bad", "good"]))
    bad, good = made.records
    assert not bad.loaded and bad.claims is None
    assert reason in str(bad.errors[0]) and "bad-dist" in str(bad.errors[0])
    assert good.loaded and good.errors == []
    assert made.registry.model_types() == ("good",)


def test_a_broken_plugin_is_named_where_something_of_it_is_missed(site, tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_SPEC_PLUGINS", "bad,good")
    site.install("bad-dist", "bad", BROKEN["syntax"][0])
    site.install("good-dist", "good", GOOD)
    reason = "MLX_SPEC_PLUGINS lets in only bad, good) (spec plugins says why these failed to load: bad)"
    path = write_model(tmp_path / "tiny")
    for missed in (lambda: load(str(path), kind="suffix"), demo_pair):
        with pytest.raises(UsageError, match=re.escape(reason)):
            missed()
    note = "plugin bad failed to load, so what it serves is not here: spec plugins says why"
    assert load(str(path)).plan.notes == inspect(str(path)).notes == [note]
    assert f"\nnote: {note}\n" in CliRunner().invoke(cli, ["inspect", str(path)]).stderr
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "of-bad"}))
    with pytest.raises(LoadError, match=re.escape(reason)):
        load(str(path))


def test_misspelt_optional_hooks_are_allowed():
    @hookimpl(optionalhook=True)
    def spec_of_tomorrow(anything):
        return None

    (record,) = manager(module("a", spec_of_tomorrow=spec_of_tomorrow)).records
    assert record.loaded and record.hooks == ()


def test_older_minor_api_is_accepted():
    made = module("a")
    made.MLX_SPEC_API = (plugins.API_VERSION[0], 0)
    assert manager(made).records[0].loaded


def test_the_name_of_core_is_reserved(site):
    site.install("thief", "core", GOOD)
    made = PluginManager([plugins.core_entry(), *discover(["core"])])
    core, thief = made.records
    assert core.loaded and core.distribution == "mlx-spec"
    assert not thief.loaded and "thief" in str(thief.errors[0])


def claims(*model_types: str):
    @hookimpl
    def spec_register(register):
        register.target(*model_types)

    return spec_register


def test_double_claims_are_errors_of_both_and_cost_only_the_claim():
    made = manager(module("a", spec_register=claims("x", "y")), module("b", spec_register=claims("x")))
    for record in made.records:
        assert record.loaded
        assert "dist-a, dist-b" in str(record.errors[0])
    assert made.registry.target_owner("y") == "a"
    with pytest.raises(PluginError, match="dist-a, dist-b"):
        made.registry.target_owner("x")


def test_duplicate_entry_points_load_neither(site):
    site.install("one", "same", GOOD)
    site.install("two", "same", GOOD)
    made = PluginManager(discover(["same"]))
    assert [r.loaded for r in made.records] == [False, False]
    assert made.registry.model_types() == ()


# -- calls -----------------------------------------------------------------------------------------------


def answers(value, **options):
    @hookimpl(**options)
    def spec_propose(lane, budget):
        return value

    return spec_propose


def observes(seen: list):
    @hookimpl(wrapper=True)
    def spec_propose(lane, budget):
        result = yield
        seen.append((lane, result))
        return result

    return spec_propose


def test_owner_call_reaches_the_owner_core_and_observers_only():
    seen: list = []
    made = manager(
        module(CORE, spec_propose=answers("core", trylast=True)),
        module("a", spec_propose=answers("a")),
        module("b", spec_propose=answers("b")),
        module("none", spec_propose=answers(None)),
        module("idle"),
        module("watch", spec_propose=observes(seen)),
    )
    expected = {"a": "a", "b": "b", "none": "core", "idle": "core", CORE: "core", "watch": "core"}
    for owner, answer in expected.items():
        assert made.owner_call("spec_propose", owner)(lane=owner, budget=[1]) == answer
    assert seen == list(expected.items())


def test_owner_call_of_nobody_is_an_error():
    with pytest.raises(PluginError, match="'ghost'"):
        manager(module("a")).owner_call("spec_propose", "ghost")


def test_an_implementation_may_take_fewer_arguments():
    @hookimpl
    def spec_propose(budget):
        return budget

    made = manager(module("a", spec_propose=spec_propose))
    assert made.owner_call("spec_propose", "a")(lane=None, budget=[2]) == [2]


def test_an_implementation_that_is_alone_is_called_without_a_detour():
    def made(**options):
        return manager(module(CORE, spec_propose=default), module("a", spec_propose=answers("a")), **options)

    default = answers("core", trylast=True)
    assert made().owner_call("spec_propose", CORE) is default
    assert made(trace=True).owner_call("spec_propose", CORE) is not default
    assert made().owner_call("spec_propose", "a")(lane=None, budget=[1]) == "a"
    watched = manager(module(CORE, spec_propose=default), module("watch", spec_propose=observes([])))
    assert watched.owner_call("spec_propose", CORE) is not default
    alone = manager(module("watch", spec_propose=observes([])))
    assert alone.owner_call("spec_propose", "watch")(lane=None, budget=[1]) is None


def test_ask_each_keeps_the_answers_of_the_others(caplog):
    @hookimpl
    def fine(target, drafter, card):
        return [card]

    @hookimpl
    def breaks(target, drafter, card):
        raise ZeroDivisionError("boom")

    silent = module("c", spec_propose=answers(1))
    made = manager(module("a", spec_validate_pair=fine), module("b", spec_validate_pair=breaks), silent)
    found = made.ask_each("spec_validate_pair", target=1, drafter=2, card=3)
    assert [(record.name, answer) for record, answer in found] == [("a", [3])]
    assert "plugin b" in caplog.text and "boom" in caplog.text


def test_trace_names_the_hook_and_who_answers(caplog):
    made = manager(module("a", spec_propose=answers(7)), module("b", spec_propose=answers(8)), trace=True)
    with caplog.at_level("INFO", "mlx_spec.trace"):
        made.owner_call("spec_propose", "a")(lane=None, budget=[])
    text = [r.getMessage() for r in caplog.records]
    assert text == ["spec_propose(lane, budget) -> a", "spec_propose returned int"]


def test_one_manager_per_process_until_reset(site, monkeypatch):
    site.install("good-dist", "good", GOOD)
    monkeypatch.setenv("MLX_SPEC_PLUGINS", "good")
    first = get_manager()
    assert first is get_manager()
    assert [r.name for r in first.records] == [CORE, "good"]
    plugins.reset()
    assert get_manager() is not first
