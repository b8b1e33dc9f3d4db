"""`spec` as a person meets it: help, errors, exit codes, pipes. Commands of models are tested beside them."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mlx_spec import cli as cli_module
from mlx_spec import settings
from mlx_spec.cli import COMMANDS, SpecGroup, cli
from mlx_spec.cli.usage import as_usage_error
from mlx_spec.errors import Finding, LoadError, PairError, UsageError

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


HUGE = "9" * 20_000 + "x"
REFUSALS = {
    "plugin": "U53: command: found 'plugin', expected generate | inspect | .* | doctor. Did you mean 'plugins'?",
    "zzz": "U53: command: found 'zzz', expected generate | .*. See spec --help.",
    HUGE: "U53: command: found '999.* (20003 characters) .*999x', expected generate | .*. See spec --help.",
    "--nonsense": "U52: spec: found option '--nonsense', expected an option of this command. See spec --help.",
    "generate --max-token 3": "U52: spec generate: found option '--max-token', .* Did you mean --max-tokens or .*?",
    "generate --exactness nope": "U50: --exactness: found 'nope', expected bitwise | greedy | distribution | lossy. .*",
    f"generate --seed {HUGE}": "U50: --seed: found '999.* (20003 characters) .*999x', expected a whole number. .*",
    "generate -n -1": "U50: -n / --max-tokens: found -1, expected a whole number of at least 0. Correct the value.",
    "generate --temp warm": "U50: --temp: found 'warm', expected a number. Correct the value.",
    "generate -n 1_0": "U50: -n / --max-tokens: found '1_0', expected a whole number of at least 0. Correct the value.",
    "generate --seed ٣": "U50: --seed: found '٣', expected a whole number. Correct the value.",
    "generate --top-p 0_1.5": "U50: --top-p: found '0_1.5', expected a number. Correct the value.",
    "generate --kv-bits": "U51: --kv-bits: found no value, expected one behind it. Give it a value.",
    "generate --json=3": "U51: --json: found a value, expected none: it is a switch. Drop the value.",
    "inspect": (
        "U51: spec inspect: found no MODEL, expected spec inspect [OPTIONS] MODEL. Add it; see spec inspect --help."
    ),
    f"inspect a {HUGE}": "U54: spec inspect: found unexpected extra argument .* (20033 characters) .*",
    "new drafter": "U51: spec new: found no NAME, expected spec new [OPTIONS] {drafter|family} NAME. Add it; .*",
    "new dr x": "U50: KIND: found 'dr', expected drafter | family. Correct the value.",
    f"new drafter x --out {__file__}": "U50: --out: found .* is a file, expected a folder. Correct the value.",
}


@pytest.mark.parametrize("line", REFUSALS, ids=lambda line: line[:30])
def test_refused_command_lines_say_found_expected_and_next_step(line):
    """click finds them; they are told in the form of every other error, on one short line."""
    result = CliRunner().invoke(cli, line.split())
    assert result.exit_code == 2 and result.stdout == ""
    pattern = ".*".join(map(re.escape, REFUSALS[line].split(".*")))
    assert re.fullmatch(f"error {pattern}\n", result.stderr), result.stderr
    assert len(result.stderr) < 400


@pytest.mark.parametrize("line", ["bench", "tune", "new drafter x", "convert x", "split-mtp -m x"])
def test_an_empty_path_is_not_the_folder_one_is_in(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, [*line.split(), "--out", " "])
    assert result.exit_code == 2 and "--out: found an empty path, expected a folder." in result.stderr
    assert not list(tmp_path.iterdir())


def test_numbers_and_folders_are_read_by_types_of_our_own():
    """click's accept 1_0 and digits of every script, and an empty path."""
    options = [param for name in COMMANDS for param in cli.get_command(click.Context(cli), name).params]
    numbers = [p for p in options if isinstance(p.type, click.types.IntParamType | click.types.FloatParamType)]
    ranges = [p for p in numbers if isinstance(p.type, click.IntRange | click.FloatRange)]
    assert len(numbers) > 15 and len(ranges) > 5
    assert {type(p.type).__module__ for p in numbers} == {"mlx_spec.cli.values"}
    assert {type(p.type).__name__ for p in options if "--out" in p.opts} == {"Folder"}


def test_every_finding_that_refuses_a_pair_is_told_with_its_code(failing):
    parts = ("vocabulary", "9 entries", "at most 5")
    findings = [
        Finding("P26", "note", "context", "9", "99", "Nothing"),
        Finding("P22", "error", *parts, "Use another"),
        Finding("P23", "error", "caches", "a ring", "rows", "Use another"),
    ]
    result = CliRunner().invoke(failing(PairError(findings)), ["fail"])
    assert result.exit_code == 1 and result.stderr == (
        "error P22: vocabulary: found 9 entries, expected at most 5.\n"
        "error P23: caches: found a ring, expected rows. Use another.\n"
    )


