"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json.

Two kinds: "gpt2", byte-level BPE with merges, whose way of cutting text is known by a name; "llama", a SentencePiece
BPE, whose merges follow from the scores of its pieces. Sources: src/llama-vocab.cpp of ggml-org/llama.cpp; the file
format of tokenizers 0.2x.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .metadata import Metadata
from .refusals import tokenizer as refuse

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
SPACE = "\u2581"  # stands for a space in SentencePiece vocabularies
KEY = "tokenizer.ggml."
# Control tokens that end a turn in the chat formats of these architectures; not every file names them by id.
TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end_of_text|>", "<|endoftext|>")

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a byte-level tokenizer cuts text before it merges.

    Attributes:
        patterns: applied in turn, each to what the one before left between its matches.
        whole: a piece that is a token is taken as it is, without merging.
        start: a start token is put in front unless the metadata says otherwise.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    start: bool = False


_BY_NAME = {
    ("gpt-2",): Cut((_GPT2,)),
    ("smollm", "starcoder", "refact", "command-r"): Cut((r"\p{N}", _GPT2)),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"): Cut((_LLAMA3,), whole=True, start=True),
    ("dbrx", "smaug-bpe"): Cut((_LLAMA3,)),
    ("qwen2", "deepseek-r1-qwen", "megrez"): Cut((_QWEN2,)),
    ("tekken",): Cut((_TEKKEN,), whole=True, start=True),
}
CUTS = {name: cut for names, cut in _BY_NAME.items() for name in names}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The files' contents, and the ids that config.json repeats.

    Attributes:
        tokens: ids below it mean something.
        ends: ids that end a reply, the declared one first.
    """

    tokenizer: dict[str, Any]
    config: dict[str, Any]
    tokens: int
    start: int | None
    ends: tuple[int, ...]
    padding: int | None


def read_vocabulary(metadata: Metadata, rows: int) -> Vocabulary:
    """The tokenizer of a file whose embedding has `rows` rows; LoadError when it cannot be made."""
    own = metadata.under(KEY)
    kind = own.text("model")
    if kind not in ("gpt2", "llama"):
        raise refuse(own.path, f"kind {kind!r}", "'gpt2' (byte-level BPE) or 'llama' (SentencePiece BPE)")
    tokens, types = _tokens(own, rows)
    model, start = _byte_level(own, tokens) if kind == "gpt2" else _sentencepiece(own, tokens, types)
    ids = {name: _id(own, name, tokens) for name in ("bos", "eos", "unknown", "padding", "eot", "eom")}
    start_id = ids["bos"] if own.flag("add_bos_token", start) else None
    end_id = ids["eos"] if own.flag("add_eos_token", False) else None
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(i, tokens[i], types[i]) for i in range(len(tokens)) if types[i] in (UNKNOWN, CONTROL, USER)
        ],
        **model,
        "post_processor": _frame(tokens, start_id, end_id),
    }
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{key: tokens[index] for name, key in names.items() if (index := ids[name]) is not None},
    }
    template = metadata.text("tokenizer.chat_template", "")
    if template:
        config["chat_template"] = template
    declared = [ids[name] for name in ("eos", "eot", "eom")]
    spelled = [i for i, token in enumerate(tokens) if types[i] in (CONTROL, USER) and token in TURN_ENDS]
    ends = tuple(dict.fromkeys(i for i in (*declared, *spelled) if i is not None))
    return Vocabulary(content, config, len(tokens), ids["bos"], ends, ids["padding"])


def _tokens(own: Metadata, rows: int) -> tuple[list[str], list[int]]:
    """Spellings and types of the tokens that mean something: padding at the end of the list is left out."""
    tokens = own.texts("tokens")
    types = [int(kind) for kind in own.numbers("token_type", len(tokens), NORMAL)]
    if not tokens or len(tokens) > rows:
        raise own.wrong("tokens", tokens, f"at least one token and at most {rows}, the rows of the embedding")
    count = len(tokens)
    while count > 1 and types[count - 1] == UNUSED and tokens[count - 1] == f"[PAD{count - 1}]":
        count -= 1
    tokens, types = tokens[:count], types[:count]
    twice = [token for token, times in Counter(tokens).items() if times > 1]
    if twice:
        raise own.wrong("tokens", twice[0], "each token once")
    return tokens, types


def _id(own: Metadata, name: str, tokens: Sequence[str]) -> int | None:
    key = f"{name}_token_id"
    index = own.index(key)
    if index is not None and index >= len(tokens):
        raise own.wrong(key, index, f"an id below {len(tokens)}, the number of tokens")
    return index


def _added(index: int, token: str, kind: int) -> dict[str, Any]:
    """A token that is found in text before anything else is done; control tokens render to nothing."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, "special": kind != USER, **flags}


