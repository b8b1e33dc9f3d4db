"""Filters and temperature: the kept set is mlx-lm's, and no input makes them fail."""

from __future__ import annotations

import math
from collections.abc import Iterator

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from mlx_spec.sampling import Sampling
from mlx_spec.shaping import assemble, greedy_ids, logprobs_of, shape_logprobs, shape_rows

CHAIN = [(0.9, 0.0, 0), (1.0, 0.1, 0), (1.0, 0.0, 7), (0.72, 0.0, 3), (0.95, 0.05, 20), (0.5, 0.5, 1), (1e-6, 0.0, 0)]


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """mlx-lm compiles its filters anew for every constant, seconds each; the numbers are the same without."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def kept_by_mlx_lm(logits: mx.array, top_p: float, min_p: float, top_k: int) -> mx.array:
    logprobs = logits - mx.logsumexp(logits, keepdims=True)
    if 0 < top_p < 1:
        logprobs = apply_top_p(logprobs, top_p)
    if min_p:
        logprobs = apply_min_p(logprobs, min_p)
    if top_k:
        logprobs = apply_top_k(logprobs, top_k)
    return logprobs > -math.inf


@pytest.mark.parametrize("chain", CHAIN)
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_kept_set_and_probabilities_are_those_of_mlx_lm(chain: tuple[float, float, int], scale: float) -> None:
    top_p, min_p, top_k = chain
    mx.random.seed(hash((chain, scale)) % 1000)
    logits = mx.random.normal((3, 4, 101)) * scale
    settings = Sampling(temperature=0.7, top_p=top_p, min_p=min_p, top_k=top_k)
    shaped = shape_logprobs(logits, settings)
    for b in range(3):
        for i in range(4):
            row = logits[b, i][None]
            kept = kept_by_mlx_lm(row, top_p, min_p, top_k)
            assert mx.array_equal(shaped[b, i][None] > -math.inf, kept)
            want = mx.softmax(mx.where(kept, row, -math.inf) / 0.7, axis=-1)
            assert mx.allclose(mx.exp(shaped[b, i])[None], want, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_ties_in_top_p_stay_together_and_ties_in_top_k_are_exactly_k(seed: int) -> None:
    mx.random.seed(seed)
    logits = mx.random.randint(0, 4, (6, 40)).astype(mx.float32)
    kept = shape_logprobs(logits, Sampling(temperature=1.0, top_p=0.6)) > -math.inf
    for i in range(6):
        assert mx.array_equal(kept[i : i + 1], kept_by_mlx_lm(logits[i : i + 1], 0.6, 0.0, 0))
    shaped = shape_logprobs(logits, Sampling(temperature=1.0, top_k=5))
    assert (shaped > -math.inf).sum(axis=-1).tolist() == [5] * 6
    best = mx.sort(logits, axis=-1)[:, -5:].sum(axis=-1)
    assert mx.array_equal(mx.where(shaped > -math.inf, logits, 0).sum(axis=-1), best)


def test_report_42_joint_filters_keep_one_set_whatever_the_order_of_fields() -> None:
    logits = mx.log(mx.array([[0.4, 0.3, 0.15, 0.1, 0.05]]))
    for settings in (Sampling(temperature=1.0, top_k=3, top_p=0.72), Sampling(top_p=0.72, top_k=3, temperature=1.0)):
        # 0.4 + 0.3 = 0.7 < 0.72, so the third token is still needed
        assert (shape_logprobs(logits, settings) > -math.inf).tolist() == [[True, True, True, False, False]]


@pytest.mark.parametrize(
    "settings", [{"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6, "top_k": 1, "min_p": 1.0}]
)
def test_report_38_the_best_finite_token_always_stays(settings: dict[str, float]) -> None:
    never, nan, inf = -math.inf, math.nan, math.inf
    rows = [[never, never, 2.0, never], [nan, 1.0, 3.0, nan], [0.0, 1.0, 2.0, inf], [-80.0, -90.0, 1e30, -1e30]]
    shaped = shape_logprobs(mx.array(rows), Sampling(temperature=0.8, **settings))
    assert (shaped > never).tolist() == [[False, False, True, False]] * 4
    assert mx.allclose(shaped[:, 2], mx.zeros(4))
    equal = shape_logprobs(mx.zeros((1, 4)), Sampling(temperature=0.8, **settings))
    assert 1 <= (equal > never).sum().item() <= 4 and math.isclose(mx.exp(equal).sum().item(), 1.0, abs_tol=1e-6)


def test_a_row_without_any_finite_logit_stays_without_mass() -> None:
    rows = mx.array([[math.nan] * 3, [-math.inf] * 3])
    assert (shape_logprobs(rows, Sampling(temperature=1.0, top_p=0.5, top_k=1)) == -math.inf).all()
    assert (logprobs_of(rows) == -math.inf).all()


@pytest.mark.parametrize("temperature", [0.25, 2.0, 0.0011, 100.0])
def test_temperature_applies_after_the_filters_and_the_result_is_normalised(temperature: float) -> None:
    mx.random.seed(3)
    logits = mx.random.normal((2, 3, 17))
    shaped = shape_logprobs(logits, Sampling(temperature=temperature))
    assert mx.allclose(mx.exp(shaped), mx.softmax(logits / temperature, axis=-1), atol=1e-6)
    assert mx.array_equal(
        shape_logprobs(logits, Sampling(temperature=temperature, min_p=0.3)) > -math.inf,
        shape_logprobs(logits, Sampling(temperature=1.0, min_p=0.3)) > -math.inf,
    )


def test_rows_with_their_own_settings_equal_the_rows_alone_byte_for_byte() -> None:
    mx.random.seed(4)
    logits = mx.random.normal((5, 2, 33))
    each = [Sampling(temperature=t, top_k=k) for t, k in [(1.0, 3), (0.5, 0), (1.0, 3), (2.0, 40), (0.5, 0)]]
    together = shape_rows(logits, each)
    alone = mx.concatenate([shape_logprobs(logits[b : b + 1], each[b]) for b in range(5)])
    assert mx.array_equal(together, alone)
    assert assemble([([2, 0], mx.array([2, 0])), ([1], mx.array([1]))]).tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_greedy_takes_the_token_mlx_lm_takes_also_where_half_precision_rounds(dtype: mx.Dtype, scale: float) -> None:
    mx.random.seed(5)
    logits = (mx.random.normal((3, 4, 5003)) * scale).astype(dtype)
    want = [[mx.argmax(r[None] - mx.logsumexp(r[None], keepdims=True)).item() for r in row] for row in logits]
    assert greedy_ids(logits).tolist() == want


def test_greedy_in_half_precision_can_differ_from_the_argmax_of_raw_logits() -> None:
    logits = mx.zeros((1, 40_000), dtype=mx.bfloat16)
    logits[0, 9] = 0.02  # rounds away beside a logsumexp of 10.6
    assert mx.argmax(logits, axis=-1).item() == 9
    assert greedy_ids(logits).tolist() == [0]
    assert greedy_ids(logits.astype(mx.float32)).tolist() == [9]


def test_greedy_never_takes_an_id_past_the_limit() -> None:
    logits = mx.array([[[0.0, 1.0, 9.0, 99.0], [3.0, 1.0, 9.0, 99.0]]])
    assert greedy_ids(logits, 2).tolist() == [[1, 0]]
