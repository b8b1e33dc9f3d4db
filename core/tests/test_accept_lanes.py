"""One accept for a lane of unlike rows: each row gets what it gets alone, in one packed array."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest

from mlx_spec.accept import AcceptResult, GreedyBlock, GreedyStep, RowPlan, RowResult, accept
from mlx_spec.drawing import Drawer
from mlx_spec.noise import gumbel
from mlx_spec.processors import History
from mlx_spec.sampling import Sampling
from mlx_spec.shaping import logprobs_of, shape_logprobs
from mlx_spec.types import Draft

B, K, V = 6, 3, 23
L = K + 1


def force_five(tokens: mx.array, logits: mx.array) -> mx.array:
    """A processor in mlx-lm's form that writes into what it is given."""
    if tokens.size == 14:
        logits[:, :] = -math.inf
        logits[:, 5] = 0.0
    return logits


LANE = [
    Sampling(),
    Sampling(temperature=0.8, top_k=9),
    Sampling(temperature=0.8, top_p=0.9, seed=5),
    Sampling(temperature=0.8, top_k=9, logprobs=2),
    Sampling(repetition_penalty=1.3, logit_bias={4: 0.5}, logprobs=4),
    Sampling(temperature=1.5, seed=6, processors=(force_five,), min_tokens=9),
]


def lane(settings: list[Sampling]) -> list[RowPlan]:
    return [
        RowPlan(s, s.seed if s.seed is not None else 100 + b, 12 + b, History(list(range(12 + b)), 2, (3, 7)))
        for b, s in enumerate(settings)
    ]


def empty_draft(rows: int) -> Draft:
    return Draft(mx.zeros((rows, 0), dtype=mx.int32), [0] * rows)


def part(draft: Draft, b: int) -> Draft:
    counts = None if draft.counts is None else [draft.counts[b]]
    probs = None if draft.probs is None else draft.probs[b : b + 1]
    return Draft(draft.tokens[b : b + 1], counts, probs)


def drafted(plan: list[RowPlan], logits: mx.array, noise: float = 0.3, vocab: int = V) -> Draft:
    """What a drafter close to the target proposes through `draw`."""
    draw = Drawer(plan, V)
    steps = [draw((logits[:, i] + noise * mx.random.normal(logits[:, i].shape))[:, :vocab], i) for i in range(K)]
    probs = None if steps[0][1] is None else mx.stack([q for _, q in steps], axis=1)
    return Draft(mx.stack([t for t, _ in steps], axis=1), None, probs)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_each_row_of_a_mixed_lane_equals_its_solo_result_byte_for_byte(seed: int, tied: bool) -> None:
    mx.random.seed(seed)
    plan = lane(LANE)
    logits = mx.random.normal((B, L, V)) * 2
    logits = mx.round(logits) if tied else logits  # as half precision does with larger ones
    draft = drafted(plan, logits)
    draft.counts = [3, 2, 3, 1, 3, 0]
    together = accept(plan, logits, draft)
    found = together.read()
    for b in range(B):
        solo = accept(plan[b : b + 1], logits[b : b + 1], part(draft, b))
        assert solo.read() == [found[b]]
        assert found[b].accepted <= draft.counts[b] and len(found[b].tokens) == found[b].accepted + 1
        assert found[b].draft_ids == draft.tokens[b].tolist()[: draft.counts[b]]
        assert found[b].tokens[: found[b].accepted] == found[b].draft_ids[: found[b].accepted]
    assert together.next_anchors.tolist() == [row.tokens[-1] for row in found]
    assert [row.logprobs is None for row in found] == [True, True, True, False, False, True]


@pytest.mark.parametrize("seed", range(4))
def test_draws_of_a_mixed_lane_equal_solo_draws_byte_for_byte(seed: int) -> None:
    mx.random.seed(seed)
    plan = lane(LANE)
    logits = [mx.random.normal((B, V - 4)) for _ in range(K)]
    draw = Drawer(plan, V, V - 1)
    steps = [draw(logits[i], i) for i in range(K)]
    for b in range(B):
        alone = Drawer(plan[b : b + 1], V, V - 1)
        for i in range(K):
            token, q = alone(logits[i][b : b + 1], i)
            assert token.tolist() == steps[i][0][b : b + 1].tolist()
            together = steps[i][1][b : b + 1]
            assert mx.array_equal(together, q if q is not None else mx.zeros((1, V - 1)))
            assert 0 <= token.item() < V - 4  # ids the drafter does not have are impossible
        assert (alone(logits[0][b : b + 1], 0)[1] is not None) == (plan[b].settings.law == "rejection")


