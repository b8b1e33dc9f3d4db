"""history="all": every committed position reaches the drafter once, whatever happens between two proposes."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest
from pairs import make_pair, tiny_target

from mlx_spec.api import generate
from mlx_spec.draft_state import DraftState
from mlx_spec.engine import Engine
from mlx_spec.lane import Lane, pad_rows
from mlx_spec.models import Drafter
from mlx_spec.request import Request
from mlx_spec.sampling import Sampling
from mlx_spec.types import Capabilities, Draft, DrafterCard, TapBlock

TOKENS = 30


class Collector(Drafter):
    """Keeps the tap of every position it is shown, per request, and drafts wrongly or not at all.

    budget_of(call): tokens to draft in that propose, or an exception to raise.
    """

    taps = ("hidden",)
    capabilities = Capabilities(history="all")

    def __init__(self, budget_of=lambda call: 2):
        self.card = DrafterCard("collector", "")
        self.budget_of = budget_of
        self.calls = 0
        self.most_blocks = 0

    def make_state(self) -> DraftState:
        return DraftState(rows=[[]])

    def prime(self, state, tokens, taps, start) -> None:
        rows = state.rows[0]
        assert start == len(rows)
        rows += list(taps["hidden"][0])

    def propose(self, lane: Lane, budget: Sequence[int]) -> Draft:
        self.calls += 1
        self.most_blocks = max(self.most_blocks, len(lane.fresh))
        outcome = self.budget_of(self.calls)
        if isinstance(outcome, Exception):
            raise outcome
        held = [len(rows) for rows in lane.draft_state.rows]
        fresh, counts = lane.fresh_rows("hidden", held)
        for b, rows in enumerate(lane.draft_state.rows):
            if counts[b] == lane.lengths[b] - held[b]:
                rows += list(fresh[b, : counts[b]]) if fresh is not None else []
        if self.verdicts is not None:
            self.verdicts(lane)
        return Draft(mx.zeros((lane.size, outcome), dtype=mx.int32), [min(k, outcome) for k in budget])

    verdicts = None


def check(target, lane: Lane) -> None:
    """All taps collected so far equal those of one forward over the committed tokens."""
    for tokens, rows in zip(lane.tokens, lane.draft_state.rows, strict=True):
        if not rows:
            continue
        assert len(rows) == len(tokens) - 1
        seen = target.forward(mx.array([tokens[:-1]]), target.make_states(), ("hidden",))
        assert mx.allclose(mx.stack(rows), seen.taps["hidden"][0], rtol=1e-4, atol=1e-4)


def run(target, drafter: Collector, prompts, counts, rows: int = 1, step: int = 2048, **request) -> list[list[int]]:
    checked = []
    drafter.verdicts = lambda lane: checked.append(check(target, lane))
    engine = Engine(make_pair(target, drafter, 4, prefill_step=step), max_rows=rows)
    silent = request.pop("silent", ())
    handles = [
        engine.submit(Request(list(p), Sampling(), n, ignore_eos=True, adaptive=False, speculative=i not in silent))
        for i, (p, n) in enumerate(zip(prompts, counts, strict=True))
    ]
    engine.run()
    assert checked
    return [h.result().token_ids for h in handles]


def prompt_of(length: int) -> list[int]:
    return [(7 * i + 3 * length + i * i) % 131 for i in range(length)]


def plain(target, prompt, count) -> list[int]:
    return generate(make_pair(target, None), prompt, None, count, ignore_eos=True).token_ids


@pytest.mark.parametrize("length", [1, 2, 13])
@pytest.mark.parametrize("step", [1, 5, 2048])
def test_prompt_and_reply_are_seen_whole(length, step):
    target = tiny_target("llama")
    drafter = Collector()
    assert run(target, drafter, [prompt_of(length)], [TOKENS], step=step) == [plain(target, prompt_of(length), TOKENS)]
    assert drafter.most_blocks == 1  # what was seen is not kept


def test_empty_drafts_and_faults_leave_no_gap():
    """Plain steps between proposes pile up; after a fault the same taps are shown again."""
    target = tiny_target("llama")
    script = [2, 0, 0, ValueError("scripted"), 2, ValueError("scripted"), ValueError("scripted"), 1, 0, 2]
    drafter = Collector(lambda call: script[call % len(script)])
    assert run(target, drafter, [prompt_of(6)], [60]) == [plain(target, prompt_of(6), 60)]
    assert drafter.most_blocks > 2


def test_rows_joining_and_leaving_keep_their_own_history():
    target = tiny_target("llama")
    lengths, counts = (6, 1, 21, 9, 13), (TOKENS, 8, 17, 25, 5)
    script = [2, 1, 0, 2, ValueError("scripted")]
    drafter = Collector(lambda call: script[call % len(script)])
    prompts = [prompt_of(n) for n in lengths]
    replies = run(target, drafter, prompts, counts, rows=3, step=4, silent=(3,))
    assert replies == [plain(target, p, n) for p, n in zip(prompts, counts, strict=True)]


def test_nothing_piles_up_once_every_row_has_stopped_drafting():
    target = tiny_target("llama")
    drafter = Collector(lambda call: ValueError("scripted"))
    engine = Engine(make_pair(target, drafter, 4))
    handle = engine.submit(Request(prompt_of(6), Sampling(), 40, ignore_eos=True, adaptive=False))
    blocks = []
    while engine.step():
        lane = engine._advancer.lane
        blocks.append(len(lane.fresh) if lane is not None else 0)
    assert handle.result().speculation.active is False
    assert max(blocks) <= 10 and blocks[-5:] == [0] * 5


def test_a_prime_that_raises_costs_acceptance_only(caplog):
    class Failing(Collector):
        def prime(self, state, tokens, taps, start) -> None:
            raise ZeroDivisionError("scripted")

    target = tiny_target("llama")
    out = generate(make_pair(target, Failing(), 4), prompt_of(6), None, TOKENS, ignore_eos=True, adaptive=False)
    assert out.token_ids == plain(target, prompt_of(6), TOKENS)
    reason = "plain decoding: drafter prime raised ZeroDivisionError: scripted"
    assert out.speculation.active is False and out.speculation.reason == reason
    assert out.speculation.fallbacks == [reason] and out.timings.draft_rounds == 0
    assert [r.getMessage() for r in caplog.records] == [reason]


@pytest.mark.parametrize(("step", "chunks"), [(64, 1), (4, 3)])
def test_the_newest_row_is_all_that_a_drafter_of_the_last_one_is_shown(step, chunks):
    """Its prime sees every chunk, but a tap only of the prompt's last row before the anchor."""
    shapes = []

    class Newest(Collector):
        capabilities = Capabilities(history="last")

        def prime(self, state, tokens, taps, start) -> None:
            shapes.append({name: value.shape[:2] for name, value in taps.items()})

        def propose(self, lane: Lane, budget: Sequence[int]) -> Draft:
            shapes.append(lane.fresh[-1].taps["hidden"].shape[:2])
            return Draft(mx.zeros((lane.size, 1), dtype=mx.int32), [1])

    target = tiny_target("llama")
    out = generate(
        make_pair(target, Newest(), 4, prefill_step=step), prompt_of(13), None, 5, ignore_eos=True, adaptive=False
    )
    assert out.token_ids == plain(target, prompt_of(13), 5)
    assert shapes[: chunks + 1] == [{}] * (chunks - 1) + [{"hidden": (1, 1)}] + [(1, 1)]


