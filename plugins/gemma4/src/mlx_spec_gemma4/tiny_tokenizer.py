"""A byte-level tokenizer without merges, for checkpoints too small to have learned one."""

from __future__ import annotations

import json
from pathlib import Path

SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>", "<image>", "<audio>", "<video>")
"""Special tokens in id order, from 0."""


def byte_characters() -> list[str]:
    """The printable character that stands for each byte 0..255 in byte-level vocabularies."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in visible else chr(next(spare)) for b in range(256)]


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """Write tokenizer.json, tokenizer_config.json; a small vocabulary knows printable ASCII only.

    Ids past the known bytes exist in the model but never in text, as in real checkpoints.
    """
    characters = byte_characters()
    if vocab_size < len(SPECIALS) + 256:
        characters = [characters[b] for b in (10, *range(32, 127))]
    tokens = [*SPECIALS, *characters][:vocab_size]
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(i, name) for i, name in enumerate(SPECIALS)],
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
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "bos_token": "<bos>",
        "unk_token": "<unk>",
    }
    _write(path / "tokenizer.json", tokenizer)
    _write(path / "tokenizer_config.json", config)


def _special(i: int, name: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": name, "special": True, **flags}


def _write(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