def test_shared_noise_makes_a_perfect_drafter_s_coupled_and_greedy_drafts_all_accepted() -> None:
    mx.random.seed(1)
    settings = [s for s in LANE if s.law != "rejection"]
    plan = lane(settings)
    logits = mx.random.normal((len(plan), L, V)) * 2
    draft = drafted(plan, logits, noise=0.0)
    assert draft.probs is None
    assert [row.accepted for row in accept(plan, logits, draft).read()] == [K] * len(plan)


def test_a_perfect_drafter_is_fully_accepted_under_rejection() -> None:
    mx.random.seed(2)
    plan = [RowPlan(Sampling(temperature=1.3, top_p=0.9), b, 40) for b in range(50)]
    logits = mx.random.normal((50, L, V)) * 2
    draft = drafted(plan, logits, noise=0.0)
    assert [row.accepted for row in accept(plan, logits, draft).read()] == [K] * 50


@pytest.mark.parametrize("seed", range(4))
def test_coupled_rows_emit_plain_sampling_s_tokens_whatever_is_drafted(seed: int) -> None:
    mx.random.seed(seed)
    settings = Sampling(temperature=0.9, top_k=8, top_p=0.95, min_p=0.01, seed=seed)
    plan = [RowPlan(settings, seed, 30)]
    logits = mx.random.normal((1, L, V)) * 2
    plain = []
    for i in range(L):  # plain decoding: one row, nothing drafted
        step = accept([RowPlan(settings, seed, 30 + i)], logits[:, i : i + 1], Draft(mx.zeros((1, 0), dtype=mx.int32)))
        plain += step.read()[0].tokens
    for good in range(L):
        guess = [t if i < good else (t + 1) % V for i, t in enumerate(plain[:K])]
        row = accept(plan, logits, Draft(mx.array([guess], dtype=mx.int32))).read()[0]
        assert row.accepted == min(good, K) and row.tokens == plain[: row.accepted + 1]


def test_mixed_rows_end_to_end_follow_p_over_50_000_rows() -> None:
    """Drawer and accept together, q unlike p, unequal counts; every row has its own position, so its own noise."""
    mx.random.seed(3)
    n, size = 50_000, 5
    settings = Sampling(temperature=0.8, top_k=4)
    plan = [RowPlan(settings, 9, 10 * b) for b in range(n)]
    target, drafter = mx.random.normal((3, size)), mx.random.normal((2, size))
    draw = Drawer(plan, size)
    steps = [draw(mx.broadcast_to(drafter[i], (n, size)), i) for i in range(2)]
    draft = Draft(
        mx.stack([t for t, _ in steps], axis=1),
        [(2, 0, 1)[b % 3] for b in range(n)],
        mx.stack([q for _, q in steps], axis=1),
    )
    result = accept(plan, mx.broadcast_to(target, (n, 3, size)), draft)
    p = mx.exp(shape_logprobs(target, settings)).tolist()
    lengths = result.accepted.tolist()
    for depth in range(3):
        reached = mx.array([b for b in range(n) if lengths[b] >= depth])
        ids = result.tokens[reached][:, depth]
        counts = [(ids == v).sum().item() for v in range(size)]
        m = reached.size
        assert m > 2000
        assert counts[p[depth].index(0.0)] == 0  # the id top_k removed
        value = sum((c - m * v) ** 2 / (m * v) for c, v in zip(counts, p[depth], strict=True) if v)
        assert value < 16.3  # df 3, p = 0.001


# -- the shape of the answer ----------------------------------------------------------------------------


@pytest.mark.parametrize("law", [{"temperature": 1.0}, {"temperature": 1.0, "seed": 3}, {"frequency_penalty": 0.2}])
def test_plain_rows_need_no_draft(law: dict[str, float]) -> None:
    mx.random.seed(4)
    plan = lane([Sampling(**law)] * 3)
    logits = mx.random.normal((3, 1, V))
    result = accept(plan, logits, Draft(mx.zeros((3, 0), dtype=mx.int32), [0, 0, 0]))
    assert isinstance(result, AcceptResult) and result.packed.shape == (3, 3) and result.packed.dtype == mx.int32
    found = result.read()
    assert [(r.accepted, r.draft_ids, len(r.tokens)) for r in found] == [(0, [], 1)] * 3
    assert result.next_anchors.tolist() == [r.tokens[0] for r in found]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("limit", [None, V, V - 2])