def test_refused_command_lines_have_codes():
    lines = ("generate -n x", "inspect", "--nonsense", "zzz", "inspect a b")
    found = []
    for line in lines:
        with pytest.raises((click.UsageError, UsageError)) as caught:
            cli.main(line.split(), standalone_mode=False)
        error = caught.value
        found.append((error if isinstance(error, UsageError) else as_usage_error(error)).code)
    assert found == ["U50", "U51", "U52", "U53", "U54"]


def test_no_arguments_show_the_help(spec):
    done = spec()
    assert "Usage: spec [OPTIONS] COMMAND" in done.stdout + done.stderr and done.returncode in (0, 2)


def test_python_m_and_version(spec):
    done = spec("--version")
    assert done.returncode == 0 and done.stdout.startswith("mlx-spec, version ")


# -- plugins and the CLI ---------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["def broken(:\n", "raise RuntimeError('x')\n", "import sys; sys.exit(0)\n"])
def test_a_broken_plugin_never_stops_the_cli(site, spec, source):
    site.install("bad-dist", "bad", source)
    assert spec("--help").returncode == 0
    done = spec("plugins", "--json")
    assert done.returncode == 1
    (bad,) = [p for p in json.loads(done.stdout)["plugins"] if p["name"] == "bad"]
    assert not bad["loaded"] and bad["distribution"] == "bad-dist" and bad["errors"]
    assert "Traceback" not in done.stderr


