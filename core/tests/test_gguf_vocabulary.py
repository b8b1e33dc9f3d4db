"""Tokenizers made from GGUF metadata, against the tokenizers the metadata was made from."""

from __future__ import annotations

import io
import json

import ggufs
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from mlx_spec.errors import LoadError
from mlx_spec.gguf.convert import convert_gguf
from mlx_spec.gguf.vocabulary import CUTS
from mlx_spec.tokenizer import load_tokenizer

TEXTS = [
    "hello world",
    "  two  spaces,   three\n\n\tand a tab ",
    "It's 12345 o'clock; we'll see 3.14, ½ and ٣٤ and DON'T",
    "příliš žluťoučký kůň 日本語 🙂‍↔️ \u00a0 end",
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>",
    "a<tag>b <tag> <0x41> ▁ <unk></s>",
    "                                 33 spaces",
    "",
]
CORPUS = [
    "hello world, it's the quick brown fox who'll jump over 12345 lazy dogs",
    "def walk(node):\n    for child in node.children:\n        if isinstance(child, Node):\n            return 3.14",
    "příliš žluťoučký kůň úpěl ďábelské ódy 日本語 日本",
    "the rain in Spain stays mainly in the plain; hello again, hello THERE 2024",
]


def loaded(metadata, tmp_path):
    """The tokenizer that core loads from the converted checkpoint."""
    made = ggufs.make(ggufs.LLAMA, "Q8_0")
    made.metadata = {k: v for k, v in made.metadata.items() if not k.startswith("tokenizer.")} | metadata
    shape = (len(metadata["tokenizer.ggml.tokens"]) + 2, 64)
    made.tensors["token_embd.weight"] = (shape, "Q8_0", ggufs.random_blocks("Q8_0", shape, 1))
    done = convert_gguf(made.write(tmp_path / "model.gguf"), tmp_path / "out")
    return load_tokenizer(done.out)


