"""Tiny checkpoints: the command line, the registration of writers, the byte tokenizer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from mlx_spec.checkpoint import tensor_index
from mlx_spec.errors import PluginError, UsageError
from mlx_spec.registry import Register, Registry
from mlx_spec.testing import families, write_byte_tokenizer, write_tiny
from mlx_spec.testing.__main__ import main


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_command_writes_a_pair_in_the_real_layout(tmp_path: Path, family: str, capsys) -> None:
    assert main(["tiny", family, "--out", str(tmp_path), "--seed", "3"]) == 0
    out = capsys.readouterr().out
    for name in ("target", "drafter"):
        path = tmp_path / name
        assert str(path) in out
        index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
        assert len(set(index.values())) == 2
        assert set(index) == set(tensor_index(path))
        assert Tokenizer.from_file(str(path / "tokenizer.json")).token_to_id("<eos>") == 1
    target, drafter = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("target", "drafter"))
    sizes = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    assert len({target[key] for key in sizes}) == len(sizes), "unequal sizes for unequal axes"
    assert drafter["vocab_size"] <= target["vocab_size"]
    assert all(drafter[key] < target[key] for key in sizes)


def test_the_seed_alone_decides_the_bytes(tmp_path: Path) -> None:
    one, same, other = (write_tiny("llama", tmp_path / str(i), seed) for i, seed in enumerate((3, 3, 4)))
    for side in (0, 1):
        for file in sorted(one[side].iterdir()):
            assert file.read_bytes() == (same[side] / file.name).read_bytes()
    weights = [(pair.target / "model-00001-of-00002.safetensors").read_bytes() for pair in (one, other)]
    assert weights[0] != weights[1]


def test_settings_reach_the_writer(tmp_path: Path) -> None:
    assert main(["tiny", "llama", "--out", str(tmp_path), "--set", "hidden_size=64", "--set", "vocab_size=128"]) == 0
    target, drafter = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("target", "drafter"))
    assert (target["hidden_size"], target["vocab_size"], drafter["vocab_size"]) == (64, 128, 128)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["llama", "--out", "x", "--set", "hiden_size=3"],
            "--set hiden_size: found an unknown key, expected one of ",
        ),
        (["lama", "--out", "x"], "family: found 'lama', expected one of gemma3"),
        (["llama"], "--out: found no folder, expected --out DIR"),
        (["llama", "--out", "x", "--set", "nothing"], "--set: found 'nothing', expected KEY=VALUE"),
    ],
)
def test_a_bad_command_line_is_refused_in_one_sentence(arguments: list[str], message: str, capsys) -> None:
    assert main(["tiny", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_module_runs_and_lists_families() -> None:
    command = [sys.executable, "-m", "mlx_spec.testing", "tiny"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == list(families())
    assert {"llama", "gemma3"} <= set(families())


@pytest.mark.parametrize("writer", ["", "module", "module:", ":function", "module:not a name", None])
def test_a_writer_is_a_module_and_a_function(writer: str) -> None:
    with pytest.raises(PluginError, match='tiny writer of family .mine. .*expected "module:function"'):
        Register("mine", "mlx-spec-mine").tiny("mine", writer)


HOOK = """from mlx_spec import hookimpl
@hookimpl
def spec_register(register):
    register.tiny('mine', '{}')
"""


def registry(*claims: tuple[str, str]) -> Registry:
    """A registry in which each (owner, writer) offers the family "mine"."""
    out = Registry()
    for owner, writer in claims:
        register = Register(owner, f"mlx-spec-{owner}")
        register.tiny("mine", writer)
        out.add(register)
    return out


def test_writers_are_found_by_family_and_clashes_name_both() -> None:
    one = registry(("a", "a.tiny:write"))
    assert one.tiny_families() == ("mine",)
    assert (one.tiny_writer("mine"), one.tiny_writer("other")) == ("a.tiny:write", None)
    two = registry(("a", "a.tiny:write"), ("b", "b.tiny:write"))
    with pytest.raises(PluginError, match="tiny family 'mine'.*mlx-spec-a, mlx-spec-b"):
        two.tiny_writer("mine")
    assert [e.code for e in two.conflicts("b")] == ["G04"]


def test_a_writer_that_does_not_import_is_named(site) -> None:
    site.install("mlx-spec-mine", "mine", HOOK.format("gone:write"))
    with pytest.raises(PluginError, match=r"tiny writer of family 'mine': found 'gone:write', which does not import"):
        write_tiny("mine", "x")


def test_an_option_the_writer_does_not_take_is_named(site) -> None:
    source = HOOK.format("mlx_spec_mine_plugin:write") + "def write(out, seed, width=3):\n    return out, None\n"
    site.install("mlx-spec-mine", "mine", source)
    assert write_tiny("mine", "x", options={"width": 4}).drafter is None
    with pytest.raises(UsageError, match=r"--set for family 'mine': found .*heights"):
        write_tiny("mine", "x", options={"heights": 4})


def test_the_tokenizer_spells_any_text_in_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_byte_tokenizer(tmp_path, 300) / "tokenizer.json"))
    text = "def f(x):\n\treturn 'ä€😀'  # ok"
    encoded = tokenizer.encode(text)
    assert len(encoded.ids) == len(text.encode())
    assert tokenizer.decode(encoded.ids) == text
    assert max(encoded.ids) < 260
    small = Tokenizer.from_file(str(write_byte_tokenizer(tmp_path / "small", 128) / "tokenizer.json"))
    assert small.decode(small.encode("a b\nZ~").ids) == "a b\nZ~"
    assert small.get_vocab_size() <= 128


@pytest.mark.parametrize("family", families())
def test_help_after_a_family_tells_every_option_of_its_writer(family: str, capsys) -> None:
    from inspect import signature

    from mlx_spec.testing.writers import writer_of

    assert main(["tiny", family, "--help"]) == 0
    out = capsys.readouterr().out
    assert "--set KEY=VALUE" in out and f"--set for {family}" in out
    described = out.partition(f"--set for {family}")[2]
    assert described.startswith((", with their defaults:\n  ", ":\n"))
    for name in signature(writer_of(family)).parameters:
        if name not in ("out", "seed"):
            said = re.findall(rf"^\s*(?:\w+, )*{name}(?:, \w+)*: \S", described, re.M)
            assert said, f"{name} is not described"


def test_help_without_a_family_is_the_usage(capsys) -> None:
    assert main(["tiny", "-h"]) == 0
    assert "--set for" not in capsys.readouterr().out
