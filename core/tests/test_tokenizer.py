"""Tokenizers of model folders: encode, chat template, decode, what is refused."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
from tinymodels import LLAMA, TEMPLATE, write_model, write_tokenizer

from mlx_spec.demos import demo_pair
from mlx_spec.errors import LoadError, UsageError
from mlx_spec.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("bare"), template=None))


def test_no_tokenizer_is_none(tmp_path):
    assert load_tokenizer(write_model(tmp_path)) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_corrupt_file_is_named(tmp_path, name, content):
    write_tokenizer(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LoadError, match=f"{name} in .*expected a JSON object"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("model"),
        lambda t: t["model"].update(type="Unheard"),
        lambda t: t["model"]["vocab"].update({"new": "x"}),
        lambda t: t.update(decoder={"type": "Nothing"}),
    ],
)
def test_tokenizer_json_of_a_wrong_shape(tmp_path, change, capfd):
    file = write_tokenizer(tmp_path) / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(LoadError, match=f"tokenizer in {tmp_path}: found files that cannot be loaded"):
        load_tokenizer(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_truncated_tokenizer_json(tmp_path):
    file = write_tokenizer(tmp_path) / "tokenizer.json"
    data = file.read_bytes()
    for kept in (len(data) - 2, len(data) // 2, 0):
        file.write_bytes(data[:kept])
        with pytest.raises(LoadError, match=r"tokenizer\.json in .*not JSON"):
            load_tokenizer(tmp_path)


def test_code_of_a_tokenizer_is_not_run(tmp_path):
    file = write_tokenizer(tmp_path) / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    file.write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    try:
        loaded = load_tokenizer(tmp_path)
    except LoadError as error:
        assert "tokenizer in" in str(error)
    else:
        assert loaded.decode(loaded.encode("red")) == "red"
    assert not (tmp_path / "ran").exists()


def test_loading_prints_nothing(tmp_path, capfd):
    load_tokenizer(write_tokenizer(tmp_path))
    assert capfd.readouterr() == ("", "")


def test_a_model_type_that_transformers_does_not_know_is_no_news(spec, tmp_path):
    """In a process of its own: what the library says while it is imported for a first tokenizer."""
    path = write_model(write_tokenizer(tmp_path / "tiny"), LLAMA | {"vocab_size": 340})
    loud = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": ""}  # which mlx-lm has set in this process
    assert "transformers" not in spec("inspect", "tiny", **loud).stderr
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "never_heard_of"}))
    done = spec("inspect", "tiny", **loud)
    assert "never_heard_of" in done.stderr and "transformers" not in done.stderr, done.stderr


def test_a_text_longer_than_the_tokenizer_expects_is_no_news(tmp_path, caplog, monkeypatch):
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": 4}))
    loaded = load_tokenizer(tmp_path)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert loaded.wrapped.model_max_length == 4 and len(loaded.encode("red green blue white tick")) > 4
    assert caplog.messages == []


def test_sizes_and_ids(tokenizer):
    assert len(tokenizer) == 331 and tokenizer.end_ids == {1}
    assert tokenizer.control_tokens == {"<bos>": 0, "<eos>": 1, "<pad>": 2, "<|end|>": 3}
    assert tokenizer.control_ids == {0, 1, 2, 3}
    assert tokenizer.token_text(3) == "<|end|>" and tokenizer.token_text(330) == "<think>"


def test_size_covers_added_ids_behind_a_gap(tmp_path):
    file = write_tokenizer(tmp_path) / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"][-1]["id"] = 400
    file.write_text(json.dumps(content))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("<think>") == [len(loaded) - 1]


def test_round_trip_and_skipped_control_tokens(tokenizer):
    ids = tokenizer.encode("<bos>red <|end|>žluť<eos>")
    assert tokenizer.decode(ids) == "red žluť"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>red <|end|>žluť<eos>"
    assert tokenizer.decode([*ids, 5000, -1]) == "red žluť"


def test_bytes_that_are_no_utf8_are_refused(tokenizer):
    """A terminal hands such bytes on as lone surrogates, which no tokenizer encodes."""
    with pytest.raises(UsageError, match="not UTF-8") as caught:
        tokenizer.encode(b"red \xff".decode("utf-8", "surrogateescape"))
    assert caught.value.code == "U19"


def test_decode_keeps_spaces_before_punctuation(tokenizer):
    text = "well , it 's fine . isn 't it ?"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_comes_from_the_library_unless_a_class_decodes_by_itself(tmp_path, monkeypatch):
    wrapped = load_tokenizer(write_tokenizer(tmp_path)).wrapped
    inner, ids = wrapped._tokenizer, wrapped.encode("<bos>red , <|end|>žluť<eos>")
    expected = inner.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    with monkeypatch.context() as without:
        without.setattr(inner, "decode", lambda *given, **options: pytest.fail("decoded the long way"))
        for whole in (wrapped, inner):
            assert Tokenizer(whole).decode(ids, skip_special_tokens=False) == expected

    class Own(type(inner)):
        def _decode(self, *given, **options):
            return "own " + super()._decode(*given, **options)

    inner.__class__ = Own
    assert Tokenizer(wrapped).decode(ids, skip_special_tokens=False) == "own " + expected


def test_prompt_goes_through_the_template(tokenizer):
    prompt = tokenizer.prompt("red")
    assert prompt.text == "<bos>[user]red<|end|>[assistant]" and prompt.note == ""
    assert prompt.ids == tokenizer.encode(prompt.text) and prompt.ids.count(0) == 1
    assert tokenizer.prompt("red", template=False).text == "red"


def test_template_equals_mlx_lm(tokenizer):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "red <|end|>"}]
    wanted = tokenizer.wrapped.apply_chat_template(messages, add_generation_prompt=True)
    assert tokenizer.chat(messages).ids == list(wanted)


def test_missing_template_is_said(bare):
    prompt = bare.prompt("red green")
    assert prompt.ids == bare.encode("red green") and "no chat template" in prompt.note
    chat = bare.chat([{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"}])
    assert chat.text == "red\nblue" and "no chat template" in chat.note
    assert bare.prompt("red", template=False).note == ""


def test_template_error_is_quoted(tokenizer):
    with pytest.raises(UsageError, match="chat template error: role tool is not known"):
        tokenizer.chat([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize("template", ["{{ messages[0].content + 3 }}", "{{ nothing.at.all }}", "{% for %}"])
def test_every_template_failure_is_a_usage_error(tmp_path, template):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template=template))
    with pytest.raises(UsageError, match="found a chat template error: ."):
        tokenizer.chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("content", "text"),
    [("x", "x"), ("", ""), (None, ""),
     ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"), (["a", "b"], "ab"), ([], "")],
)  # fmt: skip
def test_contents(tokenizer, content, text):
    message = {"role": "user", "content": content}
    assert tokenizer.chat([message]).text == f"<bos>[user]{text}<|end|>[assistant]"


def test_media_and_broken_messages_are_refused(tokenizer):
    with pytest.raises(UsageError, match="message 0: found a content part of type 'image_url'"):
        tokenizer.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    with pytest.raises(UsageError, match="message 1: found a content part of type 'int'"):
        tokenizer.chat([{"role": "user", "content": "x"}, {"role": "user", "content": 3}])
    with pytest.raises(UsageError, match="message 0: found 'hello'"):
        tokenizer.chat(["hello"])
    with pytest.raises(UsageError, match="message 0: .*role"):
        tokenizer.chat([{"content": "x"}])


def test_template_from_its_own_file(tmp_path):
    write_tokenizer(tmp_path, template=None)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert load_tokenizer(tmp_path).prompt("red").text == "<bos>[user]red<|end|>[assistant]"


def test_loading_does_not_touch_the_network(tmp_path, monkeypatch):
    import socket

    calls = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: calls.append(args) or [])
    monkeypatch.setattr(socket.socket, "connect", lambda *args: calls.append(args))
    assert load_tokenizer(write_model(write_tokenizer(tmp_path))).encode("red")
    assert calls == []


def test_special_tokens_that_mean_each_other_are_an_error_of_the_files(tmp_path):
    """An empty unk_token made transformers ask itself without end."""
    source = demo_pair("gemma4").target
    for file in Path(source).glob("*token*"):
        shutil.copy(file, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"unk_token": ""}))
    with pytest.raises(LoadError, match="files that cannot be loaded") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.code == "L40"
