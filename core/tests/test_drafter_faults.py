"""Whatever a drafter does besides proposing wrong tokens costs acceptance only, and only its own row's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import mlx.core as mx
import pytest
from pairs import make_pair, mlx_lm_greedy, tiny_target

from mlx_spec.api import generate
from mlx_spec.draft_state import DraftState
from mlx_spec.engine import Engine
from mlx_spec.full_model import FullModelDrafter
from mlx_spec.request import Request
from mlx_spec.sampling import Sampling
from mlx_spec.testing.drafters import ScriptedDrafter, oracle

TOKENS = 18
LENGTHS = (6, 9, 14)


def prompt_of(length: int) -> list[int]:
    return [(7 * i + 5 * length + i * i) % 97 for i in range(length)]


def truth(length: int) -> list[int]:
    return mlx_lm_greedy(tiny_target("llama"), prompt_of(length), TOKENS)


def scripted(kind: type[ScriptedDrafter] = ScriptedDrafter) -> ScriptedDrafter:
    return kind(oracle({tuple(prompt_of(n)): truth(n) for n in LENGTHS}))


def replies(drafter, rows: int = 3, count: int = TOKENS, **how):
    engine = Engine(make_pair(tiny_target("llama"), drafter, 4, prefill_step=5), max_rows=rows)
    handles = [
        engine.submit(Request(prompt_of(n), Sampling(), count, ignore_eos=True, adaptive=False, **how)) for n in LENGTHS
    ]
    engine.run()
    return [handle.result() for handle in handles]


def all_right(outs) -> bool:
    return [out.token_ids for out in outs] == [truth(n) for n in LENGTHS]


class Remembering(ScriptedDrafter):
    """Keeps each row's first token as an array and as an object, and drafts only for rows that are their own."""

    def make_state(self):
        return DraftState(carry={"first": mx.zeros((1,), dtype=mx.int32)}, rows=[[]])

    def prime(self, state, tokens, taps, start):
        if start == 0:
            state.carry["first"] = tokens[:, 0]
            state.rows[0].append(tokens[0, 0].item())

    def propose(self, lane, budget):
        held = zip(lane.draft_state.carry["first"].tolist(), lane.draft_state.rows, lane.tokens, budget, strict=True)
        if any(k and (first != tokens[0] or row != tokens[:1]) for first, row, tokens, k in held):
            raise ValueError("a row has lost its state")
        return super().propose(lane, budget)


def make_drafter(kind: str):
    if kind == "full-model":
        return FullModelDrafter(tiny_target("llama"))
    return scripted(Remembering if kind == "remembering" else ScriptedDrafter)


# -- make_state -------------------------------------------------------------------------------------------


def raises():
    raise ZeroDivisionError("scripted")


NO_STATE = {
    "raises": (raises, "drafter make_state raised ZeroDivisionError: scripted"),
    "none": (lambda: None, "drafter make_state returned NoneType, expected a DraftState of one row"),
    "other": (dict, "drafter make_state returned dict, expected a DraftState of one row"),
    "rows": (
        lambda: DraftState(rows=[1, 2]),
        "drafter make_state returned 2 rows, expected a DraftState of one row",
    ),
}


@pytest.mark.parametrize("fault", NO_STATE)
@pytest.mark.parametrize("kind", ["scripted", "full-model"])
def test_a_drafter_without_states_costs_acceptance_only(fault, kind, caplog):
    drafter = make_drafter(kind)
    drafter.make_state, reason = NO_STATE[fault]
    outs = replies(drafter)
    assert all_right(outs)
    for out in outs:
        assert out.speculation.active is False and out.timings.draft_rounds == 0
        assert out.speculation.reason == f"plain decoding: {reason}"
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [f"plain decoding: {reason}"]


@pytest.mark.parametrize("bad", [{0}, {1}, {2}, {0, 1}, {1, 2}])
@pytest.mark.parametrize("kind", ["scripted", "full-model", "remembering"])
def test_a_row_without_a_state_takes_no_drafts_from_its_neighbours(bad, kind):
    """Whichever rows fail, first, last or between, the others draft as if they were not there."""
    drafter, calls = make_drafter(kind), []
    real = drafter.make_state
    baseline = [generate_alone(kind, n) for n in LENGTHS]

    def make_state():
        calls.append(None)
        return None if len(calls) - 1 in bad else real()

    drafter.make_state = make_state
    outs = replies(drafter)
    assert all_right(outs)
    for i, (out, alone) in enumerate(zip(outs, baseline, strict=True)):
        assert out.speculation.active is (i not in bad)
        if i in bad:
            assert out.timings.draft_n == 0
        else:
            assert out.timings.draft_n_accepted == alone.timings.draft_n_accepted > 0
            assert out.speculation.fallbacks == []
    assert len(calls) == 3  # nothing is asked twice


def generate_alone(kind: str, length: int):
    pair = make_pair(tiny_target("llama"), make_drafter(kind), 4, prefill_step=5)
    return generate(pair, prompt_of(length), None, TOKENS, ignore_eos=True, adaptive=False)


