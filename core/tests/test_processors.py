"""History-dependent logits on verify rows: equal to mlx-lm's processors called one token at a time."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_logits_processors

from mlx_spec.accept import RowPlan, accept
from mlx_spec.drawing import Drawer
from mlx_spec.processors import History, process_rows
from mlx_spec.sampling import Sampling
from mlx_spec.types import Draft

V, BLOCK = 31, 5
SETTINGS = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "repetition_context_size": 3},
    {"presence_penalty": 0.9},
    {"presence_penalty": -0.4, "presence_context_size": 60},
    {"frequency_penalty": 0.35},
    {"frequency_penalty": 0.35, "frequency_context_size": 4},
    {"logit_bias": {0: 1.5, 30: -2.0, 7: 3.0}},
    {
        "logit_bias": {5: 1.0},
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "frequency_context_size": 7,
    },
]


def tokens_of(seed: int, count: int) -> list[int]:
    mx.random.seed(seed)
    return mx.random.randint(0, V // 3, (count,)).tolist() if count else []


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("history", [0, 1, 2, 50])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_report_62_a_block_of_five_equals_five_single_steps(settings: dict, history: int, dtype: mx.Dtype) -> None:
    before, drafts = tokens_of(history, history), tokens_of(99, BLOCK - 1)
    logits = (mx.random.normal((BLOCK, V)) * 3).astype(dtype)
    untouched = mx.array(logits)
    found, error = process_rows(logits, Sampling(**settings), History(before), mx.array(drafts))
    steps = []
    for i in range(BLOCK):
        row = logits[i : i + 1] + 0  # mlx-lm's processors write into what they are given
        for processor in make_logits_processors(**settings):
            row = processor(mx.array(before + drafts[:i], dtype=mx.int32), row)
        steps.append(row)
    assert error == "" and found.dtype == dtype
    assert mx.array_equal(found, mx.concatenate(steps))
    assert mx.array_equal(logits, untouched)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_one_row_at_a_time_equals_the_block(settings: dict) -> None:
    before, drafts = tokens_of(1, 9), mx.array(tokens_of(2, BLOCK - 1))
    logits = mx.random.normal((BLOCK, V))
    block, _ = process_rows(logits, Sampling(**settings), History(before), drafts)
    for i in range(BLOCK):
        row, _ = process_rows(logits[i : i + 1], Sampling(**settings), History(before), drafts[:i], first=i)
        assert mx.array_equal(row[0], block[i])


def test_report_60_the_penalty_counts_every_token_of_the_reply() -> None:
    before, drafts = [1, 2, 2, 3], [2, 4, 2]
    settings = Sampling(frequency_penalty=1.0, frequency_context_size=100)
    found, _ = process_rows(mx.zeros((4, 6)), settings, History(before), mx.array(drafts))
    for i, row in enumerate(found.tolist()):
        seen = before + drafts[:i]
        assert row == [-float(seen.count(v)) for v in range(6)]


@pytest.mark.parametrize("reply", [0, 15, 16, 19, 20, 25])
def test_report_60_no_end_before_the_minimum_and_one_right_after_it(reply: int) -> None:
    """min_tokens 20: the end is allowed first as token 21, wherever a block crosses that line."""
    end, limit = 4, 20
    logits = mx.zeros((BLOCK, V))
    logits[:, end] = 50.0
    history = History([1] * (3 + reply), reply, (end, 6))
    found, _ = process_rows(logits, Sampling(min_tokens=limit), history, mx.zeros((BLOCK - 1,), dtype=mx.int32))
    assert (found[:, end] > -math.inf).tolist() == [reply + i >= limit for i in range(BLOCK)]
    assert (found[:, 6] > -math.inf).tolist() == [reply + i >= limit for i in range(BLOCK)]
    assert (found[:, 5] == 0).all().item()


def test_the_minimum_holds_against_a_processor_that_forces_the_end() -> None:
    def force(tokens: mx.array, logits: mx.array) -> mx.array:
        logits[:, 4] = 1e4
        return logits

    settings = Sampling(min_tokens=3, processors=(force,))
    found, _ = process_rows(mx.zeros((2, V)), settings, History([1, 2], 2, (4,)), mx.array([1]))
    assert found[:, 4].tolist() == [-math.inf, 1e4]


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("law", [{}, {"temperature": 0.7, "seed": 2}, {"temperature": 0.7}])
def test_report_66_a_processor_s_limit_bites_at_its_place_in_every_block(width: int, law: dict[str, float]) -> None:
    """Output token 10 is 5, with a drafter that never says 5 and one that always repeats the target."""
    prompt, calls = [1, 2, 3], []

    def force(tokens: mx.array, logits: mx.array) -> mx.array:
        calls.append(tokens.size)
        if tokens.size == len(prompt) + 9:
            logits[:, :] = -math.inf
            logits[:, 5] = 1.0
        return logits

    mx.random.seed(width)
    table = mx.random.normal((64, V)) - mx.where(mx.arange(V) == 5, 99.0, 0.0)
    settings = Sampling(**law, processors=(force,))
    for helpful in (False, True):
        tokens = list(prompt)
        while len(tokens) < len(prompt) + 14:
            n = len(tokens)
            plan = [RowPlan(settings, 2, n, History(tokens, n - len(prompt)))]
            logits = table[n : n + width + 1][None]
            draw = Drawer(plan, V)
            steps = [draw(logits[:, i], i) for i in range(width)]
            draft = Draft(mx.stack([t for t, _ in steps], axis=1))
            if steps[0][1] is not None:
                draft.probs = mx.stack([q for _, q in steps], axis=1)
            if not helpful:
                draft = Draft(mx.full((1, width), 30, dtype=mx.int32))
            tokens += accept(plan, logits, draft).read()[0].tokens
        reply = tokens[len(prompt) :]
        assert reply[9] == 5 and 5 not in reply[:9] + reply[10:14]
    assert {len(prompt) + i for i in range(10)} <= set(calls)


def test_processors_run_in_order_and_see_exactly_their_row_s_history() -> None:
    seen: list[list[int]] = []

    def first(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        assert tokens.dtype == mx.int32 and logits.shape == (1, V)
        return logits + 1

    def second(tokens: mx.array, logits: mx.array) -> mx.array:
        logits *= 2  # in place: the rows of the verify must not notice
        return logits

    logits = mx.ones((3, V))
    found, error = process_rows(logits, Sampling(processors=(first, second)), History([8, 9]), mx.array([4, 5]))
    assert seen == [[8, 9], [8, 9, 4], [8, 9, 4, 5]] and error == ""
    assert (found == 4).all().item() and (logits == 1).all().item()


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (None, "NoneType"),
        (mx.zeros((V,)), f"shape ({V},)"),
        (mx.zeros((1, V + 1)), f"shape (1, {V + 1})"),
        ([0.0], "list"),
    ],
    ids=str,
)
def test_what_a_processor_may_not_return_is_named_and_spoils_the_rows_from_there_on(
    returned: object, found: str
) -> None:
    def odd(tokens: mx.array, logits: mx.array) -> object:
        return returned if tokens.size > 2 else logits

    rows, error = process_rows(mx.zeros((3, V)), Sampling(processors=(odd,)), History([8, 9]), mx.array([4, 5]))
    assert error.startswith(f"logits processor odd: found {found}, expected an array of shape (1, {V})")
    assert mx.isnan(rows).all(axis=-1).tolist() == [False, True, True]


def test_ids_a_vocabulary_does_not_have_touch_nothing() -> None:
    settings = Sampling(logit_bias={V + 5: 9.0, 2: 1.0}, presence_penalty=1.0, frequency_penalty=1.0, min_tokens=9)
    rows, _ = process_rows(mx.zeros((2, V)), settings, History([3], 0, (V + 7,)), mx.array([V + 9]))
    want = [0.0] * V
    want[2], want[3] = 1.0, -2.0
    assert rows[0].tolist() == want
    assert process_rows(mx.zeros((1, V)), Sampling(logit_bias={V: 1.0}), History([1]))[0].tolist() == [[0.0] * V]


def test_missing_drafts_are_an_error_of_the_caller() -> None:
    with pytest.raises(ValueError, match="2 drafted tokens are needed as history, found 0"):
        process_rows(mx.zeros((3, V)), Sampling(presence_penalty=1.0), History([1]))


def test_a_draft_is_drawn_with_the_penalties_its_position_has() -> None:
    settings = Sampling(presence_penalty=5.0, presence_context_size=100)
    logits = mx.array([[5.0, 4.0, 3.0, 2.0, 1.5]])
    draw = Drawer([RowPlan(settings, 0, 1, History([1]))], 5)
    assert [draw(logits, i)[0].item() for i in range(4)] == [0, 2, 3, 4]