# -- the arithmetic of fresh_rows ------------------------------------------------------------------------


def lane_with(fresh: list[TapBlock], lengths: Sequence[int]) -> Lane:
    lane = Lane(None, None, None, None)  # type: ignore[arg-type]
    lane.tokens = [[0] * (n + 1) for n in lengths]
    lane.fresh = fresh
    return lane


def block(values: list[list[int]], keep: list[int]) -> TapBlock:
    return TapBlock({"x": mx.array(values)[..., None]}, keep)


def test_fresh_rows_by_position():
    # row 0 holds positions 4..6 (10, 11, 13), row 1 position 2 (20), row 2 none
    fresh = [block([[10, 11, 12], [0, 0, 0], [0, 0, 0]], [2, 0, 0]), block([[13, 14], [20, 21], [0, 0]], [1, 1, 0])]
    lane = lane_with(fresh, [7, 3, 5])
    for since, rows, counts in (
        ([4, 2, 5], [[10, 11, 13], [20, 0, 0], [0, 0, 0]], [3, 1, 0]),
        ([6, 3, 0], [[13], [0], [0]], [1, 0, 0]),
        ([0, 0, 0], [[10, 11, 13], [20, 0, 0], [0, 0, 0]], [3, 1, 0]),
    ):
        taps, found = lane.fresh_rows("x", since)
        assert (taps[..., 0].tolist(), found) == (rows, counts)
    assert lane.fresh_rows("x", [7, 3, 5]) == (None, [0, 0, 0])
    assert lane.fresh_rows("y", [0, 0, 0]) == (None, [0, 0, 0])
    assert lane_with([], [3]).fresh_rows("x", [0]) == (None, [0])


def test_pad_rows():
    assert pad_rows([None, None]) is None
    padded = pad_rows([mx.ones((1, 3)), None, mx.full((2, 3), 5.0)])
    assert padded.shape == (3, 2, 3)
    assert padded[..., 0].tolist() == [[1, 0], [0, 0], [5, 5]]
