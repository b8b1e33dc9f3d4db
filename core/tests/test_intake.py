"""Nothing unusable gets past the door, through whichever of the two ways in."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from pairs import make_pair, tiny_target
from tinymodels import LLAMA, write_model, write_tokenizer

from mlx_spec.api import encode, generate, load, stream
from mlx_spec.engine import Engine
from mlx_spec.errors import UsageError
from mlx_spec.request import Request
from mlx_spec.sampling import Sampling

PROMPT = [3, 5, 7]
GREEDY = Sampling()


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError("scripted")


class Hostile:
    """Looks like a number and like a list, and is neither."""

    def __index__(self) -> int:
        raise RuntimeError("scripted")

    def __iter__(self):
        raise RuntimeError("scripted")


FIELDS = [
    ("prompt", None, "U38"),
    ("prompt", 5, "U38"),
    ("prompt", "text", "U38"),
    ("prompt", b"text", "U38"),
    ("prompt", {3: 1}, "U38"),
    ("prompt", {3, 5}, "U38"),
    ("prompt", mx.array(3), "U38"),
    ("prompt", Odd(), "U38"),
    ("prompt", Hostile(), "U38"),
    ("prompt", bytearray(b"text"), "U38"),
    ("prompt", [Hostile()], "U11"),
    ("prompt", [mx.array(1.5)], "U11"),
    ("prompt", {"role": "user", "content": "red"}, "U38"),
    ("prompt", [{"role": "user", "content": "red"}], "U14"),
    ("prompt", [3, {"role": "user", "content": "red"}], "U11"),
    ("prompt", [], "U10"),
    ("prompt", range(0), "U10"),
    ("prompt", [3, None], "U11"),
    ("prompt", [True], "U11"),
    ("prompt", ["3"], "U11"),
    ("prompt", [3.0], "U11"),
    ("prompt", [Odd()], "U11"),
    ("prompt", np.array([1.5]), "U11"),
    ("prompt", mx.array([[1, 2]]), "U11"),
    ("prompt", [-1], "U12"),
    ("prompt", [131], "U12"),
    ("prompt", [2**70], "U12"),
    ("prompt", [1] * 512, "U13"),
    ("max_tokens", -5, "U15"),
    ("max_tokens", None, "U15"),
    ("max_tokens", 4.0, "U15"),
    ("max_tokens", "4", "U15"),
    ("max_tokens", True, "U15"),
    ("max_tokens", Hostile(), "U15"),
    ("max_tokens", np.array([4, 5]), "U15"),
    ("max_tokens", mx.array([4, 5]), "U15"),
    ("max_tokens", mx.array([1.5]), "U15"),
    ("sampling", 0, "U29"),
    ("sampling", {}, "U29"),
    ("sampling", {"temperature": 1.0}, "U29"),
    ("sampling", Sampling, "U29"),
    ("ignore_eos", 1, "U29"),
    ("ignore_eos", "no", "U29"),
    ("adaptive", None, "U29"),
    ("speculative", "off", "U29"),
    ("block_size", -1, "U70"),
    ("block_size", 65, "U70"),
    ("block_size", 2.0, "U70"),
    ("block_size", True, "U70"),
    ("block_size", "4", "U70"),
    ("sampling", Sampling(stop_ids=(131,)), "U20"),
    ("sampling", Sampling(logit_bias={500: 1.0}), "U20"),
    ("sampling", Sampling(stop=("end",)), "U36"),
]
IDS = [f"{name}-{i}" for i, (name, _, _) in enumerate(FIELDS)]


@pytest.fixture
def pair():
    return make_pair(tiny_target("llama"), None)


@pytest.mark.parametrize(("name", "value", "code"), FIELDS, ids=IDS)
def test_a_field_that_cannot_be_used_is_refused_before_anything_is_queued(pair, name, value, code):
    engine = Engine(pair)
    request = Request(**{"prompt": PROMPT, "sampling": GREEDY, "max_tokens": 4, name: value})
    with pytest.raises(UsageError) as refused:
        engine.submit(request)
    assert refused.value.code == code
    assert refused.value.next_step
    assert not engine.busy and not engine.step()
    assert engine.submit(Request(PROMPT, GREEDY, 2)).result().finish_reason == "length"


@pytest.mark.parametrize(("name", "value", "code"), [f for f in FIELDS if not isinstance(f[1], str) or f[1] != "text"])
def test_the_same_is_refused_by_generate_and_by_stream_at_once(pair, name, value, code):
    given = {"prompt": PROMPT, "max_tokens": 4, name: value}
    for way in (generate, stream):
        with pytest.raises(UsageError) as refused:
            way(pair, **given)
        assert refused.value.code == code


@pytest.mark.parametrize("other", [None, "text", PROMPT, {"prompt": PROMPT}, object()])
def test_only_requests_are_submitted(pair, other):
    with pytest.raises(UsageError) as refused:
        Engine(pair).submit(other)
    assert refused.value.code == "U29"


@pytest.mark.parametrize("bad", ["x", None, [], 1.5, True])
def test_an_id_is_an_integer(pair, bad):
    with pytest.raises(UsageError) as refused:
        Engine(pair).submit(Request(PROMPT, GREEDY, 4, id=bad))
    assert refused.value.code == "U29"


@pytest.mark.parametrize("other", ["some-dir", None, Odd()])
def test_a_pair_is_what_load_returns(other):
    for way in (lambda: Engine(other), lambda: generate(other, PROMPT), lambda: stream(other, "text")):
        with pytest.raises(UsageError, match="^pair: found .* expected a loaded pair. Give what") as refused:
            way()
        assert refused.value.code == "U43"


def test_a_prompt_that_is_none_is_told_all_that_may_be_given(pair):
    ids = "a list of token ids, or one of messages. "
    for way in (encode, generate, stream):
        with pytest.raises(UsageError, match=f"found int 5, expected text, {ids}Give one of these"):
            way(pair, 5)
    with pytest.raises(UsageError, match=f"found str 'text', expected {ids}Encode text"):
        Engine(pair).submit(Request("text", GREEDY))


@pytest.mark.parametrize("rows", [0, -1, None, 2.0, True, "8"])
def test_an_engine_has_room_for_a_request(pair, rows):
    with pytest.raises(UsageError) as refused:
        Engine(pair, max_rows=rows)
    assert refused.value.code == "U37"


@pytest.mark.parametrize(
    "prompt",
    [
        tuple(PROMPT),
        np.array(PROMPT),
        mx.array(PROMPT),
        [np.int32(3), 5, np.int64(7)],
        iter(PROMPT),
        mx.array(PROMPT) + 0,
    ],
    ids=["tuple", "numpy", "mlx", "scalars", "iterator", "lazy"],
)
def test_ids_in_any_sequence_are_taken(pair, prompt):
    request = Request(prompt, GREEDY, np.int64(3))
    handle = Engine(pair).submit(request)
    assert handle.request.prompt == PROMPT and all(type(t) is int for t in handle.request.prompt)
    assert handle.result().token_ids == generate(pair, PROMPT, None, 3).token_ids
    assert request.prompt is prompt  # what the caller holds is left as it was


def test_encode_gives_ids_as_they_are(pair):
    assert encode(pair, mx.array(PROMPT)) == PROMPT
    with pytest.raises(UsageError) as refused:
        encode(pair, "text")
    assert refused.value.code == "U14"


CHAT = [{"role": "system", "content": "red"}, {"role": "user", "content": [{"type": "text", "text": "tick"}]}]


def with_tokenizer(path, **options):
    return load(str(write_model(write_tokenizer(path, **options), {**LLAMA, "vocab_size": 331})))


def test_messages_go_through_the_chat_template_and_text_does_not(tmp_path):
    pair = with_tokenizer(tmp_path)
    ids = pair.tokenizer.encode("<bos>[system]red<|end|>[user]tick<|end|>[assistant]")
    assert encode(pair, CHAT) == ids == pair.tokenizer.chat(CHAT).ids
    assert encode(pair, "tick") == pair.tokenizer.encode("tick")
    reply = generate(pair, ids, None, 5).token_ids
    assert generate(pair, CHAT, None, 5).token_ids == reply
    assert [t for event in stream(pair, tuple(CHAT), None, 5) for t in event.token_ids] == reply
    handle = Engine(pair).submit(Request(CHAT, GREEDY, 5))
    assert handle.request.prompt == ids and handle.result().token_ids == reply
    assert handle.result().prompt_tokens == len(ids)


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([{"role": "tool", "content": "x"}], "role tool is not known"),
        ([{"content": "x"}], "message 0"),
        ([{"role": "user", "content": "x"}, 5], "message 1: found 5"),
    ],
)
def test_messages_the_template_does_not_take_are_refused(tmp_path, messages, found):
    pair = with_tokenizer(tmp_path)
    for way in (lambda: generate(pair, messages), lambda: Engine(pair).submit(Request(messages, GREEDY))):
        with pytest.raises(UsageError, match=found) as refused:
            way()
        assert refused.value.code == "U18"


def test_messages_without_a_chat_template_are_refused(tmp_path):
    pair = with_tokenizer(tmp_path, template=None)
    for way in (lambda: stream(pair, CHAT), lambda: Engine(pair).submit(Request(CHAT, GREEDY))):
        with pytest.raises(UsageError, match="without a chat template, expected text or token ids") as refused:
            way()
        assert refused.value.code == "U18"


@pytest.mark.parametrize("wait", [False, True], ids=["together", "one after the other"])
def test_the_same_request_twice_is_two_requests(pair, wait):
    engine, request = Engine(pair), Request(PROMPT, Sampling(temperature=0.9, seed=4), 6, ignore_eos=True)
    first = engine.submit(request)
    if wait:
        first.result()
    second = engine.submit(request)
    assert (second.request.id == first.request.id) == wait
    events = [list(handle) for handle in (first, second)]
    assert [h.result().token_ids for h in (first, second)] == [
        generate(pair, PROMPT, request.sampling, 6, ignore_eos=True).token_ids
    ] * 2
    assert not engine.busy
    for handle, own in zip((first, second), events, strict=True):
        assert {event.request_id for event in own} == {handle.request.id}
        assert [t for event in own for t in event.token_ids] == handle.result().token_ids


def test_cancelling_one_of_two_submissions_leaves_the_other(pair):
    engine, request = Engine(pair), Request(PROMPT, GREEDY, 6, ignore_eos=True)
    first, second = engine.submit(request), engine.submit(request)
    second.cancel()
    assert second.result().finish_reason == "cancelled" and second.result().token_ids == []
    assert first.result().finish_reason == "length" and len(first.result().token_ids) == 6
