"""Kept steps that are owed: a rule that runs them on its way leaves the bytes that running them at once leaves."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_spec.gated_delta import GatedDelta, Owed
from mlx_spec.state import DeltaState
from mlx_spec.state.delta import Steps

HK, HV, DK, DV, C, KEPT = 2, 4, 8, 5, 11, 3


class Resuming(GatedDelta):
    """The plain rule, resuming; counts what it is asked for."""

    resumes = True

    def __init__(self) -> None:
        super().__init__()
        self.asked = {"resume": 0, "replay": 0}

    def resume(self, owed: Owed, *steps: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        self.asked["resume"] += 1
        state = GatedDelta().replay(*owed)
        y, _, delta = GatedDelta()(*steps, state)
        return y, state, delta

    def replay(self, *given: mx.array) -> mx.array:
        self.asked["replay"] += 1
        return super().replay(*given)


def block(seed: int, batch: int, L: int) -> tuple[mx.array, ...]:
    """rows, q, k, v, g, beta of L steps."""
    keys = mx.random.split(mx.random.key(seed), 6)
    shapes = [(C,), (HK, DK), (HK, DK), (HV, DV)]
    rows, q, k, v = (mx.random.normal((batch, L, *shape), key=key) for shape, key in zip(shapes, keys, strict=False))
    g = mx.random.uniform(0.6, 1.0, (batch, L, HV), key=keys[4])
    return rows, q, k, v, g, mx.sigmoid(mx.random.normal((batch, L, HV), key=keys[5]))


def run(state: DeltaState, rule: GatedDelta, seed: int, L: int, tape: bool = True) -> mx.array:
    """What a layer does with its state; y."""
    rows, q, k, v, g, beta = block(seed, len(state.lengths), L)
    joined, owed = state.joined(rows, KEPT), state.owed
    if owed is not None and rule.resumes and tape:
        y, held, delta = rule.resume(owed, q, k, v, g, beta)
    else:
        owed = None
        y, held, delta = rule(q, k, v, g, beta, state.recurrent((len(rows), HV, DV, DK)))
    state.append(held, Steps(joined, k, g, delta), rule, tape, paid=owed is not None)
    return y


def raw(x: mx.array) -> bytes:
    return bytes(memoryview(x))


def same(one: DeltaState, other: DeltaState) -> bool:
    """Whether both hold the same bytes, owed ones run."""
    (a, meta), (b, other_meta) = one.to_tensors(), other.to_tensors()
    return meta == other_meta and a.keys() == b.keys() and all(raw(a[name]) == raw(b[name]) for name in a)


@pytest.mark.parametrize("batch", [1, 3])
def test_rounds_of_any_length_leave_the_bytes_of_a_rule_that_runs_steps_at_once(batch):
    plain, resuming = (DeltaState(batch), GatedDelta()), (DeltaState(batch), Resuming())
    for seed, (L, keep) in enumerate(
        [(4, (2, 0, 4)), (3, (3, 3, 3)), (5, (0, 1, 2)), (2, (1, 2, 2)), (1, (1, 0, 1)), (4, (1, 1, 4))]
    ):
        outputs = []
        for state, rule in (plain, resuming):
            mark = state.mark()
            outputs.append(run(state, rule, seed, L))
            state.rewind(mark, keep[:batch])
        assert raw(outputs[0]) == raw(outputs[1]) and plain[0].lengths == resuming[0].lengths
    # A lone row that kept nothing is back at a state that is there; among others it is owed none of its steps.
    assert resuming[1].asked == {"resume": 4 if batch == 1 else 5, "replay": 0}
    assert same(plain[0], resuming[0])
    assert resuming[1].asked["replay"] == 1  # to_tensors wanted the state itself


def test_what_is_owed_can_be_run_saved_joined_and_taken_back_again():
    plain, resuming = (DeltaState(), GatedDelta()), (DeltaState(), Resuming())
    for state, rule in (plain, resuming):
        mark = state.mark()
        run(state, rule, 1, 4)
        state.rewind(mark, [2])
        second = state.mark()
        run(state, rule, 2, 3)
        run(state, rule, 3, 2)  # two runs after one mark
        state.rewind(second, [4])
    assert resuming[0].owed is not None
    assert same(plain[0].select([0, 0]), resuming[0].select([0, 0]))
    tensors, meta = resuming[0].to_tensors()
    assert same(DeltaState.from_tensors(tensors, meta), plain[0])


def test_listing_what_a_state_holds_runs_nothing():
    state, rule = DeltaState(), Resuming()
    mark = state.mark()
    run(state, rule, 1, 4)
    state.rewind(mark, [2])
    assert state.nbytes > 0 and len(state.arrays()) > 2 and state.owed is not None
    assert rule.asked == {"resume": 0, "replay": 0}


def test_a_prompt_run_after_a_rewind_pays_first():
    plain, resuming = (DeltaState(), GatedDelta()), (DeltaState(), Resuming())
    for state, rule in (plain, resuming):
        mark = state.mark()
        run(state, rule, 1, 4)
        state.rewind(mark, [3])
        run(state, rule, 2, 6, tape=False)
    assert resuming[0].owed is None and same(plain[0], resuming[0])


def test_resume_of_the_plain_rule_is_a_replay_and_a_call():
    given: Any = block(5, 2, 6)
    rule, (_, q, k, v, g, beta) = GatedDelta(), given
    zeros = mx.zeros((2, HV, DV, DK))
    _, _, delta = rule(q, k, v, g, beta, zeros)
    keep = mx.array([2, 5], dtype=mx.int32)
    y, before, again = rule.resume(Owed(zeros, k, g, delta, keep), q, k, v, g, beta)
    state = rule.replay(zeros, k, g, delta, keep)
    wanted = rule(q, k, v, g, beta, state)
    assert raw(before) == raw(state) and raw(y) == raw(wanted[0]) and raw(again) == raw(wanted[2])
    assert not rule.resumes
