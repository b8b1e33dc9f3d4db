"""Tiny checkpoints: layout, determinism, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mlx_spec.checkpoint import tensor_index
from mlx_spec.errors import UsageError
from mlx_spec_gemma4.tiny import write_tiny


def test_layout_is_that_of_a_real_checkpoint(pair_dirs: Any) -> None:
    target, drafter = pair_dirs("E")
    for path in (target, drafter):
        index = json.loads((path / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == sorted(f.name for f in path.glob("*.safetensors"))
        assert len(tensor_index(path)) == len(index["weight_map"])
        assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == 1
    assert (target / "tokenizer.json").exists()
    assert (target / "tokenizer_config.json").exists()


def test_tokenizer_round_trips_text(pair_dirs: Any) -> None:
    tokenizer = Tokenizer.from_file(str(pair_dirs("E")[0] / "tokenizer.json"))
    text = "def f(x):\n\treturn 'ä€😀'  # ok"
    encoded = tokenizer.encode(text)
    assert len(encoded.ids) == len(text.encode())
    assert tokenizer.decode(encoded.ids) == text
    assert tokenizer.token_to_id("<eos>") == 1


def test_small_vocabularies_know_printable_ascii(tmp_path: Path) -> None:
    target, _ = write_tiny(tmp_path, "D31", vocab_size=128)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    ids = tokenizer.encode("a b\nZ~").ids
    assert tokenizer.decode(ids) == "a b\nZ~"
    assert max(ids) < 128
    assert tokenizer.get_vocab_size() <= 128


def test_unknown_variants_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"found variant 'X', expected one of E, D31"):
        write_tiny(tmp_path, "X")
    with pytest.raises(UsageError, match="a multiple of 16"):
        write_tiny(tmp_path, "E", vocab_size=300)
    with pytest.raises(UsageError, match=r"--set hiden_size: found an unknown key, expected one of .*variant"):
        write_tiny(tmp_path, "E", hiden_size=300)