def trained(patterns, *, whole: bool = False) -> Tokenizer:
    """A byte-level tokenizer that cuts text by `patterns`, trained on a little text."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole))
    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metadata_of(tokenizer: Tokenizer, pre: str) -> dict:
    content = json.loads(tokenizer.to_str())
    vocab = content["model"]["vocab"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.get),
        "tokenizer.ggml.token_type": [3 if i < 3 else 1 for i in range(len(vocab))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def plain(wrapper, text: str) -> list[int]:
    return wrapper.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", CUTS)
def test_byte_level_ids_are_the_originals(name, tmp_path):
    original = trained(CUTS[name].patterns, whole=CUTS[name].whole)
    ours = loaded(metadata_of(original, name), tmp_path)
    for text in TEXTS:
        ids = original.encode(text, add_special_tokens=False).ids
        assert plain(ours, text) == ids
        assert ours.decode(ids, skip_special_tokens=False) == text
    start = [1] if CUTS[name].start else []
    assert ours.encode("hello") == start + plain(ours, "hello")


def test_smollm_cuts_as_its_own_pre_tokenizer(tmp_path):
    """The one its tokenizer.json has: single digits, then the byte-level expression built into tokenizers."""
    ours = loaded(metadata_of(trained(CUTS["smollm"].patterns), "smollm"), tmp_path)
    own = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend = Tokenizer.from_file(str(ours.path / "tokenizer.json"))
    for text in [t for t in TEXTS if t]:
        assert [p for p, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == [
            p for p, _ in own.pre_tokenize_str(text)
        ]


def test_a_whole_token_wins_over_its_merges(tmp_path):
    """llama-bpe takes a piece that is a token as it is, even where no merges lead to it."""
    metadata = ggufs.byte_vocabulary(extra=0)
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens.append("qzqz")
    metadata["tokenizer.ggml.token_type"].append(1)
    ours = loaded(metadata | {"tokenizer.ggml.pre": "llama-bpe"}, tmp_path)
    assert plain(ours, "qzqz") == [len(tokens) - 1]


def test_control_tokens_render_to_nothing_and_user_tokens_are_text(tmp_path):
    metadata = ggufs.byte_vocabulary()
    metadata["tokenizer.ggml.token_type"][0] = 4
    ours = loaded(metadata, tmp_path)
    ids = plain(ours, "<|endoftext|>hello<|im_end|>")
    assert ids[0] == 0 and ids[-1] == 2 and len(ids) == 3
    assert ours.decode(ids) == "<|endoftext|>hello" and ours.decode([1, 2]) == ""
    assert len(ours) == len(metadata["tokenizer.ggml.tokens"]) - 3  # [PAD...] are no tokens


def test_the_chat_template_is_the_files(tmp_path):
    ours = loaded(ggufs.byte_vocabulary(), tmp_path)
    prompt = ours.prompt("hello")
    assert prompt.text == "<|im_start|>user\nhello<|im_end|>\n" and prompt.ids[0] == 1 and 2 in prompt.ids


@pytest.mark.parametrize(("start", "end"), [(False, False), (True, False), (False, True), (True, True)])
def test_start_and_end_tokens(start, end, tmp_path):
    flags = {"tokenizer.ggml.add_bos_token": start, "tokenizer.ggml.add_eos_token": end}
    ours = loaded(ggufs.byte_vocabulary() | flags, tmp_path)
    inner = plain(ours, "hello")
    assert ours.encode("hello") == [1] * start + inner + [2] * end


# -- SentencePiece ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no-prefix"])
def pieces(request):
    """A SentencePiece BPE model, trained here, and its metadata."""
    import sentencepiece

    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3), model_writer=content, model_type="bpe", vocab_size=500,
        hard_vocab_limit=False, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, add_dummy_prefix=request.param,
        user_defined_symbols=["<tag>", "\n\n"], character_coverage=0.98, minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_proto=content.getvalue())
    count = model.get_piece_size()

    def kind(i: int) -> int:
        if model.is_unknown(i):
            return 2
        if model.is_control(i):
            return 3
        return 6 if model.is_byte(i) else 4 if model.id_to_piece(i) in ("<tag>", "\n\n") else 1

    return model, {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in range(count)],
        "tokenizer.ggml.scores": [model.get_score(i) for i in range(count)],
        "tokenizer.ggml.token_type": [kind(i) for i in range(count)],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        "tokenizer.ggml.add_space_prefix": request.param,
    }


def test_sentencepiece_ids_are_the_originals(pieces, tmp_path):
    model, metadata = pieces
    ours = loaded(metadata, tmp_path)
    prefix = metadata["tokenizer.ggml.add_space_prefix"]
    seen = set()
    for text in [*CORPUS, *TEXTS]:
        if any(special in text for special in ("</s>", "<unk>", "▁", "\n\n")):
            continue  # SentencePiece takes their spellings as text, and no prefix follows its user-defined symbols
        ids = model.encode(text)
        seen |= set(ids)
        assert plain(ours, text) == ids, text
        assert ours.decode(ids) == text
    assert len(seen) > 100 and any(metadata["tokenizer.ggml.token_type"][i] == 6 for i in seen)
    assert ours.encode("hello") == [model.bos_id(), *model.encode("hello")]
    user = plain(ours, "hello\n\n<tag>")
    assert user[-2:] == [model.piece_to_id("\n\n"), model.piece_to_id("<tag>")]
    assert ours.decode(plain(ours, "hello"), skip_special_tokens=False) == "hello" and prefix in (True, False)


def test_equal_scores_leave_the_order_of_the_tokens(pieces, tmp_path):
    """Some converters write the same score for every piece; the pieces are still in the order they were learned."""
    model, metadata = pieces
    ours = loaded(metadata | {"tokenizer.ggml.scores": [-1000.0] * model.get_piece_size()}, tmp_path)
    assert plain(ours, CORPUS[0]) == model.encode(CORPUS[0])


# -- refusals --------------------------------------------------------------------------------------------

BAD = [
    ({"tokenizer.ggml.model": "t5"}, "L55", "'t5'"),
    ({"tokenizer.ggml.model": None}, "L53", "tokenizer.ggml.model"),
    ({"tokenizer.ggml.pre": None}, "L55", "how text is cut"),
    ({"tokenizer.ggml.pre": "viking"}, "L55", "'viking'"),
    ({"tokenizer.ggml.tokens": None}, "L53", "tokenizer.ggml.tokens"),
    ({"tokenizer.ggml.tokens": [1, 2]}, "L53", "list of strings"),
    ({"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": [1, 1, 1]}, "L53", "each token once"),
    ({"tokenizer.ggml.token_type": [1, 1]}, "L53", "tokenizer.ggml.token_type"),
    ({"tokenizer.ggml.merges": ["he zzz"]}, "L53", "tokenizer.ggml.merges"),
    ({"tokenizer.ggml.merges": None}, "L53", "tokenizer.ggml.merges"),
    ({"tokenizer.ggml.eos_token_id": 5000}, "L53", "tokenizer.ggml.eos_token_id"),
    ({"tokenizer.ggml.eos_token_id": -1}, "L53", "tokenizer.ggml.eos_token_id"),
    ({"tokenizer.ggml.add_bos_token": 3}, "L53", "a boolean"),
    ({"tokenizer.chat_template": 3}, "L53", "tokenizer.chat_template"),
    ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.5]}, "L53", "tokenizer.ggml.scores"),
    ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.precompiled_charsmap": [1, 2]}, "L55", "rewrites"),
]


@pytest.mark.parametrize(("change", "code", "words"), BAD, ids=lambda v: str(v)[:60])
def test_bad_tokenizers(change, code, words, tmp_path):
    made = ggufs.make(ggufs.LLAMA, "Q8_0")
    made.metadata = {k: v for k, v in (made.metadata | change).items() if v is not None}
    with pytest.raises(LoadError) as caught:
        convert_gguf(made.write(tmp_path / "model.gguf"), tmp_path / "out")
    assert caught.value.code == code and words in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_more_tokens_than_rows(tmp_path):
    made = ggufs.make(ggufs.LLAMA, "Q8_0")
    shape = (100, 64)
    made.tensors["token_embd.weight"] = (shape, "Q8_0", ggufs.random_blocks("Q8_0", shape, 1))
    with pytest.raises(LoadError, match="at most 100") as caught:
        convert_gguf(made.write(tmp_path / "model.gguf"), tmp_path / "out")
    assert caught.value.code == "L53"
