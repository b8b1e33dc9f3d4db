"""The text, which is the source of the running Python's library, and the tokenizer trained on it."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from .settings import BOS, EOS, HELD_OUT, SEED, SPECIALS, VOCAB

SKIPPED_PARTS = {
    "__pycache__",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
SKIPPED_FILES = {"html/entities.py", "locale.py", "stringprep.py", "this.py"}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 4096,
    "pad_token": "<pad>",
    "eos_token": "<eos>",
    "bos_token": "<bos>",
    "unk_token": "<pad>",  # never met by bytes; unnamed, transformers adds one of its own beyond the vocabulary
}


def library_files() -> list[Path]:
    """Source files of the standard library, sorted, without tests, generated files and large tables."""
    root = library_root()
    found = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        skipped = SKIPPED_PARTS.intersection(relative.parts) or relative.as_posix() in SKIPPED_FILES
        generated = relative.name.startswith("_sysconfigdata") or relative.parts[0].startswith("config-")
        if not skipped and not generated:
            found.append(path)
    return found


def library_root() -> Path:
    """Where the interpreter keeps its library."""
    return Path(sysconfig.get_path("stdlib"))


def texts(held_out: bool) -> list[str]:
    """Contents of the held-out modules, or of all the others in a fixed shuffled order."""
    root = library_root()
    chosen = [p for p in library_files() if (p.relative_to(root).as_posix() in HELD_OUT) == held_out]
    if not held_out:
        random.Random(SEED).shuffle(chosen)
    return [p.read_text(encoding="utf-8", errors="replace") for p in chosen]


def train_tokenizer(out: Path) -> None:
    """Byte-level BPE on the training text; all 256 bytes are in the alphabet, so every text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(held_out=False), trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<bos> $A", pair="<bos> $A <bos> $B:1", special_tokens=[("<bos>", BOS)]
            ),
        ]
    )
    assert tokenizer.get_vocab_size() == VOCAB
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    (out / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer written by train_tokenizer."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def token_stream(tokenizer: Tokenizer, held_out: bool) -> np.ndarray:
    """All files one after the other, each as <bos> text <eos>; int64 [tokens]."""
    rows: list[int] = []
    for encoding in tokenizer.encode_batch(texts(held_out)):
        rows += encoding.ids
        rows.append(EOS)
    return np.asarray(rows, dtype=np.int64)


def windows(stream: np.ndarray, length: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Endless windows in random order, each <bos> then `length` tokens; int64 [length + 1].

    A pass over the stream starts at a random offset, so that passes cut the text at different places.
    """
    while True:
        starts = np.arange(int(rng.integers(length)), len(stream) - length, length)
        rng.shuffle(starts)
        for start in starts:
            yield np.concatenate([[BOS], stream[start : start + length]])


def held_out_prompts(tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """`count` prompts of `length` tokens (<bos> included) spread evenly over the held-out modules."""
    rng = random.Random(SEED)
    rows = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts(held_out=True)]
    prompts = []
    for i in range(count):
        row = rows[i % len(rows)]
        start = rng.randrange(0, max(1, len(row) - 2 * length))
        prompts.append([BOS, *row[start : start + length - 1]])
    return prompts
