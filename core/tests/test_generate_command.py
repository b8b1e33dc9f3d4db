"""`spec generate` on tiny targets: prompts, who is named for a bad setting, folders without a tokenizer, K/V groups."""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from mlx.utils import tree_flatten
from tinymodels import LLAMA, write_model, write_tokenizer

from mlx_spec import plugins, promptfile, refs, settings
from mlx_spec.cli import cli, generate, options
from mlx_spec.errors import LoadError, UsageError
from mlx_spec.pair import load
from mlx_spec.types import DrafterCard


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A tiny target without a tokenizer."""
    return write_model(tmp_path_factory.mktemp("generate") / "tiny", LLAMA | {"num_hidden_layers": 2}, seed=4)


@pytest.fixture
def run(target, monkeypatch) -> Callable[..., Result]:
    """`spec generate` with the target; keywords are environment variables."""

    def run(*args: object, model: Path = target, **env: str) -> Result:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        settings.reset_settings()
        plugins.reset()
        return CliRunner().invoke(cli, ["generate", "-m", str(model), "-n", "4", *map(str, args)])

    yield run
    monkeypatch.undo()
    plugins.reset()


# -- --prompt-ids ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ids"),
    [("7", [7]), ("2,17,9", [2, 17, 9]), (" 2 , 17,\t9 ", [2, 17, 9]), ("[2, 17,\n9]", [2, 17, 9]), ("0007", [7])],
)
def test_prompt_ids(text, ids):
    assert generate.read_prompt({"prompt_ids": text}, demo=False) == ids


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1,,2", "nothing between two commas of '1,,2'"),
        ("1,", "nothing between two commas of '1,'"),
        (",1", "nothing between two commas of ',1'"),
        ("1_0", "'1_0' in '1_0'"),
        ("1,٣", "'٣' in"),
        ("1,²", "'²' in"),
        ("1 2", "'1 2' in"),
        ("1,+2", "'+2' in"),
        ("1,-2", "'-2' in"),
        ("1,0x2", "'0x2' in"),
        ("1,2.0", "'2.0' in"),
        ("[1, 2.0]", "'2.0' in '[1, 2.0]'"),
        ("[1, true]", "'true' in"),
        ("[1, [2]]", "'[2]' in"),
        ("[1, 2", "'[1' in"),
        ("9" * 5000, "(5000 characters)"),
        ("1;" * 4000, "(8000 characters)"),
    ],
)
def test_prompt_ids_are_plain_decimal_integers(run, text, found):
    result = run("--prompt-ids", text)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error U34: --prompt-ids: found ") and found in result.stderr
    assert "expected decimal integers with single commas between" in result.stderr and len(result.stderr) < 400


@pytest.mark.parametrize("text", ["", " ", "[]"])
def test_no_prompt_ids_are_an_empty_prompt(run, text):
    result = run("--prompt-ids", text)
    assert result.exit_code == 2 and "prompt: found " in result.stderr


@pytest.fixture
def unread(monkeypatch) -> None:
    """Reading weights fails the test."""
    from mlx_spec import pair as loaded

    monkeypatch.setattr(loaded, "load_target", lambda _: pytest.fail("read"))


@pytest.fixture
def unproven(monkeypatch) -> None:
    """Probing fails the test."""
    monkeypatch.setattr("mlx_spec.probe.prove", lambda *_, **__: pytest.fail("probed"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--prompt-ids", f"1,{LLAMA['vocab_size']}"],
            f"U12: prompt token 1: found {LLAMA['vocab_size']}, expected 0 to",
        ),
        (["-p", "red"], "U14: prompt: found text, and a target without a tokenizer, expected token ids."),
    ],
)
def test_a_prompt_the_files_show_to_be_none_is_refused_before_weights_are_read(run, unread, args, message):
    result = run("--draft-kind", "prompt-lookup", *args)
    assert result.exit_code == 2 and result.stderr.startswith(f"error {message}"), result.stderr


@pytest.mark.parametrize("nested", [False, True])
def test_the_vocabulary_of_the_text_model_counts(run, unread, tmp_path, nested):
    config = {"model_type": "llama", "vocab_size": 90} if not nested else {"text_config": {"vocab_size": 90}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 500} | config))
    result = run("--prompt-ids", "90", model=tmp_path)
    assert result.stderr.startswith("error U12: prompt token 0: found 90, expected 0 to 89."), result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompt-ids", "339"], "U12: prompt token 0: found 339, expected 0 to "),  # a row without a token
        (["--prompt-ids", ",".join(["1"] * 5000)], "U13: prompt length: found 5000 tokens, expected at most "),
        (["-p", "red " * 5000], "U13: prompt length: found "),
    ],
)
def test_a_prompt_the_target_cannot_serve_is_refused_before_the_probe(run, spelled, unproven, args, message):
    result = run("--draft-kind", "prompt-lookup", *args, model=spelled)
    assert result.exit_code == 2 and result.stderr.startswith(f"error {message}"), result.stderr


def test_stops_without_a_tokenizer_are_refused_before_the_probe(run, unproven):
    result = run("--draft-kind", "prompt-lookup", "--prompt-ids", "1", "--stop", "x")
    assert result.exit_code == 2 and result.stderr.startswith("error U36: stop: "), result.stderr


def test_a_check_sees_the_pair_before_the_probe(target, unproven):
    def check(pair):
        assert pair.plan.exactness is None and pair.drafter is not None
        raise UsageError("this pair", found="it", expected="another", next_step="Take one")

    with pytest.raises(UsageError, match="^this pair"):
        load(str(target), kind="prompt-lookup", check=check)


# -- who said it -----------------------------------------------------------------------------------------

ABSENT = "/no/such/drafter"


@pytest.mark.parametrize(
    ("args", "env", "start"),
    [
        (["--draft-kind", "nope"], {}, "error U26: --draft-kind: found nope, "),
        ([], {"MLX_SPEC_DRAFT_KIND": "nope"}, "error U26: MLX_SPEC_DRAFT_KIND: found nope, "),
        ([], {"LLAMA_ARG_DRAFT_KIND": "nope"}, "error U26: LLAMA_ARG_DRAFT_KIND: found nope, "),
        (["--spec-config", '{"method": "nope"}'], {}, "error U26: --spec-config: found nope, "),
        (["--draft-kind", "nope"], {"MLX_SPEC_DRAFT_KIND": "mtp"}, "error U26: --draft-kind: found nope, "),
        (["--draft-kind", ""], {}, "error U26: --draft-kind: found an empty name, "),
        (["--draft-model", ABSENT], {}, f"error L01: model {ABSENT}: found no directory"),
        ([], {"MLX_SPEC_DRAFT_MODEL": ABSENT}, f"error L01: MLX_SPEC_DRAFT_MODEL: model {ABSENT}: found no directory"),
        (["--spec-config", f'{{"model": "{ABSENT}"}}'], {},
         f"error L01: --spec-config: model {ABSENT}: found no directory"),
        ([], {"MLX_SPEC_DRAFT_MODEL": ABSENT, "MLX_SPEC_DRAFT_KIND": "prompt-lookup"},
         f"error U21: MLX_SPEC_DRAFT_MODEL: found {ABSENT} together with MLX_SPEC_DRAFT_KIND prompt-lookup, "),
        ([], {"MLX_SPEC_DRAFT_KIND": "full-model"},
         "error U22: --draft-model: found no drafter directory, expected one for MLX_SPEC_DRAFT_KIND full-model"),
        (["--draft-kind", "prompt-lookup"], {"MLX_SPEC_DRAFT_BLOCK_SIZE": "x"},
         "error U03: environment variable MLX_SPEC_DRAFT_BLOCK_SIZE: found 'x', expected a whole number"),
        (["--draft-kind", "prompt-lookup"], {"LLAMA_ARG_DRAFT_BLOCK_SIZE": "65"},
         "error U03: environment variable LLAMA_ARG_DRAFT_BLOCK_SIZE: found '65', expected at most 64"),
        (["--draft-kind", "prompt-lookup", "--draft-block-size", "65"], {},
         "error U70: --draft-block-size (L, verified rows per round, anchor counted): found 65, "),
    ],
)  # fmt: skip
def test_the_flag_or_variable_that_gave_a_bad_value_is_named(run, args, env, start):
    result = run("--prompt-ids", "1,2", *args, **env)
    assert result.exit_code in (1, 2)
    assert result.stderr.startswith(start), result.stderr


def test_the_variable_is_named_for_a_directory_of_another_kind(run, target):
    result = run("--prompt-ids", "1", "--draft-model", target, MLX_SPEC_DRAFT_KIND="mtp")
    assert result.exit_code in (1, 2) and "--draft-kind" not in result.stderr
    assert result.stderr.startswith(("error U24: MLX_SPEC_DRAFT_KIND: found mtp for ", "error L20: head of target"))


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--draft-block-size", "65"], "U70"),
        (["--draft-kind", "nope"], "U26"),
        (["--draft-kind", "prompt-lookup", "--draft-model", "some-dir"], "U21"),
        (["--draft-kind", "full-model"], "U22"),
        (["--spec-config", '{"block_size": 65}'], "U70"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "pair", "probe", "bench", "tune"])
def test_drafting_options_are_checked_before_a_model_is_looked_for(command, args, code):
    result = CliRunner().invoke(cli, [command, "-m", "/no/such/target", *args])
    assert result.exit_code == 2 and result.stderr.startswith(f"error {code}: "), result.stderr


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"block_size": -1}, "U70"),
        ({"block_size": True}, "U70"),
        ({"dtype": "float64"}, "U25"),
        ({"exactness": "perfect"}, "U42"),
        ({"kv_bits": 3}, "U27"),
        ({"kind": "nope"}, "U26"),
        ({"kind": "prompt-lookup", "drafter": "some-dir"}, "U21"),
        ({"prefill_step": -1}, "U50"),
        ({"prefill_step": 0}, "U50"),
        ({"prefill_step": 5.0}, "U50"),
        ({"exactness": "unproven"}, "U42"),
        ({"options": 5}, "U50"),
        ({"options": ""}, "U50"),
        ({"options": [("min_n", 2)]}, "U50"),
        ({"probe": "no"}, "U50"),
        ({"tick": 5}, "U50"),
        ({"check": 5}, "U50"),
    ],
)
def test_what_is_asked_of_a_load_is_checked_before_a_model_is_looked_for(given, code):
    with pytest.raises(UsageError) as refused:
        load("/no/such/target", **given)
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("given", "start"),
    [
        ({"kind": "nope"}, "kind: found nope, expected "),
        ({"kind": "full-model"}, "drafter: found no drafter directory, expected one for kind full-model. Give "),
        ({"kind": "prompt-lookup", "drafter": "dir"}, "drafter: found dir together with kind prompt-lookup, "),
    ],
)
def test_what_a_load_was_given_goes_by_the_names_of_its_arguments(given, start):
    with pytest.raises(UsageError) as refused:
        load("/no/such/target", **given)
    assert str(refused.value).startswith(start)


def test_a_kernel_nobody_brings_is_refused_before_a_model_is_looked_for(monkeypatch):
    monkeypatch.setenv("MLX_SPEC_KERNELS", "foo")
    settings.reset_settings()
    with pytest.raises(UsageError, match="^MLX_SPEC_KERNELS: found foo, expected on") as refused:
        load("/no/such/target")
    assert refused.value.code == "U05"


def test_an_argument_of_another_type_is_told_with_its_type():
    with pytest.raises(UsageError) as refused:
        load("/no/such/target", options=5)
    want = "options: found int 5, expected a mapping of drafting options by name. Correct it, or leave it out."
    assert str(refused.value) == want


@pytest.mark.parametrize("name", ["dtype", "exactness"])
def test_an_empty_value_is_quoted(name):
    with pytest.raises(UsageError, match=f"^--{name}: found '', expected "):
        load("/no/such/target", **{name: ""})


def test_an_empty_drafter_beside_a_kind_without_one_is_quoted(run):
    result = run("--prompt-ids", "1", "--draft-model", "", "--draft-kind", "prompt-lookup")
    assert result.stderr.startswith("error U21: --draft-model: found '' together with --draft-kind prompt-lookup, ")


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_an_empty_name_of_a_prompt_file_is_quoted(command):
    result = CliRunner().invoke(cli, [command, "-m", "x", "--prompt-file", ""])
    assert result.exit_code == 2 and ": --prompt-file '': found " in result.stderr, result.stderr


def test_a_block_size_of_a_load_is_named_as_its_argument():
    with pytest.raises(UsageError, match=r"^block_size .* Give block_size a number in that range"):
        load("/no/such/target", block_size=99)


def test_options_without_a_drafter_are_refused(target):
    with pytest.raises(UsageError, match="drafting option min_n: found 2, and no drafter") as caught:
        load(str(target), options={"min_n": 2})
    assert caught.value.code == "U78"
    load(str(target), kind="none", options={"min_n": 2})  # asked not to draft: nothing is lost


@pytest.mark.parametrize("command", ["pair", "bench", "tune", "probe"])
def test_the_bundled_pair_is_said_by_every_command_that_takes_it(command, monkeypatch):
    from mlx_spec.cli import options

    def load_nothing(values, chosen=None, steps=None):
        raise UsageError("stop", found="here", expected="-", next_step="")

    for module in (options, import_module(f"mlx_spec.cli.{command}")):
        monkeypatch.setattr(module, "load_pair", load_nothing)
    result = CliRunner().invoke(cli, [command])
    assert result.stderr.startswith("no -m given: using the bundled demo pair ("), result.stderr


def test_a_width_the_drafter_cannot_run_is_refused_before_weights_are_read(target, monkeypatch):
    from mlx_spec import loading
    from mlx_spec import pair as loaded

    card = DrafterCard("prompt-lookup", "", max_block_size=8)
    choice = loading.DrafterChoice("prompt-lookup", None, card, "core", "--draft-kind")
    monkeypatch.setattr(loaded, "choose_drafter", lambda *_, **__: choice)
    monkeypatch.setattr(loaded, "load_target", lambda _: pytest.fail("read"))
    with pytest.raises(UsageError, match="found 9, expected at most 8") as refused:
        load(str(target), kind="prompt-lookup", block_size=9)
    assert refused.value.code == "U71"


# -- MLX_SPEC_PLUGINS ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "name"), [("nope", "nope"), (",", ","), (" ", " "), ("acme, nope", "nope")])
@pytest.mark.parametrize("command", [["generate"], ["generate", "-m", "T", "-p", "x"], ["inspect", "T"]])
def test_a_plugin_that_is_asked_for_and_absent_is_refused(site, run, target, command, value, name):
    site.install("acme-spec", "acme", "")
    run("--prompt-ids", "1", MLX_SPEC_PLUGINS=value)
    result = CliRunner().invoke(cli, [str(target) if part == "T" else part for part in command])
    assert result.exit_code == 1 and result.stdout == ""
    start = f"error G02: plugin {name!r} of MLX_SPEC_PLUGINS: found no entry point of that name"
    assert result.stderr.startswith(start)
    assert "acme" in result.stderr.split("installed: ")[1]
    listing = CliRunner().invoke(cli, ["plugins"])  # which shows the same error
    assert listing.exit_code == 1 and start in listing.stdout


def test_a_plugin_that_was_left_out_is_not_called_missing(site, run):
    site.install("acme-spec", "acme", "")
    run("--prompt-ids", "1", MLX_SPEC_PLUGINS="acme")
    result = CliRunner().invoke(cli, ["generate"])
    assert "no plugin that ships a demo pair (MLX_SPEC_PLUGINS lets in only acme)" in result.stderr
    assert "unset MLX_SPEC_PLUGINS" in result.stderr
    result = run("--prompt-ids", "1", "--draft-kind", "dflash")
    assert "none (MLX_SPEC_PLUGINS lets in only acme). Choose" in result.stderr


# -- bundled pairs ---------------------------------------------------------------------------------------

DEMO_PLUGIN = """
from pathlib import Path
from mlx_spec.hookspecs import hookimpl

