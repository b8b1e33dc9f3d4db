"""The GPU kernels of the gated delta rule, their bodies run on the CPU: against plain MLX, and row by row."""

from __future__ import annotations

import re

import emulated
import mlx.core as mx
import mlx.nn as nn
import pytest
from delta_inputs import inputs

from mlx_spec import gated_delta_gpu
from mlx_spec.gated_delta import GatedDelta
from mlx_spec.gated_delta_gpu import KernelGatedDelta, swap_gated_delta
from mlx_spec.own_kernels import GATED_DELTA
from mlx_spec.state import DeltaState
from mlx_spec.testing import GatedDeltas, StateContract
from mlx_spec.testing.watch import same_bytes

SHAPES = [(1, 2, 4, 32, 16), (3, 1, 3, 64, 5), (2, 2, 2, 96, 8)]  # B, Hk, Hv, Dk, Dv
plain, rule = GatedDelta(), KernelGatedDelta()


@pytest.fixture(params=["metal", "cuda"], autouse=True)
def backend(request, monkeypatch):
    """The kernels of one backend, as MLX would run them there."""
    monkeypatch.setattr(gated_delta_gpu, "device_kind", lambda: request.param)
    monkeypatch.setattr(mx.fast, f"{request.param}_kernel", getattr(emulated, f"{request.param}_kernel"))
    for function in (gated_delta_gpu.kernel, gated_delta_gpu.tried):
        function.cache_clear()
    yield request.param
    for function in (gated_delta_gpu.kernel, gated_delta_gpu.tried):
        function.cache_clear()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_computes_the_rule(shape, dtype):
    given = inputs(shape, 5, dtype)
    for found, expected in zip(rule(*given), plain(*given), strict=True):
        assert found.shape == expected.shape and found.dtype == expected.dtype
        assert mx.allclose(found, expected, rtol=0, atol=1e-5 if found.dtype == mx.float32 else 2e-2)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_bytes_it_has_alone(shape, dtype):
    q, k, v, g, beta, state = inputs(shape, 6, dtype)
    y, after, delta = rule(q, k, v, g, beta, state)
    for b in range(shape[0]):
        held = state[b : b + 1]
        for t in range(6):
            one, held, left = rule(*(x[b : b + 1, t : t + 1] for x in (q, k, v, g, beta)), held)
            assert same_bytes(one[0], y[b, t : t + 1]) and same_bytes(left[0], delta[b, t : t + 1])
        assert same_bytes(held[0], after[b])


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_replay_leaves_what_running_the_kept_steps_leaves(shape, dtype):
    q, k, v, g, beta, state = inputs(shape, 5, dtype)
    _, _, delta = rule(q, k, v, g, beta, state)
    for keep in ([0, 5, 2], [5, 1, 0], [3, 3, 3]):
        kept = mx.array(keep[: shape[0]], dtype=mx.int32)
        found = rule.replay(state, k, g, delta, kept)
        assert same_bytes(found, plain.replay(state, k, g, delta, kept))
        for b, n in enumerate(kept.tolist()):
            row = [x[b : b + 1, :n] for x in (q, k, v, g, beta)]
            assert same_bytes(found[b : b + 1], rule(*row, state[b : b + 1])[1] if n else state[b : b + 1])


def test_both_bodies_give_the_same_bytes(monkeypatch):
    given, results = inputs(SHAPES[1], 4, mx.bfloat16), []
    for kind in ("metal", "cuda"):
        monkeypatch.setattr(gated_delta_gpu, "device_kind", lambda kind=kind: kind)
        monkeypatch.setattr(mx.fast, f"{kind}_kernel", getattr(emulated, f"{kind}_kernel"))
        gated_delta_gpu.kernel.cache_clear()
        results.append(rule(*given))
    assert all(same_bytes(a, b) for a, b in zip(*results, strict=True))


def test_what_the_kernel_does_not_take_runs_in_plain_mlx(monkeypatch):
    narrow = inputs((1, 2, 4, 24, 16), 3)
    mixed = [x.astype(mx.bfloat16) if i == 1 else x for i, x in enumerate(inputs(SHAPES[0], 3))]
    with monkeypatch.context() as patch:
        patch.setattr(gated_delta_gpu, "kernel", lambda name: pytest.fail(name))
        for given in (narrow, mixed):
            assert all(same_bytes(a, b) for a, b in zip(rule(*given), plain(*given), strict=True))


def test_only_the_plain_rule_is_replaced():
    assert type(swap_gated_delta(GatedDelta())) is KernelGatedDelta
    assert swap_gated_delta(rule) is None and swap_gated_delta(nn.Linear(2, 2)) is None


def test_metal_is_told_not_to_fuse(backend, monkeypatch):
    seen = []
    monkeypatch.setattr(mx.fast, f"{backend}_kernel", lambda *given, **named: seen.append(named))
    gated_delta_gpu.kernel("gated_delta")
    assert seen == [{"header": "#pragma METAL fp contract(off)\n"} if backend == "metal" else {}]


def test_a_device_tries_them_before_a_model_relies_on_them(backend, monkeypatch, tmp_path):
    assert GATED_DELTA.ready() == (True, backend)
    whole = {
        path.name: path.read_text()
        for path in gated_delta_gpu.SHADERS.glob(f"*.{'metal' if backend == 'metal' else 'cu'}")
    }
    monkeypatch.setattr(gated_delta_gpu, "SHADERS", tmp_path)
    for old, new, reason in (
        ("lane * N", "lane", "another result than plain MLX's"),
        ("kept; ++t", "kept - 1; ++t", "a replay that differs from a run"),
        ("size_t cell =", "size_t", "AssertionError: .*kernel.cpp"),
    ):
        for name, text in whole.items():
            (tmp_path / name).write_text(text.replace(old, new))
        gated_delta_gpu.kernel.cache_clear()
        gated_delta_gpu.tried.cache_clear()
        ok, detail = GATED_DELTA.ready()
        assert not ok and re.match(f"gated-delta on {backend}: {reason}", detail), detail


@pytest.mark.parametrize("backend", ["metal"], indirect=True)
class TestDeltaStateOnTheKernels(StateContract):
    batch_level = "bitwise"
    capabilities = {"batch", "recurrent", "conv"}
    lengths = (0, 5, 9)

    @pytest.fixture
    def make_state(self):
        return DeltaState

    @pytest.fixture
    def feed(self):
        feed = GatedDeltas(key_heads=1, value_heads=2, value_width=6)
        feed.rule = KernelGatedDelta()
        return feed
