"""Draft steps as one operation: a recipe that is repeated, and the assistant whose every token it gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cpu_layers import PACKINGS, Packing, make_layer, raw, refusal

from mlx_spec.accept import RowPlan
from mlx_spec.drawing import Drawer
from mlx_spec.lane import Lane
from mlx_spec.pair import Pair, load
from mlx_spec.sampling import Sampling
from mlx_spec.settings import reset_settings
from mlx_spec.state import StateGroup
from mlx_spec.types import Draft, TapBlock
from mlx_spec_cpu.native import library
from mlx_spec_cpu.operations import layer_reference
from mlx_spec_cpu.recipe import Recipe

VOCAB, WIDTH = 70, 128
DTYPES = [mx.float32, mx.bfloat16, mx.float16]
# rows of fp4 tables are bfloat16, whatever runs
TABLES = [(p, d) for p in PACKINGS for d in DTYPES if "fp4" not in p.mode or d == mx.bfloat16]


def normal(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def step(dtype: mx.Dtype, packing: Packing = PACKINGS[0]) -> Recipe:
    """A token and a hidden state -> the next of both."""
    table = make_layer(packing, dtype, VOCAB, WIDTH, seed=1).arguments
    recipe = Recipe()
    hidden, token = recipe.input(40), recipe.ids()
    x = recipe.join(recipe.embed(token, **table), hidden)
    onward = recipe.norm(recipe.linear(x, weight=normal(40, WIDTH + 40, seed=2, dtype=dtype)), None, 1e-6, 40)
    chosen = recipe.choose(recipe.linear(onward, weight=normal(VOCAB, 40, seed=3, dtype=dtype)))
    recipe.feed(onward, hidden), recipe.feed(chosen, token)
    recipe.output(chosen), recipe.output(onward), recipe.output(onward, 4)
    return recipe


def start(dtype: mx.Dtype) -> list[mx.array]:
    return [normal(1, 1, 40, seed=4, dtype=dtype), mx.array([[17]], mx.int32)]


@pytest.mark.parametrize(("packing", "dtype"), TABLES, ids=str)
def test_a_repeated_recipe_gives_the_bytes_of_single_runs(packing: Packing, dtype: mx.Dtype) -> None:
    program = step(dtype, packing).build(dtype)
    for count, limit in ((1, 0), (2, 3), (7, VOCAB - 9), (10, 0)):
        tokens, hidden, heads = program(*start(dtype), repeat=count, limit=limit)
        assert (tokens.shape, tokens.dtype) == ((1, count), mx.int32)
        assert hidden.shape == (1, count, 40) and heads.shape == (1, 4, count, 10)
        onward, token = start(dtype)
        for i in range(count):
            token, onward, _ = program(onward, token, limit=limit)
            assert token.item() == tokens[0, i].item() < (limit or VOCAB)
            assert raw(onward[0, 0]) == raw(hidden[0, i]) == raw(heads[0, :, i].flatten())


def test_mlx_gives_the_same_tokens() -> None:
    recipe = step(mx.float32)
    program = recipe.build(mx.float32)
    for count, limit in ((1, 0), (8, 0), (8, 20)):
        given = {"repeat": count, "limit": limit}
        found, expected = program(*start(mx.float32), **given), layer_reference(recipe, *start(mx.float32), **given)
        assert found[0].tolist() == expected[0].tolist()
        assert len(set(found[0][0].tolist())) > count // 2
        for a, b in zip(found[1:], expected[1:], strict=True):
            assert a.shape == b.shape and mx.allclose(a, b, atol=1e-4).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_choices_are_the_greedy_ones(dtype: mx.Dtype) -> None:
    """Near ties that half precision makes equal, true ties, NaN and infinity among them; many rows at once."""
    logits = (normal(2, 6, 5000, seed=6) * 0.05 + 14).astype(dtype)
    logits[0, 0], logits[0, 1, 7], logits[1, 0, 4500], logits[1, 2, 30] = 3.0, mx.nan, mx.inf, -mx.inf
    recipe = Recipe()
    recipe.output(recipe.choose(recipe.input(5000)))
    program = recipe.build(dtype)
    for limit in (5000, 4200, 1):
        ids, check = library().greedy(logits, limit)
        usable = mx.isfinite(check)
        assert mx.where(usable, ids - program(logits, limit=limit)[0], 0).tolist() == [[0] * 6] * 2
    assert program(logits)[0].tolist() == program(logits, limit=5000)[0].tolist()


def test_ids_are_looked_up_handed_out_and_fed_and_nothing_else() -> None:
    recipe = Recipe()
    token = recipe.ids()
    recipe.output(token), recipe.output(recipe.embed(token, weight=normal(9, 8)))
    ids = mx.array([[3, 8, -1, 99], [0, 1, 2, -10]], mx.int32)
    same, rows = recipe.build(mx.float32)(ids)
    assert same.tolist() == ids.tolist() and raw(rows[0, 2]) == raw(rows[0, 1])
    assert mx.isnan(rows[0, 3]).all().item() and mx.isnan(rows[1, 3]).all().item()


REFUSED: list[tuple[Callable[[Recipe], Any], str]] = [
    (lambda r: r.norm(r.ids(), None, 1e-5, 1), "register 0: found ids, expected activations"),
    (lambda r: r.choose(r.ids()), "register 0: found ids, expected activations"),
    (lambda r: r.embed(r.input(4), weight=mx.zeros((3, 8))), "register 0: found activations, expected ids"),
    (lambda r: r.embed(r.ids(), weight=mx.zeros((3, 8), mx.int32)), "weights: found int32"),
    (
        lambda r: r.join(r.input(4), r.embed(r.ids(), weight=mx.zeros((3, 8), mx.float16))),
        "registers to join: found float32 and float16",
    ),
    (lambda r: r.feed(r.norm(r.input(4), None, 1e-5, 4), 1), "feed: found float32 of 4 into float32 of 4"),
    (lambda r: r.feed(r.input(4), r.input(4)), "feed: found float32 of 4 into float32 of 4"),
    (lambda r: r.feed(r.choose(r.input(4)), 0), "feed: found int32 of 1 into float32 of 4"),
    (lambda r: r.feed(r.scale(r.input(4, 2), mx.ones((4,))), 0), "feed: found float32 of 4 into float32 of 4"),
]


@pytest.mark.parametrize(("build", "found"), REFUSED)
def test_what_does_not_fit_is_refused_when_it_is_built(build: Callable[[Recipe], Any], found: str) -> None:
    assert refusal(build).startswith(found)


def test_what_does_not_fit_is_refused_when_it_is_called() -> None:
    hidden, token = start(mx.float32)
    program = step(mx.float32).build(mx.float32)
    two = [mx.concatenate([a, a], axis=1) for a in (hidden, token)]
    calls: list[tuple[list[mx.array], dict[str, int], str]] = [
        ([hidden, token.astype(mx.uint32)], {}, "input 1: found uint32 of shape (1,1), expected int32 of shape (1,1)"),
        ([hidden, token[..., None]], {}, "input 1: found int32 of shape (1,1,1)"),
        ([hidden, token], {"repeat": 0}, "repeat: found 0 of 1 times 1 rows"),
        (two, {"repeat": 2}, "repeat: found 2 of 1 times 2 rows"),
        ([hidden, token], {"limit": VOCAB + 1}, "limit: found 71, expected 0 to 70"),
        ([hidden, token], {"limit": -1}, "limit: found -1"),
    ]
    for inputs, given, found in calls:
        with pytest.raises(ValueError, match=".*") as refused:
            program(*inputs, **given)
        assert str(refused.value).startswith(found)


# -- the assistant of Gemma 4 ------------------------------------------------------------------------------


def pair_of(out: Path, dtype: str | None = None, **options: Any) -> Pair:
    from mlx_spec.testing.writers import writer_of

    return load(*map(str, writer_of("gemma4")(out, seed=3, **options)), dtype=dtype)


@pytest.fixture(autouse=True)
def kernels_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPEC_KERNELS", "on")
    reset_settings()


def lane_of(pair: Pair, *committed: int, sampling: Sampling | None = None, limit: int | None = None, **kv: Any) -> Lane:
    """A lane whose rows have so many tokens before their anchor, ready for a draft."""
    groups, last, tokens = [], [], []
    for row, count in enumerate(committed):
        ids = [(7 * i + 5 * row) % 120 + 3 for i in range(count + 1)]
        states = pair.target.make_states(**kv)
        last.append(pair.target.prefill(mx.array([ids[:-1]], mx.int32), states, ("hidden",))["hidden"][:, -1:])
        groups.append(states), tokens.append(ids)
    lane = Lane(pair.target, pair.drafter, StateGroup.merge(groups), pair.drafter.make_state())
    lane.tokens, lane.anchors = tokens, mx.array([ids[-1] for ids in tokens], mx.int32)
    lane.fresh = [TapBlock({"hidden": mx.concatenate(last)}, [1] * len(tokens))]
    plan = [RowPlan(sampling or Sampling(), 0, len(ids)) for ids in tokens]
    lane.bind_draw(Drawer(plan, pair.target.vocab_size, limit, pair.greedy))
    return lane


def drafts(lane: Lane, count: int) -> tuple[Draft, int]:
    """What is drafted, and how often `draw` was asked for it."""
    asked: list[int] = []
    kept = lane._draw

    class Counting(Drawer):
        def __call__(self, logits: mx.array, at: int) -> tuple[mx.array, mx.array | None]:
            asked.append(at)
            return super().__call__(logits, at)

    assert isinstance(kept, Drawer)
    lane.bind_draw(Counting(kept.plan, kept.vocab_size, kept.limit, kept.greedy))
    try:
        return lane.drafter.propose(lane, [count] * lane.size), len(asked)
    finally:
        lane.bind_draw(kept)


def by_steps(lane: Lane, count: int) -> list[list[int]]:
    """The same draft, drawn token by token."""
    kept = lane._draw
    assert kept is not None
    lane.bind_draw(lambda logits, at: kept(logits, at))  # says nothing of how it draws
    try:
        tokens: list[list[int]] = lane.drafter.propose(lane, [count] * lane.size).tokens.tolist()
        return tokens
    finally:
        lane.bind_draw(kept)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        {"quantise": 4},
        {"tied": False, "dtype": "float16"},
        {"variant": "D31"},
    ],
    ids=str,
)
def test_a_draft_of_any_length_is_that_of_single_steps(tmp_path: Path, options: dict[str, Any]) -> None:
    """Before and after the window (8) is full; among all ids and among some."""
    pair = pair_of(tmp_path, **options)
    assert type(pair.drafter.chain).__name__ == "RowGreedyChain"
    some = pair.target.vocab_size // 3
    for committed in (1, 5, 8, 9, 60):
        for limit in (None, some):
            lane = lane_of(pair, committed, limit=limit)
            for count in range(1, 11):
                draft, asked = drafts(lane, count)
                assert asked == 0 and draft.probs is None and draft.counts == [count]
                assert draft.tokens.tolist() == by_steps(lane, count)
                assert limit is None or max(draft.tokens[0].tolist()) < some


def test_what_one_operation_does_not_do_is_left_to_single_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of(tmp_path / "E")
    assert drafts(lane_of(pair, 9), 3)[1] == 0
    for lane in (
        lane_of(pair, 9, 14),
        lane_of(pair, 9, sampling=Sampling(temperature=0.7, seed=3)),
        lane_of(pair, 9, sampling=Sampling(repetition_penalty=1.2)),
        lane_of(pair, 9, kv_bits=8, kv_group_size=32),
        lane_of(pair_of(tmp_path / "ordered", ordered=True), 9),
    ):
        draft, asked = drafts(lane, 3)
        assert asked == 3 and draft.tokens.shape == (lane.size, 3)
    monkeypatch.setenv("MLX_SPEC_KERNELS", "off")
    reset_settings()
    assert drafts(lane_of(pair_of(tmp_path / "off"), 9), 3)[1] == 3


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16"}, {"dtype": "float16", "quantise": 4}, {"variant": "D31"}], ids=str
)
def test_what_the_target_begins_with_has_the_bytes_of_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    model: Any = pair_of(tmp_path, **options).target.model
    inputs = getattr(model, "language_model", model).model._inputs
    plain = next(kind for kind in type(inputs).__mro__ if kind.__name__ == "TextInputs")
    assert type(inputs).__name__ == "RowTextInputs"
    for shape in ((1, 1), (1, 9), (3, 4), (2, 300)):
        tokens = mx.random.randint(0, 120, shape, mx.int32, key=mx.random.key(5))
        expected = plain.__call__(inputs, tokens)
        with monkeypatch.context() as patch:
            patch.setattr(plain, "__call__", None)  # what it may not need
            found = inputs(tokens)
        assert [a.shape for a in found] == [a.shape for a in expected]
        assert [raw(a) for a in found] == [raw(a) for a in expected]
    assert [raw(a) for a in inputs(tokens.astype(mx.uint32))] == [raw(a) for a in expected]


def test_a_table_that_is_replaced_later_is_read(tmp_path: Path) -> None:
    pair = pair_of(tmp_path)
    lane = lane_of(pair, 30)
    before = drafts(lane, 8)[0].tokens.tolist()
    table = pair.target.table[0]
    table.weight = table.weight[::-1]
    after, asked = drafts(lane, 8)
    assert asked == 0 and after.tokens.tolist() == by_steps(lane, 8) != before
