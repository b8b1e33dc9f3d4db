"""The acceptance laws themselves: exact by enumeration, and by 50,000 draws of the vectorised functions."""

from __future__ import annotations

import itertools
import math
import random

import mlx.core as mx
import pytest

from mlx_spec.laws import (
    accept_coupled,
    accept_greedy,
    accept_ratio,
    accept_rejection,
    fit_width,
    prefix_length,
    residual,
    sane_q,
)
from mlx_spec.noise import gumbel, uniform


def distribution(rng: random.Random, size: int, zeros: int = 0) -> list[float]:
    weights = [rng.random() ** 2 + 0.02 for _ in range(size)]
    for i in rng.sample(range(size), zeros):
        weights[i] = 0.0
    return [w / sum(weights) for w in weights]


def one_step(p: list[float], q: list[float]) -> list[tuple[int, bool, list[float], float]]:
    """Per draft token of q's support: (token, -, residual, accept probability), from the functions under test."""
    ratio = accept_ratio(mx.array(p), mx.array(q)).tolist()
    rest = residual(mx.array(p), mx.array(q))
    rest = (rest / rest.sum()).tolist()
    return [(d, True, rest, ratio[d]) for d in range(len(q)) if q[d] > 0]


# -- exact enumeration ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_rejection_emits_p_exactly_for_one_token(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(3, 6)
    p = distribution(rng, size, zeros=seed % 3)
    q = distribution(rng, size, zeros=seed % 2)
    if seed % 4 == 3:  # a point mass is a q like any other
        q = [float(v == rng.randrange(size)) if sum(q) else 0.0 for v in range(size)]
        q = q if sum(q) == 1 else [1.0] + [0.0] * (size - 1)
    emitted = [0.0] * size
    for d, _, rest, accept in one_step(p, q):
        emitted[d] += q[d] * accept
        for x in range(size):
            emitted[x] += q[d] * (1 - accept) * rest[x]
    assert emitted == pytest.approx(p, abs=1e-6)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("kind", ["chain", "block", "point"])
def test_rejection_emits_the_law_of_whole_sequences_exactly(depth: int, kind: str) -> None:
    """p depends on the prefix; q is a chain, or marginals that ignore the prefix, or one fixed guess."""
    size, drafted = 3, 2
    rng = random.Random(depth * 10 + len(kind))
    prefixes = [pre for n in range(depth + 1) for pre in itertools.product(range(size), repeat=n)]
    p = {pre: distribution(rng, size) for pre in prefixes}
    marginal = [distribution(rng, size) for _ in range(drafted)]
    q = {
        pre: marginal[len(pre)] if kind == "block" else distribution(rng, size)
        for pre in prefixes
        if len(pre) < drafted
    }
    if kind == "point":
        q = {pre: [float(v == 1) for v in range(size)] for pre in q}
    steps = {pre: one_step(p[pre], q[pre]) for pre in q}
    emitted: dict[tuple[int, ...], float] = {}

    def finish(prefix: tuple[int, ...], weight: float) -> None:
        """Go on plainly up to `depth` tokens."""
        if len(prefix) >= depth:
            emitted[prefix[:depth]] = emitted.get(prefix[:depth], 0.0) + weight
            return
        for x in range(size):
            finish((*prefix, x), weight * p[prefix][x])

    def verify(prefix: tuple[int, ...], weight: float) -> None:
        if len(prefix) == drafted:
            finish(prefix, weight)  # the bonus token is the first plain one
            return
        for d, _, rest, accept in steps[prefix]:
            verify((*prefix, d), weight * q[prefix][d] * accept)
            for x in range(size):
                finish((*prefix, x), weight * q[prefix][d] * (1 - accept) * rest[x])

    verify((), 1.0)
    for sequence in itertools.product(range(size), repeat=depth):
        want = math.prod(p[sequence[:i]][x] for i, x in enumerate(sequence))
        assert emitted[sequence] == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("point", [False, True])