def test_a_request_that_drafts_nothing_says_nothing_of_the_drafter(caplog):
    drafter = scripted()
    drafter.make_state = raises
    outs = replies(drafter, speculative=False)
    assert all_right(outs) and {out.speculation.reason for out in outs} == {"the request turned drafting off"}
    assert caplog.records == []


@pytest.mark.parametrize("when", ["join", "leave"])
def test_states_that_cannot_be_put_together_are_dropped(when, caplog):
    class Carrying(ScriptedDrafter):
        def prime(self, state, tokens, taps, start):
            state.carry["x"] = mx.zeros((1, start + tokens.shape[1]))  # every row another width

    class Leaving(ScriptedDrafter):
        def propose(self, lane, budget):
            if lane.draft_state is not None:
                lane.draft_state.rows = []
            return super().propose(lane, budget)

    assert all_right(replies(scripted(Carrying if when == "join" else Leaving)))
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    verb = "joined" if when == "join" else "narrowed"
    assert said and all(line.startswith(f"drafter states could not be {verb} (") for line in said)


# -- prime ------------------------------------------------------------------------------------------------


def test_a_prime_that_leaves_junk_behind_costs_acceptance_only():
    class Junk(Remembering):
        def prime(self, state, tokens, taps, start):
            super().prime(state, tokens, taps, start)
            if start == 5:
                state.carry["x"] = "junk"
                raise ValueError("scripted")

    outs = replies(scripted(Junk))
    assert all_right(outs)
    assert [out.speculation.active for out in outs] == [True, False, False]  # one prompt has a single chunk
    assert outs[0].timings.draft_n_accepted > 0


def test_arrays_of_a_prime_that_cannot_be_evaluated_cost_acceptance_only():
    """What fails when it is run, not when it is built: an array of another thread's stream, say."""
    made: list[mx.array] = []
    thread = threading.Thread(target=lambda: made.append(mx.arange(3) + 1))
    thread.start()
    thread.join()

    class Late(ScriptedDrafter):
        def prime(self, state, tokens, taps, start):
            state.carry["x"] = made[0]

    outs = replies(scripted(Late))
    assert all_right(outs)
    assert all("drafter prime raised RuntimeError" in out.speculation.reason for out in outs)


# -- propose and explain ----------------------------------------------------------------------------------


def meddle_tokens(lane) -> None:
    lane.tokens[0].append(1)


def meddle_other_row(lane) -> None:
    lane.tokens[-1].extend([1, 2, 3])


def drop_tokens(lane) -> None:
    del lane.tokens[0][-2:]


def write_tokens(lane) -> None:
    lane.tokens[0][-1] = (lane.tokens[0][-1] + 1) % 97


def write_prompt(lane) -> None:
    lane.tokens[0][0] += 1


def replace_lists(lane) -> None:
    lane.tokens = [list(tokens) for tokens in lane.tokens]


def drop_rows(lane) -> None:
    lane.tokens.pop()


def meddle_anchors(lane) -> None:
    lane.anchors = mx.zeros_like(lane.anchors)


def write_anchors(lane) -> None:
    lane.anchors[0] = 0


def drop_anchors(lane) -> None:
    lane.anchors = None


MEDDLERS = [
    meddle_tokens,
    meddle_other_row,
    drop_tokens,
    write_tokens,
    write_prompt,
    replace_lists,
    drop_rows,
    meddle_anchors,
    write_anchors,
    drop_anchors,
]


@pytest.mark.parametrize("meddle", MEDDLERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("fails", [False, True], ids=["proposes", "raises"])
def test_a_drafter_that_meddles_with_the_lane(meddle, rows, fails):
    class Meddler(ScriptedDrafter):
        def propose(self, lane, budget: Sequence[int]):
            draft = super().propose(lane, budget)
            if self.calls % 2:
                meddle(lane)
                if fails:
                    raise ValueError("scripted")
            return draft

    outs = replies(scripted(Meddler), rows)
    assert all_right(outs)
    assert all(out.timings.draft_rounds > 0 for out in outs)
    prompts = [out.prompt_tokens for out in outs]
    assert prompts == list(LENGTHS)


@pytest.mark.parametrize("answer", ["raises", "none", "short", "numbers"])
def test_an_explanation_that_fails_costs_an_explanation(answer):
    class Mute(ScriptedDrafter):
        def propose(self, lane, budget):
            draft = super().propose(lane, budget)
            draft.counts = [0] * lane.size
            return draft

        def explain(self, state):
            if answer == "raises":
                raise LookupError("scripted")
            return {"none": None, "short": [], "numbers": [5] * len(state.rows)}[answer]

    outs = replies(scripted(Mute))
    assert all_right(outs)
    for out in outs:
        assert all(isinstance(line, str) for line in out.speculation.fallbacks)
        if answer == "raises":
            assert out.speculation.fallbacks == ["drafter explain raised LookupError: scripted"]


def test_a_rollback_that_raises_costs_acceptance_only():
    class Stuck(ScriptedDrafter):
        def rollback(self, lane, keep):
            raise ValueError("scripted")

    outs = replies(scripted(Stuck))
    assert all_right(outs)
    assert all("could not roll back" in out.speculation.reason for out in outs)
    assert {out.speculation.governor for out in outs} == {"K=0: drafting has stopped"}
