"""A byte-level tokenizer without merges, for checkpoints too small to have learned one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>")
"""Special tokens in id order, from 0."""


def byte_characters() -> list[str]:
    """The printable character that stands for each byte 0..255 in byte-level vocabularies."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in visible else chr(next(spare)) for b in range(256)]


def write_byte_tokenizer(path: Path, vocab_size: int, specials: Sequence[str] = SPECIALS) -> Path:
    """Write tokenizer.json and tokenizer_config.json into `path`; returns it.

    Ids: the specials, then one per byte, as many as fit in `vocab_size`; a vocabulary too small for all
    bytes knows printable ASCII and the newline. Ids past them exist in the model but never in text, as in
    real checkpoints. `specials` must hold <pad>, <eos>, <bos> and <unk>.
    """
    characters = byte_characters()
    if vocab_size < len(specials) + 256:
        characters = [characters[b] for b in (10, *range(32, 127))]
    tokens = [*specials, *characters][:vocab_size]
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(i, name) for i, name in enumerate(specials)],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{name.strip('<>')}_token": name for name in ("<pad>", "<eos>", "<bos>", "<unk>")},
    }
    path.mkdir(parents=True, exist_ok=True)
    _write(path / "tokenizer.json", tokenizer)
    _write(path / "tokenizer_config.json", config)
    return path


def _special(i: int, name: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": name, "special": True, **flags}


def _write(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