def _frame(tokens: Sequence[str], start: int | None, end: int | None) -> dict[str, Any] | None:
    """What puts the start and end tokens around a text."""
    if start is None and end is None:
        return None
    before = [] if start is None else [start]
    after = [] if end is None else [end]

    def template(sequence: str) -> list[dict[str, Any]]:
        side = 0 if sequence == "A" else 1
        special = [[{"SpecialToken": {"id": tokens[i], "type_id": side}} for i in ids] for ids in (before, after)]
        return [*special[0], {"Sequence": {"id": sequence, "type_id": side}}, *special[1]]

    known = {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in (*before, *after)}
    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A") + template("B"),
        "special_tokens": known,
    }


# -- byte-level ------------------------------------------------------------------------------------------


def _byte_level(own: Metadata, tokens: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """Parts of tokenizer.json, and whether a start token is the custom."""
    if "pre" not in own:
        raise refuse(
            own.path,
            "no tokenizer.ggml.pre, which says how text is cut: a file of before May 2024",
            "its name",
            "Use a newer file of the same model",
        )
    name = own.text("pre")
    cut = CUTS.get(name)
    if cut is None:
        raise refuse(own.path, f"text cut in the way called {name!r}", f"one of {', '.join(CUTS)}")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [merge.partition(" ")[::2] for merge in own.texts("merges")]
    bad = next((pair for pair in merges if not {*pair, "".join(pair)} <= vocabulary.keys()), None)
    if bad is not None:
        raise own.wrong("merges", " ".join(bad), "pairs of tokens that make a token")
    pieces = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in cut.patterns]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*pieces, byte_level]},
        "decoder": byte_level,
        "model": _bpe(vocabulary, merges, ignore_merges=cut.whole),
    }, cut.start


def _bpe(vocabulary: dict[str, int], merges: Iterable[Sequence[str]], **settings: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **settings,
        "vocab": vocabulary,
        "merges": [list(pair) for pair in merges],
    }


# -- SentencePiece ---------------------------------------------------------------------------------------


def _sentencepiece(own: Metadata, tokens: Sequence[str], types: Sequence[int]) -> tuple[dict[str, Any], bool]:
    """Parts of tokenizer.json; a start token is the custom."""
    if own.get("precompiled_charsmap"):
        raise refuse(own.path, "a table that rewrites characters", "text taken as it is")
    scores = own.numbers("scores", len(own.texts("tokens")), 0.0)
    prefix = own.flag("add_space_prefix", True)
    unknown = own.index("unknown_token_id")
    to_mark = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    model = _bpe(
        {token: i for i, token in enumerate(tokens)},
        _merges(tokens, types, scores),
        unk_token=tokens[unknown] if unknown is not None and unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=BYTE in types,
    )
    before = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, to_mark]}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    return {
        "normalizer": before if prefix else to_mark,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders + (strip if prefix else [])},
        "model": model,
    }, True


def _merges(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> Iterable[tuple[str, str]]:
    """Every way to make a piece of two others, the best score first (of equals, the first piece)."""
    pieces = {token: i for i, token in enumerate(tokens) if types[i] == NORMAL}
    for token in sorted(pieces, key=lambda token: (-scores[pieces[token]], pieces[token])):
        for cut in range(1, len(token)):
            if token[:cut] in pieces and token[cut:] in pieces:
                yield token[:cut], token[cut:]
