"""Counter-based noise: a pure function of its key, of good quality, never infinite."""

from __future__ import annotations

import itertools
import math

import mlx.core as mx
import pytest

from mlx_spec.noise import _STREAMS, _gumbel, gumbel, key64, uniform

V = 37


def test_noise_depends_on_seed_position_and_stream_and_on_nothing_else() -> None:
    seeds, positions = [7, 2**63 + 5, 7], [[10, 11], [10, 12], [500, 10]]
    together = gumbel(seeds, positions, "token", V)
    assert together.shape == (3, 2, V) and together.dtype == mx.float32
    mx.random.seed(99)  # the global generator plays no part
    for b, i in itertools.product(range(3), range(2)):
        alone = gumbel([seeds[b]], [[positions[b][i]]], "token", V)
        assert mx.array_equal(together[b, i], alone[0, 0])
    assert mx.array_equal(together[0, 0], together[2, 1])
    assert not mx.array_equal(together[0, 0], together[1, 0])
    assert not mx.array_equal(together[0, 0], gumbel([7], [[10]], "draft", V)[0, 0])
    u = uniform(seeds, positions)
    assert u.shape == (3, 2) and u[0, 0].item() == u[2, 1].item() == uniform([7], [[10]]).item()


def test_all_64_bits_of_a_seed_count_and_negative_ones_are_two_s_complement() -> None:
    seeds = [0, 1, 2**32, 2**63, 2**64 - 2, -1, -(2**63) + 1]
    assert len({key64(seed, 5, "token") for seed in seeds}) == len(seeds)
    assert key64(-1, 5, "token") == key64(2**64 - 1, 5, "token")


def test_nearby_keys_never_collide() -> None:
    keys = [
        key64(seed, position, stream)
        for seed in [*range(40), 2**32, 2**32 + 1, 2**63, -1, -2]
        for position in range(200)
        for stream in _STREAMS
    ]
    assert len(set(keys)) == len(keys)
    assert len({key >> 32 for key in keys}) > 0.99 * len(keys)  # each half is well spread too


def chi_square(counts: list[int], expected: list[float]) -> float:
    return sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))


@pytest.mark.parametrize("stream", ["token", "draft", "residual"])
def test_argmax_of_log_p_plus_noise_follows_p(stream: str) -> None:
    p = [0.45, 0.3, 0.15, 0.07, 0.03]
    n = 40_000
    noise = gumbel([3] * 4, [list(range(b * n // 4, (b + 1) * n // 4)) for b in range(4)], stream, 5)
    ids = mx.argmax(mx.log(mx.array(p)) + noise, axis=-1).reshape(-1)
    counts = [(ids == v).sum().item() for v in range(5)]
    assert chi_square(counts, [n * v for v in p]) < 18.5  # df 4, p = 0.001


def test_uniforms_are_uniform_and_uncorrelated_along_positions_and_seeds() -> None:
    n = 20_000
    u = uniform([11], [list(range(n))])[0]
    counts = [((u >= k / 16) & (u < (k + 1) / 16)).sum().item() for k in range(16)]
    assert chi_square(counts, [n / 16] * 16) < 37.7  # df 15, p = 0.001
    assert u.min().item() > 0.0 and u.max().item() < 1.0
    by_seed = uniform(list(range(n)), [[4]] * n)[:, 0]
    for a, b in ((u[:-1], u[1:]), (by_seed[:-1], by_seed[1:]), (u, by_seed)):
        correlation = ((a - 0.5) * (b - 0.5)).mean().item() * 12
        assert abs(correlation) < 4 / math.sqrt(n)


def test_gumbel_has_the_right_moments_and_neighbouring_keys_are_uncorrelated() -> None:
    g = gumbel([5] * 2, [list(range(40)), list(range(40, 80))], "token", 5000).reshape(80, 5000)
    assert abs(g.mean().item() - 0.5772) < 0.01 and abs(g.var().item() - math.pi**2 / 6) < 0.03
    centred = (g - 0.5772) / math.sqrt(math.pi**2 / 6)
    assert abs((centred[:-1] * centred[1:]).mean().item()) < 0.01


def test_gumbel_is_finite_for_every_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    edge = mx.array([0.0, 2.0**-32, 0.5, 1.0 - 2.0**-24])
    monkeypatch.setattr(mx.random, "uniform", lambda shape, key: edge)
    noise = _gumbel(mx.zeros((1, 2), dtype=mx.uint32), 4)[0].tolist()
    assert all(math.isfinite(g) for g in noise)
    # a small uniform is a large Gumbel: the tail that decides an argmax is the finely resolved one
    assert noise == sorted(noise, reverse=True)
    assert 22 < noise[0] < 24 and -3 < noise[3] < -2.5


def test_no_rows_and_no_positions_give_empty_arrays() -> None:
    assert gumbel([1, 2], [[], []], "token", V).shape == (2, 0, V)
    assert uniform([1, 2], [[], []]).shape == (2, 0)
