"""DFlash drafts against an independent float64 implementation: alone, in company, over rounds."""

from __future__ import annotations

import importlib
import inspect
import json
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from qwen35_oracles.dflash_ours import (
    CASES,
    LENGTHS,
    Case,
    Ours,
    differences,
    lane_of,
    prompt,
    propose,
    summary,
    verify,
)

CLOSE = 2e-4
"""float32 against float64, over logits that reach tens."""


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("dflash")
    return cache(lambda case: Ours(*case.write(folder)))


def agree(found: np.ndarray, expected: np.ndarray) -> None:
    possible = np.isfinite(expected)
    assert np.array_equal(np.isfinite(found), possible)
    assert np.abs(found[possible] - expected[possible]).max() < CLOSE


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("length", [1, *LENGTHS])
def test_one_row_drafts_as_the_reference(ours, case: Case, length: int) -> None:
    pair = ours(case)
    lane, features = pair.start(prompt(case, length))
    for k in (1, 3, 5):
        ids, scores = propose(lane, [k])
        tokens, expected = pair.reference.greedy(features, lane.tokens[0][-1], k + 1)
        assert ids[0] == tokens
        agree(scores[0], expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("budget", [[4] * 4, [1, 5, 2, 3], [0, 2, 5, 0]], ids=str)
def test_rows_of_unequal_length_and_width_draft_as_alone(ours, case: Case, budget: list[int]) -> None:
    pair = ours(case)
    started = [pair.start(prompt(case, length)) for length in LENGTHS]
    lane = lane_of(pair, [(one.tokens[0], one.states, one.draft_state) for one, _ in started])
    ids, scores = propose(lane, budget)
    for b, (k, (_, features)) in enumerate(zip(budget, started, strict=True)):
        if k:
            tokens, expected = pair.reference.greedy(features, lane.tokens[b][-1], k + 1)
            assert ids[b] == tokens
            agree(scores[b], expected)
        else:
            assert ids[b] == []


@pytest.mark.parametrize("name", ["full", "sliding", "second"])
def test_rounds_with_every_accept_count_leave_verified_rows_only(ours, name: str) -> None:
    """Three rows, rounds that keep 1 to L rows each and differ between rows; then the context is what was committed."""
    case, L = next(case for case in CASES if case.name == name), 5
    pair = ours(case)
    started = [pair.start(prompt(case, length)) for length in (3, 12, 20)]
    lane = lane_of(pair, [(one.tokens[0], one.states, one.draft_state) for one, _ in started])
    known = [features for _, features in started]
    rng = np.random.default_rng(case.seed)
    for turn in range(7):
        drafts, scores = propose(lane, [L - 1] * 3)
        for b in range(3):
            tokens, expected = pair.reference.greedy(known[b], lane.tokens[b][-1], L)
            assert drafts[b] == tokens, f"row {b} in round {turn}"
            agree(scores[b], expected)
        assert lane.draft_state.states.lengths == lane.lengths == tuple(map(len, known))
        keep = [(turn + 2 * b) % L + 1 for b in range(3)]
        new = [[*drafts[b][: k - 1], int(rng.integers(6, 300))] for b, k in enumerate(keep)]
        block = [[lane.tokens[b][-1], *drafts[b]] for b in range(3)]
        if turn != 3:
            lane.fresh = []  # as core does after a propose; once it is kept back, as after a fault
        features = verify(pair, lane, block, keep, new)
        known = [np.concatenate([rows, features[b, :k]]) for b, (rows, k) in enumerate(zip(known, keep, strict=True))]


def test_agrees_with_stored_answers(ours) -> None:
    """mlx-vlm's drafts and logits over rounds that keep 2, 3 and 2 rows, where it reads a file as we do."""
    golden = json.loads((Path(__file__).parents[1] / "oracles" / "goldens" / "dflash_mlx_vlm.json").read_text())
    cases = {case.name: case for case in CASES if "mlx_vlm" in case.oracles}
    assert {key.split("/")[0] for key in golden["answers"]} == set(cases)
    for key, answer in golden["answers"].items():
        name, length = key.split("/")
        found = ours(cases[name]).run(prompt(cases[name], int(length)), cases[name].width)
        assert differences(summary(found), answer) == [], f"{key}, {golden['versions']}"


def test_a_long_plain_stretch_is_caught_up_in_pieces(ours) -> None:
    """Rows with more unseen positions than a window takes back at once, and not equally many."""
    case = next(case for case in CASES if case.name == "sliding")
    pair = ours(case)
    started = [pair.start(prompt(case, length)) for length in (3, 9)]
    lane = lane_of(pair, [(one.tokens[0], one.states, one.draft_state) for one, _ in started])
    known = [features for _, features in started]
    rng = np.random.default_rng(2)
    for count, keep in ((80, [80, 80]), (70, [70, 3])):
        block = rng.integers(6, 300, (2, count)).tolist()
        for b in range(2):
            block[b][0] = lane.tokens[b][-1]
        new = [[*row[1:k], int(rng.integers(6, 300))] for row, k in zip(block, keep, strict=True)]
        features = verify(pair, lane, block, keep, new)
        known = [np.concatenate([rows, features[b, :k]]) for b, (rows, k) in enumerate(zip(known, keep, strict=True))]
    drafts, _ = propose(lane, [4, 4])
    assert drafts == [pair.reference.greedy(known[b], lane.tokens[b][-1], 5)[0] for b in range(2)]
    assert lane.draft_state.states.lengths == lane.lengths


def test_a_row_that_was_never_shown_drafts_nothing(ours) -> None:
    case = CASES[0]
    pair = ours(case)
    shown, features = pair.start(prompt(case, 9))
    unseen, _ = pair.start(prompt(case, 8))
    lane = lane_of(
        pair,
        [
            (shown.tokens[0], shown.states, shown.draft_state),
            (unseen.tokens[0], unseen.states, pair.drafter.make_state()),
        ],
    )
    drafts, _ = propose(lane, [3, 3])
    assert drafts == [pair.reference.greedy(features, shown.tokens[0][-1], 4)[0], []]
    assert lane.draft_state.states.lengths == (8, 0)


def test_a_propose_waits_for_nothing(ours, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are one lazy graph: nothing is evaluated before somebody asks for the tokens."""
    case = next(case for case in CASES if case.name == "second")
    lane, _ = ours(case).start(prompt(case, 12))
    for name in ("eval", "async_eval"):
        monkeypatch.setattr(mx, name, lambda *args: pytest.fail("propose waited for the device"))
    lane.bind_draw(lambda logits, step: (mx.argmax(logits, axis=-1).astype(mx.int32), None))
    draft = ours(case).drafter.propose(lane, [4])
    assert draft.tokens.shape == (1, 4)


@pytest.mark.parametrize("module", ["dflash", "dflash2", "dflash_net"])
def test_no_value_is_read_on_the_host(module: str) -> None:
    """mlx arrays cannot be patched, so the modules of a propose are read for calls that wait."""
    source = inspect.getsource(importlib.import_module(f"mlx_spec_qwen35.{module}"))
    assert [name for name in (".tolist(", ".item(", "numpy", "mx.eval", "int(mx", "float(mx") if name in source] == []
