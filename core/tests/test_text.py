"""Incremental text: every partition into blocks, stop strings over tokens, control tokens."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinymodels import write_tokenizer

from mlx_spec.errors import UsageError
from mlx_spec.text import Detokenizer, TextStream, stop_list, stop_string_ids
from mlx_spec.tokenizer import Tokenizer, load_tokenizer

KINDS = ("bytes", "fallback", "strip")
TEXTS = [
    "příliš žluťoučký kůň úpěl ďábelské ódy",
    "快速的棕色狐狸跳过懒狗。你好，世界！",
    "השועל החום המהיר קופץ מעל הכלב העצלן",
    "flags 🇨🇿🇩🇪🇯🇵 and a family 👨‍👩‍👧‍👦 and 👩🏽‍🚀!",
    "e\u0301 combining, \u200bzero width,\ttabs\n\n\n  spaces   ",
    "a real mark \ufffd stays, two \ufffd\ufffd too",
    "",
    " ",
    "\n",
]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("bytes")))


def blocks(ids: list[int], rng: random.Random) -> list[list[int]]:
    out = []
    while ids:
        n = rng.randint(1, 5)
        out.append(ids[:n])
        ids = ids[n:]
    return out


def run(stream: TextStream, parts: list[list[int]]) -> tuple[str, int]:
    """(joined text, number of tokens of the reply)."""
    pieces = [piece for part in parts for piece in stream.push(part)]
    text = "".join(piece.text for piece in pieces) + stream.finish().text
    assert text == stream.text
    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    return text, len(pieces)


# -- decoding (cases 105 and 107) ----------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seed", range(4))
def test_joined_pieces_equal_the_whole_text(tokenizer, text, seed):
    ids = tokenizer.encode(text, add_special_tokens=False)
    rng = random.Random(seed)
    assert run(TextStream(tokenizer), blocks(ids, rng)) == (tokenizer.decode(ids), len(ids))


@settings(max_examples=200, deadline=None)
@given(st.text(), st.randoms(use_true_random=False))
def test_any_text_in_any_partition(byte_tokenizer, text, rng):
    ids = byte_tokenizer.encode(text, add_special_tokens=False)
    assert byte_tokenizer.decode(ids) == text
    assert run(TextStream(byte_tokenizer), blocks(ids, rng))[0] == text


@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_texts_in_every_kind(tmp_path, kind):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, kind))
    rng = random.Random(7)
    alphabet = "".join(TEXTS)
    for _ in range(200):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 60)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert run(TextStream(tokenizer), blocks(ids, rng))[0] == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 330), max_size=80))
def test_any_ids_decode_as_one_sequence(byte_tokenizer, ids):
    """Byte-level tokens in any order, most of them not UTF-8, special tokens among them."""
    detokenizer = Detokenizer(byte_tokenizer)
    assert "".join([detokenizer.push(i) for i in ids]) + detokenizer.finish() == byte_tokenizer.decode(ids)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 321), max_size=60))
def test_any_ids_of_a_byte_fallback_tokenizer_keep_what_was_shown(tokenizer, ids):
    """Runs of bytes that are no UTF-8 may render differently from the whole, never shorter or out of order."""
    detokenizer = Detokenizer(tokenizer)
    text = "".join([detokenizer.push(i) for i in ids]) + detokenizer.finish()
    whole = tokenizer.decode(ids)
    assert text.replace("\ufffd", "") == whole.replace("\ufffd", "") or "\ufffd" in whole


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(-1, 340), max_size=60), rng=st.randoms(use_true_random=False))
def test_whole_blocks_give_what_their_ids_give(tokenizer, ids, rng):
    for stops, minimum in (([], 0), ([7], 5), (["ed"], 0)):
        strings, ends = [s for s in stops if isinstance(s, str)], [s for s in stops if isinstance(s, int)]
        whole, single = (TextStream(tokenizer, strings, ends, minimum) for _ in range(2))
        for part in blocks(ids, rng):
            pieces = single.push(part)
            assert whole.take(part) == (len(pieces), "".join(piece.text for piece in pieces))
            assert (whole.text, whole.count, whole.stopped) == (single.text, single.count, single.stopped)
        assert whole.finish() == single.finish()


def test_a_block_is_decoded_once(byte_tokenizer, monkeypatch):
    ids, asked = byte_tokenizer.encode("a block of words"), []
    monkeypatch.setattr(Detokenizer, "_decode", lambda self, ids: asked.append(1) or byte_tokenizer.decode(ids))
    TextStream(byte_tokenizer).take(ids[:7])
    assert len(asked) == 1


def test_no_replacement_mark_between_the_bytes_of_a_character(tokenizer):
    stream = TextStream(tokenizer)
    for token in tokenizer.encode("👨‍👩‍👧‍👦 家族 žluť " * 3, add_special_tokens=False):
        assert all("\ufffd" not in piece.text for piece in stream.push([token]))


def test_character_is_shown_with_its_last_byte(byte_tokenizer):
    ids = byte_tokenizer.encode("家x", add_special_tokens=False)
    stream = TextStream(byte_tokenizer)
    assert [piece.text for piece in stream.push(ids)] == ["", "", "家", "x"]


def test_open_character_is_released_at_the_end(byte_tokenizer):
    ids = byte_tokenizer.encode("ok 家", add_special_tokens=False)[:-1]
    stream = TextStream(byte_tokenizer)
    stream.push(ids)
    assert stream.text == "ok " and stream.finish().text == "\ufffd"


def test_control_tokens_render_to_nothing_even_inside_a_character(byte_tokenizer):
    first, *rest = byte_tokenizer.encode("家", add_special_tokens=False)
    assert run(TextStream(byte_tokenizer), [[0, first, 3, *rest, 2]]) == ("家", 6)


def test_visible_control_tokens_are_spelled(tokenizer):
    red, blue = (tokenizer.encode(t, add_special_tokens=False) for t in ("red", " blue"))
    assert run(TextStream(tokenizer, visible={3}), [[*red, 3, 2, *blue]])[0] == "red<|end|> blue"


def test_added_tokens_that_are_not_control_tokens_are_shown(tokenizer):
    ids = tokenizer.encode("<think>red", add_special_tokens=False)
    assert run(TextStream(tokenizer), [ids])[0] == "<think>red"


def test_padding_ids_render_to_nothing(tokenizer):
    ids = [*tokenizer.encode("red", add_special_tokens=False), len(tokenizer), 100_000]
    assert run(TextStream(tokenizer), [ids]) == ("red", len(ids))


class Counting(Tokenizer):
    """Counts decoded ids."""

    decoded = 0

    def decode(self, ids, skip_special_tokens=True):
        self.decoded += len(ids)
        return super().decode(ids, skip_special_tokens)


@pytest.mark.parametrize("bad", [False, True])
def test_cost_per_token_does_not_grow_with_the_text(byte_tokenizer, bad):
    counting = Counting(byte_tokenizer.wrapped)
    ids = byte_tokenizer.encode("žluťoučký kůň 家 " * 300, add_special_tokens=False)
    if bad:  # an endless run of continuation bytes, as a random model may give
        ids = byte_tokenizer.encode("家", add_special_tokens=False)[-1:] * 3000
    detokenizer = Detokenizer(counting)
    for token in ids:
        detokenizer.push(token)
    assert counting.decoded < 24 * len(ids)


def test_text_may_also_come_from_a_plain_hugging_face_tokenizer(byte_tokenizer):
    plain = Tokenizer(byte_tokenizer.wrapped._tokenizer)
    ids = plain.encode("red 🇨🇿 <|end|> blue", add_special_tokens=False)
    assert run(TextStream(plain), [ids]) == ("red 🇨🇿  blue", len(ids))


# -- stops (cases 45, 47, 51, 53, 55, 57, 109) ---------------------------------------------------------


@pytest.mark.parametrize("size", range(1, 7))
def test_stop_over_two_tokens(tokenizer, size):
    ids = tokenizer.encode("red green blue white", add_special_tokens=False)
    parts = [ids[i : i + size] for i in range(0, len(ids), size)]
    stream = TextStream(tokenizer, "green blue")
    text, count = run(stream, parts)
    assert text == "red " and stream.stopped == "green blue"
    # the reply's ids end with the token that completed the stop
    assert "green blue" in tokenizer.decode(ids[:count]) and "green blue" not in tokenizer.decode(ids[: count - 1])


@pytest.mark.parametrize("size", range(1, 7))
def test_nothing_of_a_coming_stop_is_shown(tokenizer, size):
    ids = tokenizer.encode(" 4 5 6 7 8", add_special_tokens=False)
    stop = tokenizer.decode(tokenizer.encode(" 4 5 6 7", add_special_tokens=False))
    stream = TextStream(tokenizer, [stop])
    shown = [p.text for i in range(0, len(ids), size) for p in stream.push(ids[i : i + size])]
    assert set(shown) == {""} and stream.stopped == stop and stream.finish().text == ""


def test_tokens_behind_the_completing_one_are_dropped(tokenizer):
    ids = tokenizer.encode("red tick tock tick blue white", add_special_tokens=False)
    stream = TextStream(tokenizer, " tick tock tick")
    pieces = stream.push(ids)
    assert stream.text == "red" and pieces[-1].stop == " tick tock tick"
    assert all(piece.stop is None for piece in pieces[:-1])
    assert tokenizer.decode(ids[: len(pieces)]) == "red tick tock tick"
    assert stream.push(ids) == [] and stream.count == len(pieces)


def test_held_text_is_released_when_it_cannot_match_any_more(byte_tokenizer):
    stream = TextStream(byte_tokenizer, "red rose")
    ids = byte_tokenizer.encode("red red r", add_special_tokens=False)
    pieces = stream.push(ids)
    assert "".join(p.text for p in pieces) == "red "  # "red r" may still become the stop
    assert stream.finish().text == "red r" and stream.text == "red red r"


def test_hold_back_is_never_longer_than_what_can_match(byte_tokenizer):
    stop = "x" * 20
    stream = TextStream(byte_tokenizer, stop)
    text = "axxxbxx" * 9 + "c" + "x" * 19 + "y"
    for i, token in enumerate(byte_tokenizer.encode(text, add_special_tokens=False)):
        stream.push([token])
        seen = byte_tokenizer.decode(byte_tokenizer.encode(text, add_special_tokens=False)[: i + 1])
        held = seen[len(stream.text) :]
        assert held == seen[len(seen) - len(held) :] and stop.startswith(held)
    assert stream.text == text


@settings(max_examples=150, deadline=None)
@given(
    st.text("ab<", min_size=0, max_size=40),
    st.lists(st.text("ab<", max_size=5), max_size=4),
    st.randoms(use_true_random=False),
)
def test_stops_equal_a_search_after_each_token(byte_tokenizer, text, stops, rng):
    """Against the plain definition: look at the whole text after every token."""
    ids = byte_tokenizer.encode(text, add_special_tokens=False)
    wanted, count = byte_tokenizer.decode(ids), len(ids)
    for n in range(1, len(ids) + 1):
        seen = byte_tokenizer.decode(ids[:n])
        starts = [seen.index(s) for s in stops if s and s in seen]
        if starts:
            wanted, count = seen[: min(starts)], n
            break
    assert run(TextStream(byte_tokenizer, stops), blocks(ids, rng)) == (wanted, count)


@pytest.mark.parametrize("place", range(5))
def test_control_token_as_stop_string(tokenizer, place):
    ids = tokenizer.encode("red green blue white", add_special_tokens=False)[:4]
    stream = TextStream(tokenizer, "<|end|>")
    text, count = run(stream, [[*ids[:place], 3, *ids[place:]]])
    assert text == tokenizer.decode(ids[:place]) and count == place + 1 and stream.stopped == 3


def test_stop_id_in_a_block_ends_there_and_frees_held_text(byte_tokenizer):
    ids = byte_tokenizer.encode("red r", add_special_tokens=False)
    stream = TextStream(byte_tokenizer, ["red rose"], stop_ids=[1])
    pieces = stream.push([*ids, 1, *ids])
    assert len(pieces) == len(ids) + 1 and pieces[-1].stop == 1
    assert stream.text == "red r" and stream.finish().text == ""


@pytest.mark.parametrize("stop", ["", [""], [], None, ["", ""]])
def test_empty_stops_are_ignored(byte_tokenizer, stop):
    ids = byte_tokenizer.encode("red green", add_special_tokens=False)
    stream = TextStream(byte_tokenizer, stop)
    assert run(stream, [ids]) == ("red green", len(ids)) and stream.stopped is None


def test_fifty_stops_and_a_very_long_one(byte_tokenizer):
    stops = [f"stop {i}" for i in range(50)] + ["red " * 2500, "", "blue"]
    ids = byte_tokenizer.encode("red " * 900 + "blue white", add_special_tokens=False)
    start = time.perf_counter()
    stream = TextStream(byte_tokenizer, stops)
    assert run(stream, [ids])[0] == "red " * 900 and stream.stopped == "blue"
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("value", [[1], ["x", None], [b"x"]])
def test_stops_of_a_wrong_type(value):
    with pytest.raises(UsageError, match="stop: found .*expected a string"):
        stop_list(value)


def test_stop_lists_are_cleaned(byte_tokenizer):
    assert stop_list(["b", "", "a", "b"]) == ["b", "a"] and stop_list("a") == ["a"] and stop_list(None) == []
    assert stop_string_ids(byte_tokenizer, ["<eos>", "<think>", "x"]) == {1}


def test_min_tokens_ignores_early_stops(byte_tokenizer):
    ids = byte_tokenizer.encode("red blue red blue", add_special_tokens=False)
    first = next(n for n in range(1, 99) if "blue" in byte_tokenizer.decode(ids[:n]))
    stream = TextStream(byte_tokenizer, "blue", stop_ids=[1], min_tokens=first + 1)
    text, count = run(stream, [[ids[0], 1, *ids[1:]]])
    assert text == "red blue red " and count == len(ids) + 1
    assert run(TextStream(byte_tokenizer, "blue", min_tokens=first - 1), [ids])[0] == "red "


def test_drafted_end_token_that_is_not_committed_does_not_end_the_stream(byte_tokenizer):
    """Only committed tokens are pushed (case 49): a stream never sees drafts, so nothing can latch."""
    stream = TextStream(byte_tokenizer, stop_ids=[1])
    ids = byte_tokenizer.encode("red green blue white", add_special_tokens=False)
    assert run(stream, [[i] for i in ids]) == ("red green blue white", len(ids)) and stream.stopped is None


def test_control_token_behind_a_partial_stop_leaves_no_trace(tokenizer):
    """Case 109: a stop that never comes, a reply that ends in a control token."""
    ids = tokenizer.encode("red green", add_special_tokens=False)
    stream = TextStream(tokenizer, "green and twenty chars", stop_ids=[3])
    assert run(stream, [[*ids, 3]])[0] == "red green"
