"""Settings: sources, precedence, bad values."""

from __future__ import annotations

import pytest

from mlx_spec import settings
from mlx_spec.errors import UsageError


@pytest.fixture
def env(monkeypatch):
    def set_all(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        settings.reset_settings()

    return set_all


def test_defaults():
    found = settings.get_settings()
    assert (found.plugins, found.trace, found.probe, found.governor) == (None, (), True, True)
    assert (found.prefill_step, found.draft_block_size, found.allow_inexact) == (2048, None, False)
    assert settings.source("prefill_step") == "default"


@pytest.mark.parametrize("text, value", [("1", True), ("true", True), ("on", True), ("0", False), ("off", False)])
def test_switches(env, text, value):
    env(MLX_SPEC_ALLOW_INEXACT=text)
    assert settings.get_settings().allow_inexact is value


@pytest.mark.parametrize(
    "flag, own, twin, expected",
    [
        (3, "5", "7", (3, "--draft-block-size")),
        (None, "5", "7", (5, "MLX_SPEC_DRAFT_BLOCK_SIZE")),
        (None, None, "7", (7, "LLAMA_ARG_DRAFT_BLOCK_SIZE")),
        (None, "", "7", (7, "LLAMA_ARG_DRAFT_BLOCK_SIZE")),
        (None, None, None, (None, "default")),
    ],
)
def test_precedence_and_source_of_block_size(env, flag, own, twin, expected):
    given = {"MLX_SPEC_DRAFT_BLOCK_SIZE": own, "LLAMA_ARG_DRAFT_BLOCK_SIZE": twin}
    env(**{name: value for name, value in given.items() if value is not None})
    assert settings.choose("draft_block_size", flag) == expected


def test_twin_of_the_kind(env):
    env(LLAMA_ARG_DRAFT_KIND="dflash")
    assert settings.choose("draft_kind") == ("dflash", "LLAMA_ARG_DRAFT_KIND")
    env(MLX_SPEC_DRAFT_KIND="mtp")
    assert settings.choose("draft_kind") == ("mtp", "MLX_SPEC_DRAFT_KIND")


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("MLX_SPEC_PREFILL_STEP", "many", "a whole number"),
        ("MLX_SPEC_PREFILL_STEP", "0", "at least 1"),
        ("MLX_SPEC_DRAFT_BLOCK_SIZE", "4.5", "a whole number"),
        ("MLX_SPEC_THREADS", "1_0", "a whole number"),
        ("LLAMA_ARG_DRAFT_BLOCK_SIZE", "-1", "at least 0"),
        ("MLX_SPEC_DRAFT_BLOCK_SIZE", "65", "at most 64"),
        ("LLAMA_ARG_DRAFT_BLOCK_SIZE", "1000", "at most 64"),
        ("MLX_SPEC_PROBE", "perhaps", "on or off"),
        ("MLX_SPEC_PROBE", "\udcff", "text that is UTF-8"),
        ("MLX_SPEC_LOG_LEVEL", "loud", "'debug'"),
        ("MLX_SPEC_TRACE", "hook", '"hooks"'),
    ],
)
def test_bad_values_name_the_variable_the_value_and_the_next_step(env, name, value, expected):
    env(**{name: value})
    with pytest.raises(UsageError) as caught:
        settings.get_settings()
    error = caught.value
    assert error.exit_code == 2
    assert (
        name in error.what
        and value.encode("ascii", "backslashreplace").decode() in str(error.found)
        and expected in str(error.expected)
    )
    assert name in error.next_step


def test_empty_counts_as_unset(env):
    env(MLX_SPEC_PREFILL_STEP="", MLX_SPEC_PLUGINS="")
    assert settings.get_settings().prefill_step == 2048
    assert settings.get_settings().plugins is None and settings.early().plugins is None


@pytest.mark.parametrize(
    "value, expected",
    [("", None), ("on", None), ("1", None), ("off", ()), ("OFF", ()), ("0", ()), ("Linear, rope", ("linear", "rope"))],
)
def test_kernels_are_switched_or_named(env, value, expected):
    env(MLX_SPEC_KERNELS=value)
    assert settings.get_settings().kernels == expected


def test_both_readers_agree(env):
    env(MLX_SPEC_PLUGINS=" a, b,,", MLX_SPEC_TRACE="hooks", MLX_SPEC_LOG_LEVEL="DEBUG")
    full, early = settings.get_settings(), settings.early()
    assert full.plugins == early.plugins == ("a", "b")
    assert full.trace == early.trace == ("hooks",)
    assert full.log_level == early.log_level == "debug" and early.debug


def test_a_filter_without_names_stands_for_itself(env):
    """So that it is refused as a plugin nobody has, where an empty one would quietly mean all or none."""
    for text in (",", " , ", " "):
        env(MLX_SPEC_PLUGINS=text)
        assert settings.get_settings().plugins == settings.early().plugins == (text,)


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("MLX_SPEC_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings.reset_settings()
    assert settings.get_settings().cache_dir == tmp_path / "mlx-spec"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert settings.default_cache_dir() == tmp_path / "home" / ".cache" / "mlx-spec"
    monkeypatch.setenv("MLX_SPEC_CACHE_DIR", "~/own")
    settings.reset_settings()
    assert settings.get_settings().cache_dir == tmp_path / "home" / "own"


def test_misspelt_variables_are_named_with_the_closest(env):
    env(MLX_SPEC_ALOW_INEXACT="1", MLX_SPEC_QQ9="1")
    assert settings.unknown_variables() == [
        ("MLX_SPEC_ALOW_INEXACT", "MLX_SPEC_ALLOW_INEXACT"),
        ("MLX_SPEC_QQ9", None),
    ]


# -- what every command asks before it begins ------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value",
    [
        ("MLX_SPEC_THREADS", "many"),
        ("LLAMA_ARG_DRAFT_BLOCK_SIZE", "x"),
        ("MLX_SPEC_LOG_LEVEL", "loud"),
        ("MLX_SPEC_TRACE", "hook"),
    ],
)
def test_variables_are_checked_without_being_used(env, name, value):
    env(**{name: value})
    with pytest.raises(UsageError) as caught:
        settings.check_variables()
    assert caught.value.code == "U03" and name in caught.value.what


def test_a_missing_home_is_no_fault_of_a_variable(env, monkeypatch):
    def nowhere():
        raise RuntimeError("no home")

    monkeypatch.delenv("MLX_SPEC_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(settings.Path, "home", nowhere)
    env(MLX_SPEC_PROBE="on")
    assert settings.check_variables() is None
    with pytest.raises(UsageError) as caught:
        settings.get_settings()
    assert caught.value.code == "U04"


def test_levels_and_traces_are_those_of_the_model():
    from typing import get_args

    from mlx_spec.settings_model import LogLevel, Settings

    assert get_args(LogLevel) == settings.LOG_LEVELS
    assert Settings(trace=settings.TRACED).trace == settings.TRACED