def test_commands_of_plugins_join_and_taken_names_are_refused(site, spec):
    site.install("hello-dist", "hello", COMMAND_PLUGIN.format(taken="plugins"))
    assert "greet" in spec("--help").stdout and "Say hello." in spec("--help").stdout
    assert spec("greet").stdout == "hello\n"
    done = spec("plugins", "--json")
    assert done.returncode == 1
    (hello,) = [p for p in json.loads(done.stdout)["plugins"] if p["name"] == "hello"]
    assert hello["loaded"] and hello["errors"][0].startswith("error G08: command 'plugins': found it taken")


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
    assert done.returncode == 1 and spec("plugins", MLX_SPEC_PLUGINS="b").returncode == 0
    names = [line.split()[0] for line in done.stdout.splitlines()[1:] if not line.startswith("error ")]
    assert names == ["core", "b", "ghost"]
    assert "error G02: plugin 'ghost' of MLX_SPEC_PLUGINS" in done.stdout
    done = spec("plugins", MLX_SPEC_PLUGINS="core,b")  # as the table names it
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == ["core", "b"]


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
        (UsageError("--top-p", **FULL), 2, "error U00: --top-p: found 1, expected 2. Do this.\n"),
        (LoadError("config.json", **FULL), 1, "error L00: config.json: found 1, expected 2. Do this.\n"),
        (click.UsageError("wrong."), 2, "error U54: group fail: found wrong, expected"),
        (click.ClickException("a plugin's own"), 1, "Error: a plugin's own"),
        (OSError(errno.ENOSPC, "No space left"), 1, "error R11: writing the output: found No space left, "),
        (OSError(errno.ENOSPC, "No space left", "a.json"), 1, "internal error: OSError"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (click.Abort(), 130, "interrupted\n"),
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


def run_with_output(command: str, unbuffered: str = "") -> subprocess.CompletedProcess[str]:
    """A shell line with `spec` in it."""
    line = command.replace("spec", f"{sys.executable} -m mlx_spec", 1)
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(line, shell=True, env=env, capture_output=True, text=True, timeout=60, check=False)


# A file that may not grow is full everywhere; Linux has a device for it too.
FULL_PLACES = ["file", *(["/dev/full"] if Path("/dev/full").exists() else [])]


@pytest.mark.parametrize("command", ["plugins --json", "--help", "generate --help", "--version"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("place", FULL_PLACES)
def test_a_full_output_is_one_error(command, unbuffered, place, tmp_path):
    limit = "ulimit -f 0; " if place == "file" else ""
    place = tmp_path / "output" if place == "file" else place
    done = run_with_output(f"{limit}PYTHONDONTWRITEBYTECODE=1 spec {command} > {place}", unbuffered)
    assert done.returncode == 1
    found = "File too large" if limit else "No space left on device"
    assert done.stderr.startswith(f"error R11: writing the output: found {found}, expected a place that takes it.")
    assert done.stderr.count("\n") == 1


def test_a_closed_output_is_one_error_and_closed_talk_is_none():
    done = run_with_output("spec plugins >&-")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "error R11: writing the output: found standard output closed" in done.stderr
    assert run_with_output("spec plugins 2>&-").returncode == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_takes_one_line_costs_no_message(unbuffered):
    done = run_with_output("spec doctor --json | head -1", unbuffered)
    assert done.stdout == "{\n" and done.stderr == ""


def test_text_the_terminal_cannot_show_is_escaped(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kůň \ud800"}))
    for encoding, shown in (("ascii", r"k\u016f\u0148 \ud800"), ("utf-8", r"kůň \ud800")):
        env = {**os.environ, "PYTHONIOENCODING": encoding}
        command = [sys.executable, "-m", "mlx_spec", "inspect", str(tmp_path)]
        done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", timeout=60, check=False)
        assert done.returncode == 1 and shown in done.stdout and "internal error" not in done.stderr


@pytest.mark.parametrize("command", ["plugins", "inspect", "new"])
def test_a_misspelt_variable_is_named_once_by_every_command(spec, tmp_path, command):
    arguments = {"plugins": ["--json"], "inspect": [str(tmp_path), "--json"], "new": ["drafter", "x", "--help"]}
    found = spec(command, *arguments[command], MLX_SPEC_DRAFT_KND="mtp", MLX_SPEC_QQ9="1")
    told = [line for line in found.stderr.splitlines() if "MLX_SPEC_" in line]
    assert told == [
        "WARNING not read, since no setting is called so: MLX_SPEC_DRAFT_KND (did you mean MLX_SPEC_DRAFT_KIND?), "
        "MLX_SPEC_QQ9; spec doctor lists the settings"
    ]
    assert "MLX_SPEC_" not in found.stdout or command == "new"
    assert not any("MLX_SPEC_" in line for line in spec(command, *arguments[command]).stderr.splitlines())


def test_the_doctor_names_a_misspelt_variable_in_its_table_alone(spec):
    found = spec("doctor", "--json", MLX_SPEC_DRAFT_KND="mtp")
    assert "MLX_SPEC_DRAFT_KND means nothing here" in found.stdout and "MLX_SPEC_DRAFT_KND" not in found.stderr


BAD_VARIABLES = {
    "MLX_SPEC_THREADS": ("many", "U03: environment variable MLX_SPEC_THREADS: found 'many', expected a whole number."),
    "LLAMA_ARG_DRAFT_BLOCK_SIZE": ("x", "U03: environment variable LLAMA_ARG_DRAFT_BLOCK_SIZE: found 'x', expected "),
    "MLX_SPEC_LOG_LEVEL": ("loud", "U03: environment variable MLX_SPEC_LOG_LEVEL: found 'loud', expected 'debug', "),
    "MLX_SPEC_KERNELS": ("foo", "U05: MLX_SPEC_KERNELS: found foo, expected on | off"),
}


@pytest.mark.parametrize("name", BAD_VARIABLES)
@pytest.mark.parametrize("command", [*(name for name in COMMANDS if name != "doctor"), "greet"])
def test_a_bad_value_of_a_variable_is_told_once_by_every_command(site, monkeypatch, tmp_path, name, command):
    arguments = {
        "inspect": ["M"],
        "convert": ["M", "-o", "new"],
        "new": ["drafter", "x"],
        "generate": ["-m", "M", "-p", "x"],
        "split-mtp": ["-m", "M", "-o", "new"],
    }
    site.install("hello-dist", "hello", COMMAND_PLUGIN.format(taken="one"))
    (tmp_path / "M").mkdir()
    monkeypatch.chdir(tmp_path)
    value, message = BAD_VARIABLES[name]
    monkeypatch.setenv(name, value)
    settings.reset_settings()
    given = arguments.get(command, [])
    result = CliRunner().invoke(cli, [command, *given])
    assert result.exit_code == 2 and (result.stdout == "" or (command, name) == ("plugins", "MLX_SPEC_KERNELS"))
    assert result.stderr.startswith(f"error {message}") and result.stderr.count("\n") == 1
    assert not (tmp_path / "new").exists()
    assert CliRunner().invoke(cli, [command, *given, "--help"]).exit_code == 0  # helps nevertheless


def test_looking_for_misspelt_variables_loads_nothing_heavy(monkeypatch):
    monkeypatch.setenv("MLX_SPEC_LOG_LEVEL", "error")
    for name in ("MLX_SPEC_CACHE_DIR", "MLX_SPEC_KERNELS"):
        monkeypatch.delenv(name)
    assert loaded_after("from mlx_spec.settings import unknown_variables\nassert unknown_variables() == []") == set()
    assert loaded_after("from mlx_spec.cli import refuse_variables\nrefuse_variables('new')") == set()


def test_log_level_reaches_the_logger(spec):
    quiet, loud = spec("plugins"), spec("plugins", MLX_SPEC_LOG_LEVEL="debug", MLX_SPEC_PLUGINS="ghost")
    assert quiet.stderr == "" and (quiet.returncode, loud.returncode) == (0, 1)  # there is no ghost


def test_trace_shows_hook_calls(spec):
    assert "spec_register(register) -> core" in spec("plugins", MLX_SPEC_TRACE="hooks").stderr