def test_a_plain_greedy_step_says_what_the_general_path_says(dtype: mx.Dtype, limit: int | None) -> None:
    """Rows of it: three usable ones, then NaN, +inf, nothing but -inf, and the best id in the padding."""
    mx.random.seed(6)
    logits = mx.random.normal((7, 1, V)).astype(dtype)
    logits[3, 0, 1], logits[4, 0, 2], logits[5] = math.nan, math.inf, -math.inf
    logits[6, 0, V - 1] = 9.0
    empty = Draft(mx.zeros((7, 0), dtype=mx.int32), [0] * 7)
    step = accept(lane([Sampling()] * 7), logits, empty, limit)
    general = accept(lane([Sampling(logprobs=0)] * 7), logits, empty, limit)
    assert isinstance(step, GreedyStep) and isinstance(general, AcceptResult)
    found, wanted = step.read(), general.read()
    assert [(r.tokens, r.accepted, r.error) for r in found] == [(r.tokens, r.accepted, r.error) for r in wanted]
    assert [bool(r.error) for r in found] == [False] * 3 + [True] * 3 + [False]
    assert (found[6].tokens == [V - 1]) == (limit != V - 2)
    assert step.next_anchors.dtype == mx.int32
    assert step.next_anchors.tolist()[:3] == general.next_anchors.tolist()[:3]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("limit", [None, V - 2])
def test_a_greedy_block_says_what_the_general_path_says(dtype: mx.Dtype, limit: int | None) -> None:
    """Drafts right up to each place, short ones, ids outside the vocabulary, and broken rows before and behind."""
    mx.random.seed(8)
    settings, rows = [Sampling()] * 12, 12
    logits = mx.random.normal((rows, L, V)).astype(dtype)
    right = accept(lane(settings), logits, Draft(mx.zeros((rows, K), dtype=mx.int32)), limit)
    drafts = [r[:K] for r in right.ids.tolist()]
    for b in range(K):
        drafts[b][b] = (drafts[b][b] + 1) % 9
    drafts[4][1], drafts[5][0], drafts[6][2] = V - 1, -3, 10**6
    logits[7, 0, 3], logits[8, 2, 3], logits[9, K], logits[10, 1, 0] = math.nan, math.inf, -math.inf, math.nan
    counts = [K, K, K, K, K, K, K, K, K, K, 1, 0]
    draft = Draft(mx.array(drafts, dtype=mx.int32), counts)
    block = accept(lane(settings), logits, draft, limit)
    general = accept(lane([Sampling(logprobs=0)] * rows), logits, draft, limit)
    assert isinstance(block, GreedyBlock) and isinstance(general, AcceptResult)

    def told(results: list[RowResult]) -> list[tuple[object, ...]]:
        return [(r.tokens, r.accepted, r.draft_ids, r.draft_fault, r.error) for r in results]

    block.start()
    found = told(block.read())
    assert found == told(general.read())
    assert [f[1] for f in found] == [0, 1, 2, K, 1, 0, 2, 0, 2, K, 1, 0]
    assert [bool(f[4]) for f in found] == [False] * 7 + [True] * 4 + [False]


def test_logprobs_travel_in_the_same_array_and_describe_the_processed_logits() -> None:
    mx.random.seed(5)
    settings = [
        Sampling(logprobs=0),
        Sampling(temperature=0.7, top_k=2, seed=1, logprobs=3),
        Sampling(),
        Sampling(logprobs=20),
    ]
    plan = lane(settings)
    logits = mx.random.normal((4, L, V))
    draft = drafted(plan, logits, noise=0.1)
    result = accept(plan, logits, draft)
    assert result.packed.shape == (4, L + 2 + K + L * (1 + 2 * 20))
    want = logprobs_of(logits).tolist()
    for b, row in enumerate(result.read()):
        asked = settings[b].logprobs
        if asked is None:
            assert row.logprobs is None
            continue
        assert len(row.logprobs) == len(row.tokens)
        for i, (token, value, top) in enumerate(row.logprobs):
            assert token == row.tokens[i] and value == pytest.approx(want[b][i][token], abs=1e-6)
            best = sorted(want[b][i], reverse=True)[:asked]
            assert [v for _, v in top] == pytest.approx(best, abs=1e-6)
            assert [want[b][i][t] for t, _ in top] == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("n", [1, 3, 20])
