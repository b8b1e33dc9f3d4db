"""The gated delta rule: step t as alone, replays as runs, the state's bytes as in plain mlx."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cpu_layers import as_float64, raw

from mlx_spec import Kernel
from mlx_spec.gated_delta import GatedDelta
from mlx_spec.testing import KernelContract
from mlx_spec_cpu import swap
from mlx_spec_cpu.native import library as load
from mlx_spec_cpu.operations import build_replay_delta, replay_delta_reference

SETS = load().kernel_names().split(",")
DTYPES = [mx.float32, mx.bfloat16, mx.float16]
SIZES = [(2, 2, 6, 32, 40), (1, 3, 3, 5, 7), (3, 1, 4, 130, 3), (1, 2, 2, 1, 1), (2, 1, 2, 48, 129)]
TOLERANCE = {mx.float32: 1e-5, mx.bfloat16: 2e-2, mx.float16: 3e-3}
Steps = list[mx.array]


def made(L: int, B: int, Hk: int, Hv: int, Dk: int, Dv: int, dtype: mx.Dtype = mx.float32, seed: int = 0) -> Steps:
    """q, k, v, g, beta, state of that many steps."""
    keys = mx.random.split(mx.random.key(seed), 6)
    q, k = (mx.random.normal((B, L, Hk, Dk), key=keys[i]) for i in (0, 1))
    q, k = (a * mx.rsqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    v = mx.random.normal((B, L, Hv, Dv), key=keys[2])
    g = mx.random.uniform(0.7, 1.0, (B, L, Hv), key=keys[3])
    beta = mx.sigmoid(mx.random.normal((B, L, Hv), key=keys[4]))
    state = mx.random.normal((B, Hv, Dv, Dk), key=keys[5])
    return [(q * Dk**-0.5).astype(dtype), k.astype(dtype), v.astype(dtype), g, beta.astype(dtype), state]


def steps_of(given: Steps, first: int, last: int) -> Steps:
    return [a[:, first:last] for a in given[:5]]


class TestContract(KernelContract):
    """Rows are the rows of a batch; the outputs are joined into one array."""

    by_row = (0, 1, 2, 3, 4, 5)

    @pytest.fixture
    def kernel(self) -> Kernel:
        def joined(run: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *given: mx.concatenate([a.reshape(a.shape[0], -1) for a in run(*given)], axis=1)

        return Kernel("gated-delta", ("cpu",), "1e-5", lambda: joined(load().gated_delta), joined(GatedDelta()))

    @pytest.fixture
    def arguments(self) -> Callable[[int, int], Any]:
        return lambda rows, seed: made(5, rows, 2, 4, 24, 13, seed=seed)


class TestReplayContract(KernelContract):
    by_row = (0, 1, 2, 3, 4)

    @pytest.fixture
    def kernel(self) -> Kernel:
        return Kernel("replay-delta", ("cpu",), "bitwise", build_replay_delta, replay_delta_reference)

    @pytest.fixture
    def arguments(self) -> Callable[[int, int], Any]:
        def make(rows: int, seed: int) -> list[mx.array]:
            _, k, delta, g, _, state = made(6, rows, 2, 4, 24, 13, seed=seed)
            return [state, k, g, delta, mx.arange(rows, dtype=mx.int32) % 7]

        return make


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_steps_of_a_block_are_steps_alone(library: Any, sizes: Any, dtype: mx.Dtype, kernels: str) -> None:
    assert library.use_kernels(kernels)
    L, given = 70, made(70, *sizes, dtype=dtype)
    state, outputs, deltas, states = given[5], [], [], []
    for t in range(L):
        y, state, delta = library.gated_delta(*steps_of(given, t, t + 1), state)
        outputs.append(y), deltas.append(delta), states.append(state)
    for threads in (1, 3):
        library.set_threads(threads)
        for n in (1, 2, 5, 31, 32, 33, 70):
            y, after, delta = library.gated_delta(*steps_of(given, 0, n), given[5])
            assert raw(y) == raw(mx.concatenate(outputs[:n], axis=1))
            assert raw(delta) == raw(mx.concatenate(deltas[:n], axis=1))
            assert raw(after) == raw(states[n - 1])


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_is_the_rule_of_core(library: Any, sizes: Any, dtype: mx.Dtype, kernels: str) -> None:
    assert library.use_kernels(kernels)
    given = made(9, *sizes, dtype=dtype)
    for ours, theirs in zip(library.gated_delta(*given), GatedDelta()(*given), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert np.abs(as_float64(ours) - as_float64(theirs)).max() < TOLERANCE[ours.dtype] * 4


def test_it_is_the_rule_in_float64(library: Any) -> None:
    given = made(40, 2, 2, 6, 32, 40)
    q, k, v, g, beta, S = (as_float64(a) for a in given)
    q, k = (np.repeat(a, 3, axis=2) for a in (q, k))
    y = np.zeros_like(v)
    for t in range(40):
        S = S * g[:, t, :, None, None]
        delta = beta[:, t, :, None] * (v[:, t] - np.einsum("bhvk,bhk->bhv", S, k[:, t]))
        S = S + delta[..., None] * k[:, t, :, None]
        y[:, t] = np.einsum("bhvk,bhk->bhv", S, q[:, t])
    ours = library.gated_delta(*given)
    assert np.abs(as_float64(ours[0]) - y).max() < 2e-6 and np.abs(as_float64(ours[1]) - S).max() < 1e-5


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_replay_is_the_run_of_what_is_kept(library: Any, sizes: Any, kernels: str) -> None:
    assert library.use_kernels(kernels)
    B, given = sizes[0], made(40, *sizes, dtype=mx.bfloat16)
    _, k, _, g, _, state = given
    _, _, delta = library.gated_delta(*given)
    runs = {n: library.gated_delta(*steps_of(given, 0, n), state)[1] if n else state for n in (0, 1, 7, 32, 33, 40)}
    for counts in ((0, 7, 40), (33, 1, 0), (32, 40, 7)):
        keep = mx.array(counts[:B], mx.int32)
        for run in (library.replay_delta(state, k, g, delta, keep), GatedDelta().replay(state, k, g, delta, keep)):
            assert [raw(run[b]) == raw(runs[counts[b]][b]) for b in range(B)] == [True] * B


def test_strides_and_nothing(library: Any) -> None:
    given = made(6, 2, 2, 4, 16, 12)
    want = library.gated_delta(*given)
    loose = [mx.repeat(a, 2, axis=-1)[..., ::2] for a in given]
    swapped = [mx.contiguous(a.swapaxes(1, 2)).swapaxes(1, 2) for a in given]
    for other in (loose, swapped):
        assert [raw(a) == raw(b) for a, b in zip(library.gated_delta(*other), want, strict=True)] == [True] * 3
        again = library.replay_delta(
            other[5], other[1], other[3], mx.repeat(want[2], 2, axis=-1)[..., ::2], mx.array([6, 6])
        )
        assert raw(again) == raw(want[1])
    y, after, delta = library.gated_delta(*steps_of(given, 0, 0), given[5])
    assert y.shape == delta.shape == (2, 0, 4, 12) and raw(after) == raw(given[5])
    none = library.gated_delta(*(a[:0] for a in given))
    mx.eval(none)
    assert none[1].shape == (0, 4, 12, 16)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_stay_in_their_row(library: Any, value: float) -> None:
    given = made(4, 2, 1, 2, 13, 9)
    plain = library.gated_delta(*given)
    given[2][1, 1, 0, 4] = value  # one value: one row of one state from step 1 on
    ours, theirs = library.gated_delta(*given), GatedDelta()(*given)
    for a, b, before in zip(ours, theirs, plain, strict=True):
        assert np.array_equal(np.isfinite(np.array(a)), np.isfinite(np.array(b)))
        assert np.array_equal(np.isnan(np.array(a)), np.isnan(np.array(b)))
        assert raw(a[0]) == raw(before[0])
    touched = ~np.isfinite(np.array(ours[1]))
    assert touched[1, 0, 4].any() and touched.sum() == touched[1, 0, 4].sum()


@pytest.mark.parametrize(
    "message, change",
    [
        (r"state: found bfloat16", {5: lambda a: a.astype(mx.bfloat16)}),
        (r"keys: found .*, expected floats \(B, L, Hk, Dk\) for a state", {1: lambda a: a[..., :3]}),
        (r"keys: found .*", {1: lambda a: mx.repeat(a, 3, axis=2)}),
        (r"queries: found shape", {0: lambda a: a[:, :2]}),
        (r"values: found int32, expected float32, float16 or bfloat16", {2: lambda a: a.astype(mx.int32)}),
        (r"decay: found float16, expected float32", {3: lambda a: a.astype(mx.float16)}),
        (r"rate: found shape", {4: lambda a: a[:, :, None]}),
    ],
)
def test_what_does_not_fit_is_refused(library: Any, message: str, change: dict[int, Any]) -> None:
    given = [change.get(i, lambda a: a)(a) for i, a in enumerate(made(3, 2, 2, 4, 8, 6))]
    with pytest.raises(ValueError, match=message):
        library.gated_delta(*given)


def test_a_replay_of_something_else_is_refused(library: Any) -> None:
    _, k, delta, g, _, state = made(3, 2, 2, 4, 8, 6)
    with pytest.raises(ValueError, match=r"keep: found int32 of shape \(3\), expected int32 of shape \(2,\)"):
        library.replay_delta(state, k, g, delta, mx.array([1, 1, 1]))
    with pytest.raises(ValueError, match="delta: found shape"):
        library.replay_delta(state, k, g, delta[:, :2], mx.array([1, 1]))


def test_the_module_is_replaced() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gated_delta = GatedDelta()

    layer = swap(Layer())
    rule, given = layer.gated_delta, made(3, 1, 2, 4, 8, 6, dtype=mx.bfloat16)
    assert type(rule).__name__ == "RowGatedDelta" and isinstance(rule, GatedDelta)
    y, after, delta = rule(*given)
    assert y.dtype == mx.bfloat16 and raw(rule.replay(given[5], given[1], given[3], delta, mx.array([3]))) == raw(after)
    whole = [a.astype(mx.int32) if i == 2 else a for i, a in enumerate(given)]
    assert mx.array_equal(rule(*whole)[1], GatedDelta()(*whole)[1]).item()


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_resuming_is_a_replay_and_a_run(library: Any, sizes: Any, dtype: mx.Dtype, kernels: str) -> None:
    assert library.use_kernels(kernels)
    B = sizes[0]
    for owed_steps, L in ((1, 1), (5, 3), (40, 2), (3, 70)):
        before, after = made(owed_steps, *sizes, dtype=dtype, seed=1), made(L, *sizes, dtype=dtype, seed=2)
        state = before[5]
        _, _, deltas = library.gated_delta(*before)
        keep = mx.array([(owed_steps - b) % (owed_steps + 1) for b in range(B)], dtype=mx.int32)
        tape = before[1], before[3], deltas, keep
        for threads in (1, 3):
            library.set_threads(threads)
            y, base, delta = library.resume_delta(*after[:5], state, *tape)
            kept = library.replay_delta(state, *tape)
            wanted = library.gated_delta(*after[:5], kept)
            assert raw(base) == raw(kept) and raw(y) == raw(wanted[0]) and raw(delta) == raw(wanted[2])


def test_resuming_refuses_what_a_replay_and_a_run_refuse(library: Any) -> None:
    given = made(3, 2, 1, 2, 8, 4)
    q, k, v, g, beta, state = given
    _, _, deltas = library.gated_delta(*given)
    keep = mx.array([1, 2], dtype=mx.int32)
    library.resume_delta(q, k, v, g, beta, state, k, g, deltas, keep)
    with pytest.raises(ValueError, match="keep"):
        library.resume_delta(q, k, v, g, beta, state, k, g, deltas, keep[:1])
    with pytest.raises(ValueError, match="delta"):
        library.resume_delta(q, k, v, g, beta, state, k, g, deltas[:, :2], keep)
    with pytest.raises(ValueError, match="values"):
        library.resume_delta(q, k, v[..., :1], g, beta, state, k, g, deltas, keep)


def chain(library: Any, given: Steps, tape: Steps, hold: bool) -> tuple[list[bytes], list[int]]:
    """A replay, a run and a resume, each over the state that the last one left; bytes, and addresses of the states."""
    state, held, places = mx.array(given[5]), [], []
    for step in ("replay", "run", "resume"):
        mx.eval(state)
        places.append(np.asarray(state).__array_interface__["data"][0])
        if hold:
            held.append(state)
        if step == "replay":
            state = library.replay_delta(state, *tape)
        elif step == "run":
            y, state, delta = library.gated_delta(*given[:5], state)
        else:
            y, state, delta = library.resume_delta(*given[:5], state, *tape)
    mx.eval(state)
    places.append(np.asarray(state).__array_interface__["data"][0])
    return [raw(a) for a in (y, state, delta)], places


def test_a_state_nobody_else_has_is_written_in_place(library: Any) -> None:
    given = made(3, 1, 2, 4, 64, 32)
    tape = given[1], given[3], library.gated_delta(*given)[2], mx.array([2], mx.int32)
    alone, shared = chain(library, given, tape, hold=False), chain(library, given, tape, hold=True)
    assert alone[0] == shared[0]
    assert len(set(alone[1])) == 1 and len(set(shared[1])) == 4


def test_what_is_written_in_place_stays_for_whoever_has_a_part_of_it(library: Any) -> None:
    given = made(3, 2, 2, 4, 64, 32)
    whole = mx.array(given[5])
    part = whole[1:]
    mx.eval(part)
    before = raw(part)
    state = whole[:1]
    del whole
    _, after, _ = library.gated_delta(*(a[:1] for a in given[:5]), state)
    del state
    mx.eval(after)
    assert raw(part) == before