def test_the_accept_test_integrates_to_its_ratio_on_a_grid_of_uniforms(seed: int, point: bool) -> None:
    rng = random.Random(seed)
    p, q = distribution(rng, 5, zeros=1), distribution(rng, 5)
    grid = 400
    logprobs = mx.broadcast_to(mx.log(mx.array([p, p])), (grid, 2, 5))
    us = mx.array([[(i + 0.5) / grid] for i in range(grid)])
    for d in range(5):
        draft = mx.full((grid, 1), d, dtype=mx.int32)
        given = None if point else mx.broadcast_to(mx.array([[q]]), (grid, 1, 5))
        accepted, tokens, _ = accept_rejection(logprobs, given, draft, [1] * grid, us, mx.zeros((grid, 5)))
        want = p[d] if point else min(1.0, p[d] / q[d])
        assert accepted.sum().item() == pytest.approx(want * grid, abs=1)
        # with zero noise the own token is the most likely one of the residual, never the refused point mass
        refused = [row[0] for row, a in zip(tokens.tolist(), accepted.tolist(), strict=True) if a == 0]
        rest = (
            [v * (i != d) for i, v in enumerate(p)] if point else [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        )
        assert all(token == max(range(5), key=rest.__getitem__) for token in refused)


# -- 50,000 draws of the vectorised function ------------------------------------------------------------


def frequencies_fit(ids: mx.array, p: list[float]) -> bool:
    n = ids.size
    counts = [(ids == v).sum().item() for v in range(len(p))]
    assert all(c == 0 for c, v in zip(counts, p, strict=True) if v == 0)
    live = [(c, v) for c, v in zip(counts, p, strict=True) if v > 0]
    value = sum((c - n * v) ** 2 / (n * v) for c, v in live)
    df = len(live) - 1
    return value < df + 4 * math.sqrt(2 * df) + 4


@pytest.mark.parametrize("case", ["q", "narrow q", "report 34"])
def test_rejection_draws_follow_p_at_every_depth(case: str) -> None:
    rng = random.Random(8)
    n, size, drafted = 50_000, 5, 2
    p = [distribution(rng, size, zeros=i % 2) for i in range(3)]
    wide = 4 if case == "narrow q" else size
    q = [distribution(rng, wide) for _ in range(drafted)]
    rows = list(range(n))
    if case in ("q", "narrow q"):
        noise = gumbel([1], [list(range(n * drafted))], "draft", wide)[0].reshape(n, drafted, wide)
        draft = mx.argmax(mx.log(mx.array(q)) + noise, axis=-1).astype(mx.int32)
        given = mx.broadcast_to(mx.array(q), (n, drafted, wide))
    else:  # report 34: the drafter always proposes its favourite, a point mass
        best = [sorted(range(size), key=p[i].__getitem__)[-2] for i in range(drafted)]  # not the target's own
        draft, given = mx.broadcast_to(mx.array(best, dtype=mx.int32), (n, drafted)), None
    counts = [(2, 1, 0, 2, 2)[b % 5] for b in rows]
    us = uniform([2] * n, [[3 * b, 3 * b + 1] for b in rows])
    own = gumbel([3], [rows], "residual", size)[0]
    logprobs = mx.broadcast_to(mx.log(mx.array(p)), (n, 3, size))
    accepted, tokens, faulty = accept_rejection(logprobs, given, draft, counts, us, own)
    assert not faulty.any().item()
    assert (accepted <= mx.array(counts)).all().item()
    assert frequencies_fit(tokens[:, 0], p[0])
    lengths = accepted.tolist()
    for depth in (1, 2):  # p of a depth does not depend on the prefix here, so this condition does not bias it
        reached = mx.array([b for b in rows if lengths[b] >= depth])
        assert reached.size > 500
        assert frequencies_fit(tokens[reached][:, depth], p[depth])


def test_report_36_frequencies_follow_the_temperature_and_replay() -> None:
    logits = mx.array([0.0, 1.0, 2.0])
    for temperature in (0.25, 2.0):
        p = mx.softmax(logits / temperature).tolist()
        noise = gumbel([5], [list(range(20_000))], "token", 3)[0]
        ids = mx.argmax(mx.log(mx.array(p)) + noise, axis=-1)
        assert frequencies_fit(ids, p)
        again = gumbel([5], [list(range(20_000))], "token", 3)[0]
        assert mx.array_equal(ids, mx.argmax(mx.log(mx.array(p)) + again, axis=-1))


# -- greedy and prefix ----------------------------------------------------------------------------------


def test_prefix_length_counts_the_leading_run_within_each_row_s_count() -> None:
    match = mx.array([[True, True, False, True], [True, True, True, True], [False, True, True, True], [True] * 4])
    assert prefix_length(match, [4, 4, 4, 4]).tolist() == [2, 4, 0, 4]
    assert prefix_length(match, [1, 3, 4, 0]).tolist() == [1, 3, 0, 0]
    assert prefix_length(mx.zeros((3, 0), dtype=mx.bool_), [0, 0, 0]).tolist() == [0, 0, 0]


@pytest.mark.parametrize("good", range(5))
def test_greedy_accepts_the_prefix_and_emits_the_target_s_tokens(good: int) -> None:
    target = mx.array([[3, 1, 4, 1, 5]])
    draft = mx.array([[t if i < good else 9 for i, t in enumerate([3, 1, 4, 1])]], dtype=mx.int32)
    accepted, tokens = accept_greedy(target, draft, [4])
    assert accepted.tolist() == [good] and tokens.tolist() == [[3, 1, 4, 1, 5]]
    broken = mx.array([[True, True, False, True, True]])
    assert accept_greedy(target, draft, [4], broken)[0].tolist() == [min(good, 2)]


def test_report_29_a_favoured_draft_the_target_does_not_prefer_is_refused() -> None:
    logits = mx.log(mx.array([[[0.35, 0.45, 0.2], [0.1, 0.2, 0.7]]]))
    accepted, tokens = accept_greedy(mx.argmax(logits, axis=-1), mx.array([[0]]), [1])
    assert accepted.tolist() == [0] and tokens[0, 0].item() == 1


# -- coupled --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_coupled_tokens_are_those_of_plain_sampling_for_every_draft(seed: int) -> None:
    rng = random.Random(seed)
    mx.random.seed(seed)
    size, drafted = 4, 2
    logprobs = mx.log(mx.array([[distribution(rng, size) for _ in range(drafted + 1)]]))
    noise = gumbel([seed], [[7, 8, 9]], "token", size)
    plain = [mx.argmax(logprobs[0, i] + noise[0, i]).item() for i in range(drafted + 1)]
    for guess in itertools.product(range(-1, size + 1), repeat=drafted):
        accepted, tokens = accept_coupled(logprobs, noise, mx.array([guess], dtype=mx.int32), [drafted])
        a = accepted.item()
        assert tokens.tolist() == [plain]
        assert list(guess[:a]) == plain[:a] and (a == drafted or guess[a] != plain[a])


# -- broken input ---------------------------------------------------------------------------------------


def test_rejection_never_accepts_an_id_outside_the_vocabulary() -> None:
    n, size = 64, 4
    logprobs = mx.broadcast_to(mx.log(mx.array([0.4, 0.3, 0.2, 0.1])), (n, 2, size))
    us = mx.full((n, 1), 1e-6)
    for bad in (-1, 4, 9, 2**31 - 1, -(2**31)):
        draft = mx.full((n, 1), bad, dtype=mx.int32)
        for q in (None, mx.full((n, 1, size), 0.25)):
            accepted, tokens, faulty = accept_rejection(logprobs, q, draft, [1] * n, us, mx.zeros((n, size)))
            assert accepted.tolist() == [0] * n and tokens[:, 0].tolist() == [0] * n  # most likely under p itself
            assert faulty.tolist() == [q is not None] * n


@pytest.mark.parametrize("broken", ["nan", "zero mass", "double mass", "impossible token", "inf"])
def test_a_draft_that_cannot_come_from_its_q_is_not_tested_and_p_draws_instead(broken: str) -> None:
    n, size = 50_000, 3
    p = [0.5, 0.3, 0.2]
    q = {
        "nan": [0.2, math.nan, 0.3],
        "zero mass": [0.0, 0.0, 0.0],
        "double mass": [1.0, 0.5, 0.5],
        "impossible token": [0.5, 0.0, 0.5],
        "inf": [0.1, math.inf, 0.1],
    }[broken]
    logprobs = mx.broadcast_to(mx.log(mx.array(p)), (n, 2, size))
    accepted, tokens, faulty = accept_rejection(
        logprobs,
        mx.broadcast_to(mx.array(q), (n, 1, size)),
        mx.ones((n, 1), dtype=mx.int32),
        [1] * n,
        uniform([1] * n, [[b] for b in range(n)]),
        gumbel([1], [list(range(n))], "residual", size)[0],
    )
    assert faulty.all().item() and accepted.sum().item() == 0
    assert frequencies_fit(tokens[:, 0], p)


def test_faults_behind_a_row_s_count_are_ignored() -> None:
    logprobs = mx.log(mx.full((1, 3, 4), 0.25))
    q = mx.array([[[0.25] * 4, [math.nan] * 4]])
    accepted, tokens, faulty = accept_rejection(
        logprobs, q, mx.array([[2, -5]]), [1], mx.array([[0.5, 0.5]]), mx.array([[0.0, 0.0, 0.0, 1.0]])
    )
    assert accepted.tolist() == [1] and tokens[0, :2].tolist() == [2, 3] and faulty.tolist() == [False]


def test_equal_p_and_q_leave_no_residual_and_p_draws() -> None:
    p = mx.array([[0.25, 0.5, 0.25]])
    assert residual(p, p).tolist() == p.tolist()
    assert residual(p, mx.array([[0.5, 0.5, 0.0]])).tolist() == [[0.0, 0.0, 0.25]]
    # a point mass on the only possible token leaves nothing either
    logprobs = mx.log(mx.array([[[0.0, 1.0], [0.5, 0.5]]]))
    accepted, tokens, _ = accept_rejection(logprobs, None, mx.array([[1]]), [1], mx.array([[0.99]]), mx.zeros((1, 2)))
    assert accepted.tolist() == [1] and tokens[0, 0].item() == 1


def test_accept_ratio_is_zero_for_anything_impossible_or_not_a_number() -> None:
    p = mx.array([0.5, 0.2, 0.0, math.nan, 0.5, 0.5, 0.1])
    q = mx.array([0.25, 0.4, 0.5, 0.5, math.nan, 0.0, 0.1])
    assert accept_ratio(p, q).tolist() == pytest.approx([1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 1.0])


def test_a_q_wider_or_narrower_than_p_is_read_by_id() -> None:
    chosen, honest = sane_q(mx.array([[[0.5, 0.5], [1.0, 0.0]]]), mx.array([[1, 2]]))
    assert chosen[0, 0].item() == 0.5 and honest.tolist() == [[True, False]]
    assert fit_width(mx.array([[1.0, 2.0]]), 4, -1.0).tolist() == [[1.0, 2.0, -1.0, -1.0]]
    assert fit_width(mx.array([[1.0, 2.0]]), 1, -1.0).tolist() == [[1.0]]
    # q has two more ids than p: what it proposes there is refused and the residual is still (p - q)+
    logprobs = mx.log(mx.array([[[0.6, 0.4], [0.5, 0.5]]]))
    q = mx.array([[[0.6, 0.1, 0.2, 0.1]]])
    accepted, tokens, faulty = accept_rejection(
        logprobs, q, mx.array([[3]]), [1], mx.array([[0.01]]), mx.array([[0.0, 0.0]])
    )
    assert accepted.tolist() == [0] and tokens[0, 0].item() == 1 and faulty.tolist() == [False]