def test_equal_alternatives_come_in_the_order_of_their_ids(n: int) -> None:
    """However many the lane asks for, and the first one is the greedy token."""
    mx.random.seed(n)
    logits = mx.round(mx.random.normal((9, 1, V)) * 2).astype(mx.bfloat16)
    logits[:, :, 3] = -math.inf
    plan = lane([Sampling(logprobs=n)] * 9)
    for row, values in zip(accept(plan, logits, empty_draft(9)).read(), logits[:, 0].tolist(), strict=True):
        ids = [t for t, _ in row.logprobs[0][2]]
        assert ids == sorted(range(V), key=lambda t: (-values[t], t))[:n]
        assert ids[0] == row.tokens[0]


def test_more_alternatives_than_tokens_is_no_error() -> None:
    plan = [RowPlan(Sampling(logprobs=20))]
    row = accept(plan, mx.array([[[0.0, 1.0, 2.0]]]), empty_draft(1)).read()[0]
    assert [t for t, _ in row.logprobs[0][2]] == [2, 1, 0]


# -- faults ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", [{}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 3}])
@pytest.mark.parametrize("bad", range(L))
@pytest.mark.parametrize("what", ["nan", "all nan", "inf", "nothing"])
def test_report_38_broken_logits_end_one_row_at_the_row_they_are_used(
    law: dict[str, float], bad: int, what: str
) -> None:
    mx.random.seed(bad)
    plan = lane([Sampling(**law)] * 3)
    logits = mx.random.normal((3, L, V)) * 3
    clean = accept(plan, logits, drafted(plan, logits, 0.0))
    draft = drafted(plan, logits, 0.0)
    broken = logits + 0
    if what == "nan":
        broken[1, bad, 7] = math.nan
    else:
        broken[1, bad] = {"all nan": math.nan, "inf": math.inf, "nothing": -math.inf}[what]
    found = accept(plan, broken, draft).read()
    assert found[0] == clean.read()[0] and found[2] == clean.read()[2]
    assert found[1].accepted == bad and found[1].tokens == clean.read()[1].tokens[:bad]
    assert found[1].error.startswith("target logits: found NaN")


@pytest.mark.parametrize("law", [{}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 3}])
def test_broken_logits_behind_a_refused_draft_do_not_matter(law: dict[str, float]) -> None:
    mx.random.seed(6)
    logits = mx.random.normal((1, L, V))
    logits[0, 0, 2] = -math.inf
    logits[0, 1:] = math.nan
    row = accept(lane([Sampling(**law)]), logits, Draft(mx.full((1, K), 2, dtype=mx.int32))).read()[0]
    assert (row.error, row.accepted, len(row.tokens)) == ("", 0, 1) and row.tokens[0] != 2


@pytest.mark.parametrize("law", [{}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 3}])
@pytest.mark.parametrize("bad", [-1, V, 2**31 - 1])
def test_drafted_ids_outside_the_vocabulary_are_refused_and_named(law: dict[str, float], bad: int) -> None:
    mx.random.seed(7)
    plan = lane([Sampling(**law)] * 2)
    logits = mx.random.normal((2, L, V))
    draft = drafted(plan, logits, 0.0)
    draft.tokens = mx.where(mx.arange(K) == mx.array([[1], [9]]), bad, draft.tokens)
    found = accept(plan, logits, draft).read()
    assert found[0].accepted == 1 and len(found[0].tokens) == 2
    assert found[0].draft_fault == f"drafted id {bad} is outside 0..{V - 1}" and found[0].error == ""
    assert found[1].draft_fault == "" and found[1].accepted == K


def test_a_broken_q_costs_only_acceptance_and_is_named() -> None:
    mx.random.seed(8)
    plan = lane([Sampling(temperature=1.0), Sampling(temperature=1.0), Sampling()])
    logits = mx.random.normal((3, L, V))
    draft = drafted(plan, logits, 0.0)
    draft.probs = mx.where(mx.arange(3)[:, None, None] == 0, math.nan, draft.probs)
    found = accept(plan, logits, draft).read()
    assert found[0].accepted == 0 and "cannot have been drawn" in found[0].draft_fault and found[0].error == ""
    assert [row.accepted for row in found[1:]] == [K, K] and [row.draft_fault for row in found[1:]] == ["", ""]


