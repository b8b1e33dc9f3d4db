"""`spec` as a person meets it: help, errors, exit codes, pipes. Commands of models are tested beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from mlx_spec import cli as cli_module
from mlx_spec.cli import COMMANDS, SpecGroup, cli
from mlx_spec.errors import LoadError, UsageError

COMMAND_PLUGIN = """
import click
from mlx_spec import hookimpl

@hookimpl
def spec_register_commands(cli):
    @cli.command("greet", help="Say hello.")
    def greet():
        click.echo("hello")

    @cli.command("{taken}")
    def taken():
        click.echo("stolen")
"""
HEAVY = ("mlx", "mlx_lm", "pydantic", "rich", "transformers", "numpy", "huggingface_hub")


def loaded_after(code: str) -> set[str]:
    """Heavy modules a fresh interpreter holds after running `code`."""
    probe = f"{code}\nimport sys\nprint('\\n' + ' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_after("import mlx_spec") == set()


def test_help_loads_nothing_heavy_although_it_loads_plugins():
    code = "import sys\nfrom mlx_spec.cli import cli\ntry:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass"
    assert loaded_after(code) == set()


def test_every_public_name_is_listed_once():
    import mlx_spec

    assert sorted(mlx_spec.__all__) == sorted({*mlx_spec._EXPORTS, "__version__"})
    assert dir(mlx_spec) == sorted(mlx_spec.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        mlx_spec.nonsense  # noqa: B018


def test_help_lists_all_commands(spec):
    done = spec("--help")
    assert done.returncode == 0
    rows = [line for line in done.stdout.split("Commands:")[1].splitlines() if line[:3].strip()]
    assert [row.split()[0] for row in rows[: len(COMMANDS)]] == list(COMMANDS)
    assert all(len(row.split()) > 2 for row in rows)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_names_itself(name):
    result = CliRunner().invoke(cli, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"Usage: spec {name}")


def test_unknown_command_and_option_are_usage_errors(spec):
    for arguments, text in ((["plugin"], "'plugins'"), (["--nonsense"], "--nonsense")):
        done = spec(*arguments)
        assert done.returncode == 2
        assert text in done.stderr and "Traceback" not in done.stderr


def test_python_m_and_version(spec):
    done = spec("--version")
    assert done.returncode == 0 and done.stdout.startswith("mlx-spec, version ")


# -- plugins and the CLI ---------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["def broken(:\n", "raise RuntimeError('x')\n", "import sys; sys.exit(0)\n"])
def test_a_broken_plugin_never_stops_the_cli(site, spec, source):
    site.install("bad-dist", "bad", source)
    assert spec("--help").returncode == 0
    done = spec("plugins", "--json")
    assert done.returncode == 0
    (bad,) = [p for p in json.loads(done.stdout)["plugins"] if p["name"] == "bad"]
    assert not bad["loaded"] and bad["distribution"] == "bad-dist" and bad["errors"]
    assert "Traceback" not in done.stderr


def test_commands_of_plugins_join_and_taken_names_are_refused(site, spec):
    site.install("hello-dist", "hello", COMMAND_PLUGIN.format(taken="plugins"))
    assert "greet" in spec("--help").stdout and "Say hello." in spec("--help").stdout
    assert spec("greet").stdout == "hello\n"
    done = spec("plugins", "--json")
    (hello,) = [p for p in json.loads(done.stdout)["plugins"] if p["name"] == "hello"]
    assert hello["loaded"] and "command 'plugins'" in hello["errors"][0]


def test_two_plugins_cannot_share_a_command(site, spec):
    site.install("a-dist", "a", COMMAND_PLUGIN.format(taken="one"))
    site.install("b-dist", "b", COMMAND_PLUGIN.format(taken="two"))
    rows = json.loads(spec("plugins", "--json").stdout)["plugins"]
    refused = [row["name"] for row in rows if any("'greet'" in error for error in row["errors"])]
    assert refused == ["b"]


def test_plugins_filter_and_unknown_names(site, spec):
    site.install("a-dist", "a", "")
    site.install("b-dist", "b", "")
    done = spec("plugins", MLX_SPEC_PLUGINS="b,ghost")
    assert done.returncode == 0
    names = [line.split()[0] for line in done.stdout.splitlines()[1:] if not line.startswith("error:")]
    assert names == ["core", "b", "ghost"]
    assert "error: plugin 'ghost' of MLX_SPEC_PLUGINS" in done.stdout


def test_clean_text_in_a_pipe(site, spec):
    site.install("a-dist", "a", "")
    for arguments in (["plugins"], ["doctor"]):
        text = spec(*arguments).stdout
        assert "\x1b" not in text and "│" not in text and "─" not in text
        assert all(line == line.rstrip() for line in text.splitlines())


# -- the error mapper ------------------------------------------------------------------------------------


@pytest.fixture
def failing(monkeypatch):
    """A group whose one command raises what it is told to."""

    def make(error: BaseException) -> click.Group:
        @click.group(cls=SpecGroup)
        def group() -> None:
            pass

        @group.command("fail")
        def fail() -> None:
            raise error

        return group

    return make


FULL = {"found": "1", "expected": "2", "next_step": "Do this"}


@pytest.mark.parametrize(
    "error, code, text",
    [
        (UsageError("--top-p", **FULL), 2, "--top-p: found 1, expected 2. Do this.\n"),
        (LoadError("config.json", **FULL), 1, "config.json: found 1, expected 2. Do this.\n"),
        (click.UsageError("wrong"), 2, "Error: wrong"),
        (KeyboardInterrupt(), 130, ""),
        (click.Abort(), 130, ""),
        (BrokenPipeError(), 141, ""),
        (SystemExit(4), 4, ""),
        (ValueError("oops"), 1, "internal error: ValueError: oops. Set MLX_SPEC_LOG_LEVEL=debug for the traceback.\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_every_way_out_has_its_code_and_no_traceback(failing, error, code, text):
    result = CliRunner().invoke(failing(error), ["fail"])
    assert result.exit_code == code
    assert "Traceback" not in result.stderr and result.stdout == ""
    assert text in result.stderr if text else not result.stderr.strip()


def test_debug_shows_the_traceback(failing, monkeypatch):
    monkeypatch.setenv("MLX_SPEC_LOG_LEVEL", "debug")
    result = CliRunner().invoke(failing(ValueError("oops")), ["fail"])
    assert "Traceback" in result.stderr and "raise error" in result.stderr


def test_a_reader_that_leaves_costs_no_message(spec, tmp_path):
    code = "import sys; from mlx_spec.cli import main; sys.argv = ['spec', 'plugins', '--json']; main()"
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(write)
    assert done.returncode == cli_module.READER_LEFT and done.stderr == ""


def test_log_level_reaches_the_logger(spec):
    quiet, loud = spec("plugins"), spec("plugins", MLX_SPEC_LOG_LEVEL="debug", MLX_SPEC_PLUGINS="ghost")
    assert quiet.stderr == "" and loud.returncode == 0


def test_trace_shows_hook_calls(spec):
    assert "spec_register(register) -> core" in spec("plugins", MLX_SPEC_TRACE="hooks").stderr