@hookimpl
def spec_register(register):
    register.demo("{name}", Path("{target}"), Path("{drafter}"))
"""


@pytest.fixture
def demos(site, monkeypatch) -> Iterator[None]:
    """Two plugins with a demo pair each, and no other plugin."""
    for name in ("zulu", "alpha"):
        source = DEMO_PLUGIN.format(name=f"{name} text", target=f"/{name}/target", drafter=f"/{name}/drafter")
        site.install(f"{name}-spec", name, source)
    monkeypatch.setenv("MLX_SPEC_PLUGINS", "zulu,alpha")
    settings.reset_settings()
    yield
    monkeypatch.undo()
    settings.reset_settings()


@pytest.mark.parametrize(("given", "name"), [(None, "alpha"), ("demo:alpha", "alpha"), ("demo:zulu", "zulu")])
def test_the_first_demo_by_plugin_name_or_the_one_that_is_named(demos, given, name):
    chosen = options.read_pair_options({"target": given})
    assert (chosen.target, chosen.draft_model) == (f"/{name}/target", f"/{name}/drafter")
    assert chosen.demo.owner == name


def test_a_demo_drafts_with_the_drafter_or_kind_that_was_given(demos):
    assert options.read_pair_options({"target": "demo:zulu", "draft_model": "other"}).draft_model == "other"
    assert options.read_pair_options({"target": "demo:zulu", "draft_kind": "prompt-lookup"}).draft_model is None


def test_a_demo_nobody_brings_is_refused_with_the_names_there_are(demos):
    result = CliRunner().invoke(cli, ["generate", "-m", "demo:nope"])
    assert result.exit_code == 2 and result.stdout == ""
    assert "found demo:nope" in result.stderr and "one of demo:alpha, demo:zulu" in result.stderr


@pytest.mark.parametrize("line", ["inspect {}", "convert {} -o out", "split-mtp -m {} -o out"])
def test_every_command_that_takes_a_model_takes_a_demo(demos, line, tmp_path, monkeypatch):
    """These two hold nothing; what is refused is the folder, after it was found."""
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(cli, line.format("demo:zulu").split())
    assert found.exit_code == 1 and "/zulu/target" in found.output + found.stderr
    wrong = CliRunner().invoke(cli, line.format("demo:nope").split())
    assert wrong.exit_code == 2 and "found demo:nope, expected one of demo:alpha, demo:zulu" in wrong.stderr


def test_a_demo_as_a_drafter_is_the_drafter_of_the_pair(demos):
    assert refs.resolve("demo:zulu", config=False).path == Path("/zulu/target")
    assert refs.resolve("demo:zulu", config=False, drafter=True).path == Path("/zulu/drafter")


# -- no tokens to spell ----------------------------------------------------------------------------------


@pytest.fixture
def spelled(tmp_path) -> Path:
    """A target with tokenizer files."""
    return write_tokenizer(write_model(tmp_path / "spelled", LLAMA | {"vocab_size": 340, "num_hidden_layers": 2}))


def test_ids_need_no_tokenizer_json(run, spelled):
    whole = json.loads(run("--prompt-ids", "5,6", "--json", "--ignore-eos", model=spelled).stdout)
    (spelled / "tokenizer.json").unlink()
    result = run("--prompt-ids", "5,6", "--json", "--ignore-eos", model=spelled)
    assert result.exit_code == 0, result.output
    bare = json.loads(result.stdout)
    assert len(bare["token_ids"]) == 4 == len(whole["token_ids"]) and bare["text"] == "" and whole["text"]
    assert "WARNING no tokenizer: " in result.stderr and "tokenizer_config.json" in result.stderr


def test_text_still_needs_one(run, spelled):
    (spelled / "tokenizer.json").unlink()
    result = run("-p", "red", model=spelled)
    assert result.exit_code == 2
    assert "prompt: found text, and a target without a tokenizer, expected token ids" in result.stderr
    assert "tokenizer.json" in result.stderr


def test_inspect_says_that_there_is_none(spelled):
    (spelled / "tokenizer.json").unlink()
    result = CliRunner().invoke(cli, ["inspect", str(spelled)])
    assert result.exit_code == 0 and "state: none" in result.stdout
    lack = "found tokenizer_config.json and no file with the tokens (tokenizer.json)"
    assert result.stderr.startswith(f"warning L41: tokenizer of {spelled}: {lack}, expected ")


# -- quantised K/V ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "group", "step"), [(16, 32, "Leave K/V of this model unquantised"), (64, 128, "Choose 32 or 64, or")]
)
def test_a_group_that_heads_do_not_divide_by_is_refused_while_loading(run, tmp_path, width, group, step):
    model = write_model(tmp_path / "model", LLAMA | {"num_hidden_layers": 2, "head_dim": width})
    with pytest.raises(LoadError, match=f"found {group} with a head of {width}, expected a divisor.*{step}") as caught:
        load(str(model), kv_bits=4, kv_group_size=group)
    assert caught.value.code == "L33"
    result = run("--prompt-ids", "1,2", "--kv-bits", "8", "--kv-group-size", group, model=model)
    assert result.exit_code == 1 and result.stdout == "" and step in result.stderr
    assert load(str(model), kv_group_size=group).plan.kv_bits is None  # without quantised K/V it means nothing


@pytest.mark.parametrize(
    ("bits", "group", "code"), [(3, 64, "U27"), (4.0, 64, "U27"), (4, 48, "U28"), (8, "64", "U28")]
)
def test_bits_and_groups_that_do_not_exist_are_refused_before_anything_is_loaded(bits, group, code):
    with pytest.raises(UsageError) as caught:
        load("/no/such/target", kv_bits=bits, kv_group_size=group)
    assert caught.value.code == code


# -- texts -----------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path) -> Callable[[bytes], Path]:
    """A file of these bytes."""

    def write(data: bytes) -> Path:
        (tmp_path / "prompt").write_bytes(data)
        return tmp_path / "prompt"

    return write


def test_prompts_are_read_from_a_file_or_standard_input(source, monkeypatch):
    """Without the line break that ends the last line, but no other."""
    for data, text in (("žluť\r\nkůň\r\n", "žluť\nkůň"), ("a\n\n", "a\n"), ("a ", "a "), ("\n", "")):
        assert generate.read_prompt({"prompt_file": str(source(data.encode()))}, demo=False) == text
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data.encode())))
        assert generate.read_prompt({"prompt": "-"}, demo=False) == text


@pytest.mark.parametrize(
    ("data", "found"), [(b"ab\xff", "can't decode byte 0xff in position 2"), (b"x" * 1001, "more than 0 MiB")]
)
def test_texts_that_cannot_be_prompts_are_refused(run, source, monkeypatch, data, found):
    """The limit is what a file that never ends meets, /dev/zero for one."""
    monkeypatch.setattr(promptfile, "LIMIT", 1000)
    result = run("--prompt-file", source(data))
    assert result.exit_code == 2 and result.stderr.startswith(f"error U33: --prompt-file {source(data)}: found ")
    assert found in result.stderr and "expected readable UTF-8 text" in result.stderr
    result = CliRunner().invoke(cli, ["generate", "-m", "x", "-p", "-"], input=data)
    assert result.exit_code == 2 and result.stderr.startswith("error U33: prompt on standard input: found ")
    assert found in result.stderr
    result = CliRunner().invoke(cli, ["bench", "-m", "x", "--prompt-file", str(source(data))])
    assert result.exit_code == 2 and found in result.stderr


def test_absent_files_and_a_closed_standard_input_are_refused(run, tmp_path, monkeypatch):
    result = run("--prompt-file", tmp_path / "none")
    assert result.exit_code == 2 and "none: found No such file or directory, expected readable" in result.stderr
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UsageError, match="prompt on standard input: found it closed"):
        generate.read_prompt({"prompt": "-"}, demo=False)


def test_logprobs_that_are_not_shown_are_said(run):
    told = "note: --logprobs are shown with --json\n"
    assert told in run("--prompt-ids", "1,2", "--logprobs", "2").stderr
    assert told not in run("--prompt-ids", "1,2", "--logprobs", "2", "--json").stderr
    assert told not in run("--prompt-ids", "1,2").stderr


@pytest.mark.parametrize("command", ["generate", "probe", "bench", "tune"])
def test_a_note_of_the_load_is_told_once(tmp_path, monkeypatch, command):
    """Also where it is worth a warning to those who call `load` themselves."""
    path = write_model(write_tokenizer(tmp_path / "tiny"), LLAMA | {"num_hidden_layers": 2, "vocab_size": 340}, seed=4)
    monkeypatch.setenv("MLX_SPEC_ACTIVATIONS", "int8")
    settings.reset_settings()
    given = {"generate": ["-p", "x", "-n", "2"], "bench": ["-n", "16"], "tune": ["-n", "16"]}.get(command, [])
    given += [] if command in ("generate", "probe") else ["--workload", "code"]
    result = CliRunner().invoke(cli, [command, "-m", str(path), "--draft-kind", "prompt-lookup", *given])
    assert result.stderr.count("MLX_SPEC_ACTIVATIONS=int8 changes nothing here") == 1, result.output
    assert "note: MLX_SPEC_ACTIVATIONS=int8 changes nothing here" in result.stderr and "WARNING" not in result.stderr


@pytest.mark.parametrize("flags", [[], ["--json"], ["--compare"]])
def test_an_interrupted_reply_is_told_as_far_as_it_came(run, monkeypatch, flags):
    from mlx_spec.advance import Advancer

    step, steps = Advancer.step, []

    def interrupted(self, joining):
        steps.append(joining)
        if len(steps) == 9:
            raise KeyboardInterrupt
        return step(self, joining=joining)

    ids = json.loads(run("--prompt-ids", "1,2,3", "-n", "6", "--ignore-eos", "--json").stdout)["token_ids"]
    monkeypatch.setattr(generate, "_warm_up", lambda *_: None)
    monkeypatch.setattr(Advancer, "step", interrupted)
    count = 6 if flags == ["--compare"] else 64  # the reply itself is over by then, the one to compare with is not
    result = run("--prompt-ids", "1,2,3", "-n", count, "--ignore-eos", *flags)
    assert result.exit_code == 130 and result.stderr.endswith("interrupted\n")
    if flags == ["--json"]:
        told = json.loads(result.stdout)
        assert told["finish_reason"] == "cancelled" and "error" not in told
        assert told["token_ids"][:6] == ids and len(told["token_ids"]) < 64
    else:
        assert f"finish: {'length' if flags else 'cancelled'}\n" in result.stderr and "tokens/s" in result.stderr


def test_an_interrupt_before_the_first_token_is_one_word(run, monkeypatch):
    from mlx_spec.prefill import Prefill

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Prefill, "chunk", interrupted)
    result = run("--prompt-ids", "1,2,3")
    assert result.exit_code == 130 and result.stdout == ""
    assert [line for line in result.stderr.splitlines() if line][1:] == ["interrupted"]


def test_a_long_prompt_is_told_how_far_it_is_read(run, monkeypatch):
    from mlx_spec.cli import output
    from mlx_spec.prefill import Prefill

    chunk, spoken = Prefill.chunk, threading.Event()

    def slow(self):
        if self.done == 4:
            assert spoken.wait(30)
        return chunk(self)

    def heard(text):
        if text.startswith("reading"):
            told.append(text)
            spoken.set()

    told = []
    monkeypatch.setattr(output, "SPEAK_FIRST", 0.2)
    monkeypatch.setattr(Prefill, "chunk", slow)
    monkeypatch.setattr(output, "note", heard)
    ids = ",".join(["7"] * 10)
    assert run("--prompt-ids", ids, "--prefill-step", "4").exit_code == 0
    assert re.fullmatch(r"reading the prompt: [04] of 10 tokens \(\d+ s so far\)", told[0])


# -- what was remembered ---------------------------------------------------------------------------------


def spoil(value: object, change: Callable[[object], object]) -> object:
    """A JSON value with `change` made to every leaf."""
    if isinstance(value, dict):
        return {key: spoil(entry, change) for key, entry in value.items()}
    return [spoil(entry, change) for entry in value] if isinstance(value, list) else change(value)


CHANGES = {
    "other types": lambda leaf: "nan" if isinstance(leaf, int | float) else 7,
    "negative": lambda leaf: -1 - leaf if isinstance(leaf, int | float) else leaf,
    "NaN": lambda leaf: float("nan") if isinstance(leaf, float) else leaf,
    "too wide": lambda leaf: 64 if leaf == 4 else leaf,
    "a level nobody has": lambda leaf: "perfect" if leaf in ("bitwise", "greedy") else leaf,
    "another pair's": lambda leaf: "0" * 32 if isinstance(leaf, str) and len(leaf) == 32 else leaf,
    "nothing": lambda leaf: None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_memo_that_cannot_be_ours_is_measured_again(run, tmp_path, change):
    args = ("--prompt-ids", "1,2,3", "--draft-kind", "prompt-lookup", "--draft-block-size", "4", "--json")
    assert "(probed)" in run(*args).stderr and "(memo)" in run(*args).stderr
    (memo,) = (tmp_path / "mlx-spec-cache" / "exactness").iterdir()
    memo.write_text(json.dumps(spoil(json.loads(memo.read_text()), CHANGES[change])))
    result = run(*args)
    assert result.exit_code == 0 and "(probed)" in result.stderr, result.output
    assert "(memo)" in run(*args).stderr


def test_fields_of_a_memo_that_are_no_containers(run, tmp_path):
    args = ("--prompt-ids", "1,2,3", "--draft-kind", "prompt-lookup", "--json")
    run(*args)
    (memo,) = (tmp_path / "mlx-spec-cache" / "exactness").iterdir()
    whole = json.loads(memo.read_text())
    for field in ("environment", "widths"):
        for value in ("text", 3, [3], {"a": 3}):
            memo.write_text(json.dumps(whole | {field: value}))
            assert "(probed)" in run(*args).stderr


def test_a_probe_of_a_block_without_drafts_says_what_to_change(target):
    pair = ["-m", str(target), "--draft-kind", "prompt-lookup", "--draft-block-size", "1"]
    result = CliRunner().invoke(cli, ["probe", *pair])
    assert result.exit_code == 2 and "(block size 1 turns drafting off)" in result.stderr
    assert "Change the setting that turned it off." in result.stderr


# -- homes nobody has ------------------------------------------------------------------------------------


def test_a_home_that_nobody_has_is_said_in_one_line(run):
    result = run("--prompt-ids", "1", "--draft-model", "~no-such-person/drafter")
    assert result.exit_code == 1 and "found no directory ~no-such-person/drafter" in result.stderr
    result = run("--prompt-ids", "1", MLX_SPEC_CACHE_DIR="~no-such-person/cache")
    assert result.exit_code == 2
    assert result.stderr.startswith("error U03: environment variable MLX_SPEC_CACHE_DIR: found ")
    assert "expected a folder below a home directory that exists" in result.stderr


# -- every flag arrives (report 185) ---------------------------------------------------------------------

SAMPLING = {
    "--temp": ("temperature", 0.7), "--top-p": ("top_p", 0.9), "--top-k": ("top_k", 40), "--min-p": ("min_p", 0.1),
    "--seed": ("seed", 5), "--acceptance": ("acceptance", "rejection"), "--min-tokens": ("min_tokens", 2),
    "--repetition-penalty": ("repetition_penalty", 1.2), "--presence-penalty": ("presence_penalty", 0.3),
    "--frequency-penalty": ("frequency_penalty", 0.4), "--logprobs": ("logprobs", 3),
}  # fmt: skip


def test_every_flag_of_a_reply_and_of_a_pair_arrives(run, spelled, monkeypatch):
    seen = {}

    def stop(pair, request, quiet):
        seen.update(pair=pair, prompt=request.prompt, sampling=request.sampling, adaptive=request.adaptive)
        seen["tokens"] = request.max_tokens
        raise LoadError("this run", found="enough", expected="nothing", next_step="Look at what came in", code="L05")

    monkeypatch.setattr(generate, "_run", stop)
    flags = [str(part) for flag, (_, value) in SAMPLING.items() for part in (flag, value)]
    pair = {"--draft-model": spelled, "--draft-kind": "full-model", "--draft-block-size": 3, "--exactness": "lossy",
            "--kv-bits": "8", "--kv-group-size": "32", "--dtype": "float16", "--prefill-step": 7}  # fmt: skip
    flags += [str(part) for item in pair.items() for part in item]
    model = write_model(spelled.parent / "wide", LLAMA | {"vocab_size": 340, "num_hidden_layers": 2, "head_dim": 32})
    write_tokenizer(model)
    result = run("-p", "red", "--no-chat-template", "--stop", "blue", "--fixed", "--no-probe", *flags, model=model)
    assert "this run: found enough" in result.stderr, result.output
    plan, sampling = seen["pair"].plan, seen["sampling"]
    assert {name: getattr(sampling, name) for name, _ in SAMPLING.values()} == dict(SAMPLING.values())
    assert (sampling.stop, seen["adaptive"], seen["tokens"]) == (("blue",), False, 4)
    assert seen["prompt"] == seen["pair"].tokenizer.encode("red")
    assert (plan.requested, plan.block_size, plan.block_size_from) == ("full-model", 3, "--draft-block-size")
    assert (plan.kv_bits, plan.kv_group_size, plan.prefill_step) == (8, 32, 7)
    assert (plan.exactness_asked, plan.exactness) == ("lossy", None) and "probe was skipped" in plan.reason
    for side in (seen["pair"].target, seen["pair"].drafter):
        assert {str(value.dtype) for _, value in tree_flatten(side.model.parameters())} == {"mlx.core.float16"}
    assert seen["pair"].token_limit == len(seen["pair"].tokenizer) < 340  # the rest of the table is padding


@pytest.mark.parametrize(
    ("flags", "method", "block", "law"),
    [
        (["--draft-kind", "prompt-lookup"], "prompt-lookup", 8, "greedy"),
        (["--draft-kind", "prompt-lookup", "--draft-block-size", "3"], "prompt-lookup", 3, "greedy"),
        (["--draft-model", "SELF"], "full-model", 4, "greedy"),
        (["--draft-model", "SELF", "--spec-config", '{"num_speculative_tokens": 5}'], "full-model", 6, "greedy"),
        (["--draft-model", "SELF", "--temp", "1", "--seed", "2"], "full-model", 4, "coupled"),
        (["--draft-model", "SELF", "--temp", "1", "--acceptance", "rejection"], "full-model", 4, "rejection"),
    ],
)
def test_what_was_asked_for_is_what_drafts(run, target, flags, method, block, law):
    """Each mode shows in the settings of the reply and in its counters."""
    flags = [str(target) if flag == "SELF" else flag for flag in flags]
    ids = ",".join(["9,8,7,6,5"] * 5)
    out = json.loads(run("--prompt-ids", ids, "-n", "24", "--json", "--fixed", "--ignore-eos", *flags).stdout)
    told, counted = out["speculation"], out["timings"]
    assert (told["method"], told["block_size"], told["law"]) == (method, block, law)
    assert (told["requested"], counted["draft_kind"], told["active"]) == (method, method, True)
    assert counted["draft_n"] > 0 and 0 < len(told["proposed_by_position"]) <= block - 1
    if method == "full-model":
        assert counted["draft_n_accepted"] == counted["draft_n"] and len(told["proposed_by_position"]) == block - 1


@pytest.mark.parametrize("how", ["none", "prompt-lookup"])
def test_a_reply_that_fails_says_its_code_in_the_object(run, monkeypatch, how):
    import mlx.core as mx

    from mlx_spec.generic_target import GenericTarget
    from mlx_spec.types import Verification

    def forward(self, tokens, states, taps=()):
        return Verification(mx.full((*tokens.shape, self.vocab_size), mx.nan))

    monkeypatch.setattr(GenericTarget, "forward", forward)
    result = run("--prompt-ids", "1,2", "--json", "--no-probe", "--draft-kind", how)
    told = json.loads(result.stdout)
    assert (told["finish_reason"], told["error_code"]) == ("error", "R12")
    assert told["error"].startswith("target logits: found NaN") and result.exit_code == 1
    assert "error R10: reply: found target logits: found NaN" in result.stderr


# -- why there are no drafts (report 187) ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "active", "reason"),
    [
        ([], False, "no drafter was asked for"),
        (["--draft-kind", "none"], False, "no drafter was asked for"),
        (["--draft-kind", "prompt-lookup", "--draft-block-size", "1"], False, "block size 1 turns drafting off"),
        (["--draft-kind", "prompt-lookup", "--no-probe"], True, "exactness unproven: the probe was skipped"),
        (["--draft-kind", "prompt-lookup", "--temp", "1"], True, "exactness bitwise at L=8 (probed)"),
    ],
)
def test_every_state_is_readable_per_pair_and_per_reply(run, tmp_path, flags, active, reason):
    result = run("--prompt-ids", "5", "--json", *flags, MLX_SPEC_CACHE_DIR=str(tmp_path))
    told = json.loads(result.stdout)["speculation"]
    assert (told["active"], told["reason"]) == (active, reason)
    assert f"speculation={'on' if active else 'off'}" in result.stderr and f"reason={reason!r}" in result.stderr
    level = "plain" if not active else "unproven" if "--no-probe" in flags else "bitwise"
    assert f" exactness={level} " in result.stderr


def test_the_probe_counts_its_rows_and_explains_a_tie(target, monkeypatch):
    from mlx_spec.types import ExactnessReport

    def report(gap: float) -> ExactnessReport:
        width = {"level": "bitwise", "unequal": 0, "mismatches": 0, "max_abs_diff": 0.0, "min_gap": gap}
        widths = [{"width": 2, "rows": 45, **width}, {"width": 3, "rows": 65, **width}]
        return ExactnessReport("bitwise", 3, 3, 0.0, gap, rows=65, widths=widths)

    for gap, told in ((0.0, True), (0.25, False)):
        monkeypatch.setattr("mlx_spec.probe.prove", lambda *_, gap=gap, **__: report(gap))
        result = CliRunner().invoke(cli, ["probe", "-m", str(target), "--draft-kind", "prompt-lookup"])
        assert result.exit_code == 0 and "110, 65 of them at L=3" in result.stdout
        assert ("(a tie)" in result.stdout, "share the highest logit" in result.stderr) == (told, told)
