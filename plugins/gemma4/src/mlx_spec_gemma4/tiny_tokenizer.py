"""The tokenizer of tiny checkpoints: bytes, behind the special tokens config.json names."""

from __future__ import annotations

from pathlib import Path

from mlx_spec.testing import write_byte_tokenizer

SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>", "<image>", "<audio>", "<video>")
"""Special tokens in id order, from 0."""


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """Write tokenizer.json, tokenizer_config.json; a small vocabulary knows printable ASCII only."""
    write_byte_tokenizer(path, vocab_size, SPECIALS)