@pytest.mark.parametrize("law", [{}, {"temperature": 1.0}, {"temperature": 50.0, "seed": 3}])
def test_padding_ids_are_neither_drawn_nor_accepted_nor_reported(law: dict[str, float]) -> None:
    """Reports 130 and 134: huge logits planted in the padding rows of target and drafter."""
    mx.random.seed(9)
    limit = V - 5
    plan = [RowPlan(Sampling(**law, logprobs=20), b, 50) for b in range(40)]
    planted = mx.where(mx.arange(V) >= limit, 1e4, mx.random.normal((40, L, V)))
    draw = Drawer(plan, V, limit)
    steps = [draw(planted[:, i], i) for i in range(K)]
    assert all((t < limit).all().item() for t, _ in steps)
    probs = None if steps[0][1] is None else mx.stack([q for _, q in steps], axis=1)
    draft = Draft(mx.stack([t for t, _ in steps], axis=1), None, probs)
    for row in accept(plan, planted, draft, limit).read():
        assert row.accepted == K and max(row.tokens) < limit
        assert max(t for _, _, top in row.logprobs for t, _ in top) < limit
        assert all(value > -50 for _, value, _ in row.logprobs)
    forced = Draft(mx.full((40, K), limit, dtype=mx.int32))
    for row in accept(plan, planted, forced, limit).read():
        assert row.accepted == 0 and row.tokens[0] < limit and f"outside 0..{limit - 1}" in row.draft_fault


def test_a_failing_processor_ends_its_own_row_and_only_when_its_position_is_used() -> None:
    mx.random.seed(10)

    def fussy(tokens: mx.array, logits: mx.array) -> mx.array:
        if tokens.size >= 14:
            raise KeyError("state")
        return logits

    plan = lane([Sampling(), Sampling(processors=(fussy,)), Sampling()])
    plan[1] = RowPlan(plan[1].settings, 1, 12, History(list(range(12))))
    logits = mx.random.normal((3, L, V))
    best = mx.argmax(logits, axis=-1)[:, :K].astype(mx.int32)
    found = accept(plan, logits, Draft(best)).read()
    assert [row.error for row in (found[0], found[2])] == ["", ""] and found[0].accepted == K
    assert found[1].error.startswith("logits processor fussy: found KeyError") and found[1].accepted == 2
    wrong = mx.where(mx.arange(K) == 0, (best + 1) % V, best)
    assert accept(plan, logits, Draft(wrong)).read()[1] == RowResult([best[1, 0].item()], 0, wrong[1].tolist())
    # the drafter guesses without the processor, and the guess is still the row's own
    draw = Drawer(plan, V)
    assert [draw(logits[:, i], i)[0][1].item() for i in range(K)] == best[1].tolist()


def test_draws_out_of_order_are_refused() -> None:
    draw = Drawer(lane([Sampling()]), V)
    with pytest.raises(ValueError, match="step 1: found 0 earlier steps"):
        draw(mx.zeros((1, V)), 1)


def test_a_coupled_draft_uses_the_noise_of_the_position_it_is_drawn_for() -> None:
    mx.random.seed(11)
    logits = mx.random.normal((1, V))
    plan = [RowPlan(Sampling(temperature=1.0, seed=4), 4, 77)]
    draw = Drawer(plan, V)
    tokens = [draw(logits, i)[0].item() for i in range(K)]
    noise = gumbel([4], [[77, 78, 79]], "token", V)[0]
    assert tokens == mx.argmax(logprobs_of(logits) + noise, axis=-1).tolist()


def test_rejection_draws_drafts_and_own_tokens_from_streams_of_their_own() -> None:
    """One stream for both would make the own token depend on the refused draft."""
    mx.random.seed(12)
    logits = mx.random.normal((1, 1, V))
    plan = [RowPlan(Sampling(temperature=1.0), 4, 77)]
    logprobs = logprobs_of(logits[0, 0])
    by_stream = {
        s: mx.argmax(logprobs + gumbel([4], [[77]], s, V)[0, 0]).item() for s in ("token", "draft", "residual")
    }
    assert len(set(by_stream.values())) == 3
    assert Drawer(plan, V)(logits[:, 0], 0)[0].item() == by_stream["draft"]
    own = accept(plan, logits, Draft(mx.zeros((1, 0), dtype=mx.int32))).read()[0].tokens
    assert own == [by_stream["residual"]]


def test_a_step_drawn_again_replaces_what_was_drawn_before() -> None:
    settings = Sampling(presence_penalty=9.0)
    draw = Drawer([RowPlan(settings, 0, 1, History([0]))], 4)
    first, second = mx.array([[0.0, 5.0, 1.0, 2.0]]), mx.array([[0.0, 1.0, 5.0, 4.0]])
    assert [draw(first, 0)[0].item(), draw(first, 1)[0].item()] == [1, 3]
    assert [draw(second, 0)[0].item(), draw(second, 1)[0].item(), draw(second, 2)[0].item()] == [2, 3, 1]
