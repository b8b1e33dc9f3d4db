"""Operations in a row as one: what each gives alone, row by row the same bytes, and decoder layers that run on them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cpu_layers import PACKINGS, Packing, Twice, as_float64, make_layer, raw, refusal
from mlx_lm.models import llama, qwen2, qwen3

from mlx_spec.state import KVState, StateGroup, WindowState
from mlx_spec_cpu import swap
from mlx_spec_cpu.layers import whole
from mlx_spec_cpu.native import library as load
from mlx_spec_cpu.operations import build_layer, layer_reference
from mlx_spec_cpu.recipe import Recipe, Step

SETS = load().kernel_names().split(",")
DTYPES = [mx.float32, mx.bfloat16, mx.float16]
CLOSE = {mx.float32: 5e-6, mx.bfloat16: 3e-2, mx.float16: 4e-3}
INVERSE = mx.exp(-mx.arange(8, dtype=mx.float32) / 3)
run = build_layer()


def normal(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def alike(found: list[mx.array], expected: list[mx.array], dtype: mx.Dtype) -> bool:
    """Shapes and, within what `dtype` rounds, values."""
    same = [(a.shape, a.dtype) for a in found] == [(b.shape, dtype) for b in expected]
    gaps = [np.abs(as_float64(a) - as_float64(b)).max() for a, b in zip(found, expected, strict=True)]
    sizes = [np.abs(as_float64(b)).max() for b in expected]
    return same and all(gap <= CLOSE[dtype] * (1 + size) for gap, size in zip(gaps, sizes, strict=True))


def everything(dtype: mx.Dtype, packing: Any = PACKINGS[0]) -> Recipe:
    """All that a recipe can hold: 5 query heads of 16 over one, widths that fill no whole vectors."""
    weights = [
        make_layer(packing, dtype, N, K, seed).arguments
        for seed, (N, K) in enumerate(((80, 128), (16, 128), (16, 128), (128, 128), (33, 128), (33, 128)))
    ]
    recipe = Recipe()
    x, side = recipe.input(128), recipe.input(128, 4)
    normed = recipe.norm(x, normal(128, seed=9, dtype=dtype) / 8, 1e-5, 128)
    q, k, v = (recipe.linear(normed, **weights[i]) for i in range(3))
    q = recipe.rotate(recipe.norm(q, None, 1e-6, 16), 5, 16, False, 1.0, INVERSE)
    k = recipe.rotate(k, 1, 16, True, 0.5, INVERSE)
    recipe.attend(q, k, v, 5, 1, 0.25, 6)
    seen = recipe.look(0, q, 5, 1, 0.25, 5)
    h = recipe.combine("add", recipe.combine("multiply", x, side), recipe.linear(side, **weights[3]))
    gate, up = recipe.linear(h, **weights[4]), recipe.linear(h, **weights[5])
    for name in ("silu", "gelu"):
        recipe.output(recipe.combine(name, gate, up))
    recipe.output(8), recipe.output(q, 5), recipe.output(h, 4)
    recipe.output(recipe.scale(recipe.scale(seen, normal(80, seed=8, dtype=dtype)), mx.array([0.3], dtype)))
    return recipe


def wide(value: Any) -> Any:
    """The same in float32, whole recipes too: what mlx adds up in 16 bits is no measure."""
    if isinstance(value, Recipe):
        out = Recipe()
        out.outputs = value.outputs
        out.steps = [
            Step(s.op, tuple(map(wide, s.args)), {k: wide(a) for k, a in s.given.items()}) for s in value.steps
        ]
        return out
    if isinstance(value, list | tuple):
        return type(value)(map(wide, value))
    return value.astype(mx.float32) if isinstance(value, mx.array) and value.dtype in DTYPES else value


def place(rows: int, dtype: mx.Dtype, start: int = 9, low: int = 2) -> dict[str, Any]:
    keys, values = normal(1, 1, 40, 16, seed=5, dtype=dtype), normal(1, 1, 40, 16, seed=6, dtype=dtype)
    read = [normal(1, 1, 64, 16, seed=seed, dtype=dtype) for seed in (7, 8)]
    return {
        "offset": start,
        "keys": keys,
        "values": values,
        "low": low,
        "start": start,
        "lent": [(*read, 3, start + 4 + rows)],
    }


def inputs(rows: int, dtype: mx.Dtype) -> list[mx.array]:
    return [normal(1, rows, 128, seed=1, dtype=dtype), normal(1, 4, rows, 32, seed=2, dtype=dtype) / 40]


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_operation_gives_what_its_parts_give(library: Any, dtype: mx.Dtype, kernels: str) -> None:
    assert library.use_kernels(kernels)
    for packing in (PACKINGS[0], PACKINGS[7]):
        recipe = everything(dtype, packing)
        for rows in (1, 3, 21):
            given, where = inputs(rows, dtype), place(rows, dtype)
            expected = layer_reference(wide(recipe), *map(wide, given), **{name: wide(a) for name, a in where.items()})
            assert alike(run(recipe, *given, **where), expected, dtype)


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_its_bytes_in_every_block(library: Any, dtype: mx.Dtype, kernels: str) -> None:
    assert library.use_kernels(kernels)
    recipe, rows = everything(dtype, PACKINGS[7]), 21
    x, side = inputs(rows, dtype)
    for threads in (1, 2, 4):
        library.set_threads(threads)
        block = run(recipe, x, side, **place(rows, dtype))
        where = place(1, dtype)
        for r in range(rows):
            *step, where["keys"], where["values"] = run(recipe, x[:, r : r + 1], side[:, :, r : r + 1], **where)
            where |= {"offset": 10 + r, "start": 10 + r, "lent": [(*where["lent"][0][:3], 15 + r)]}
            for i, axis in enumerate((1, 1, 1, 2, 2, 1)):
                assert raw(mx.contiguous(mx.take(block[i], mx.array([r]), axis=axis))) == raw(step[i]), (threads, r, i)
        assert raw(where["keys"]) == raw(block[-2]) and raw(where["values"]) == raw(block[-1])


@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_layers_of_several_dtypes_read_the_same_rows(library: Any, packing: Packing, kernels: str) -> None:
    """How rows are prepared depends on what weights or scales are stored in."""
    assert library.use_kernels(kernels)
    for dtypes in ((mx.bfloat16, mx.float32), (mx.float32, mx.bfloat16), (mx.bfloat16, mx.float16)):
        layers = [make_layer(packing, dtype, 5, 256, i) for i, dtype in enumerate(dtypes)]
        recipe = Recipe()
        rows = recipe.input(256)
        for of in [recipe.linear(rows, **layer.arguments) for layer in layers]:
            recipe.output(of)
        x = normal(1, 2, 256, dtype=mx.bfloat16)
        for layer, y in zip(layers, recipe.build(mx.bfloat16)(x), strict=True):
            assert raw(y) == raw(library.linear(x, **layer.arguments)), dtypes


def test_many_rows_are_cut_into_blocks_unseen() -> None:
    """Wide registers: 1,500 rows do not fit into the scratch at once."""
    recipe = Recipe()
    x = recipe.input(1024)
    wide = recipe.linear(x, weight=normal(1024, 1024, seed=3))
    recipe.output(recipe.combine("silu", wide, recipe.combine("add", wide, x)), 4)
    recipe.output(wide)
    x = normal(3, 500, 1024, seed=4)
    found = run(recipe, x)
    for batch, row in ((0, 0), (1, 250), (2, 499)):
        alone = run(recipe, x[batch : batch + 1, row : row + 1])
        assert raw(found[0][batch, :, row]) == raw(alone[0][0, :, 0]) and raw(found[1][batch, row]) == raw(
            alone[1][0, 0]
        )


def test_strided_inputs_and_positions_per_batch() -> None:
    recipe = Recipe()
    x = recipe.input(48, 3)
    recipe.output(recipe.rotate(x, 3, 16, False, 1.0, INVERSE), 3)
    recipe.output(x)
    given = normal(2, 5, 3, 32).swapaxes(1, 2)[..., ::2]
    for offset in (7, mx.array([3], mx.int32), mx.array([4, 90], mx.int32)):
        assert alike(run(recipe, given, offset=offset), layer_reference(recipe, given, offset=offset), mx.float32)
    assert run(recipe, given[:, :, :0])[0].shape == (2, 3, 0, 16)


def test_storage_is_filled_in_place_unless_somebody_holds_it() -> None:
    recipe = Recipe()
    q, k, v = recipe.input(16), recipe.input(16), recipe.input(16)
    recipe.output(recipe.attend(q, k, v, 1, 1, 1.0))
    program, rows = recipe.build(mx.float32), [normal(1, 2, 16, seed=i) for i in range(3)]
    keys, values = normal(1, 1, 8, 16, seed=4), normal(1, 1, 8, 16, seed=5)
    mx.eval(keys, values)
    before = np.array(keys)
    y, new_keys, new_values = program(*rows, offset=3, keys=keys, values=values, start=3)
    assert np.array_equal(np.array(keys), before)  # held here, so copied
    assert raw(new_keys[0, 0, 3:5]) == raw(rows[1][0]) and raw(new_keys[0, 0, :3]) == raw(keys[0, 0, :3])
    expected = layer_reference(recipe, *rows, offset=3, keys=keys, values=values, start=3)
    assert alike([y, new_keys, new_values], expected, mx.float32)

    mx.eval(new_values)
    big = mx.zeros((1, 1, 1 << 20, 16))
    mx.eval(big)
    more = mx.zeros((1, 1, 1 << 20, 16))
    mx.eval(more)
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    for step in range(3):
        y, big, more = program(*rows, offset=3 + step, keys=big, values=more, start=3 + step)
        mx.eval(y, big, more)
    assert mx.get_peak_memory() - held < 1 << 20


def test_what_is_lent_is_read_wherever_its_elements_lie() -> None:
    recipe = Recipe()
    recipe.output(recipe.look(0, recipe.input(24), 2, 2, 0.5))
    program, q = recipe.build(mx.float32), normal(1, 2, 24)
    apart = [normal(1, 9, 2, 24, seed=seed).swapaxes(1, 2)[..., ::2] for seed in (1, 2)]
    together = [mx.contiguous(a) for a in apart]
    mx.eval(together)
    before = [raw(a) for a in together]
    found = [program(q, lent=[(*stored, 1, 8)])[0] for stored in (apart, together)]
    assert raw(found[0]) == raw(found[1]) and [raw(a) for a in together] == before
    assert alike([found[0]], layer_reference(recipe, q, lent=[(*apart, 1, 8)]), mx.float32)


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (lambda r: r.linear(r.input(8), weight=mx.zeros((4, 7))), "weights: found shape (4,7)"),
        (lambda r: r.norm(r.input(8), None, 1e-5, 3), "norm size: found 3"),
        (lambda r: r.norm(r.input(8), mx.zeros((7,)), 1e-5, 8), "norm weight: found float32 of shape (7)"),
        (
            lambda r: r.combine("add", r.input(8), r.input(9)),
            "registers to combine: found float32 of 8 and float32 of 9",
        ),
        (lambda r: r.combine("tanh", r.input(8), r.input(8)), "operation: found tanh"),
        (lambda r: r.combine("add", r.input(8), 5), "register: found 5"),
        (lambda r: r.input(8, 3), "heads: found 3"),
        (lambda r: r.rotate(r.input(8), 2, 6, False, 1.0, INVERSE), "dims: found 6"),
        (lambda r: r.rotate(r.input(32), 2, 8, False, 1.0, INVERSE), "inverse wavelengths: found float32 of shape (8)"),
        (lambda r: r.attend(r.input(12), r.input(8), r.input(8), 3, 2, 1.0), "heads: found 3 over 2"),
        (lambda r: r.attend(r.input(12), r.input(8), r.input(8), 2, 2, 1.0), "queries, keys and values: found 12, 8"),
        (lambda r: r.attend(r.input(8), r.input(8), r.input(8), 2, 2, 1.0, -1), "window: found -1"),
        (lambda r: r.look(0, r.input(12), 5, 1, 1.0), "heads: found 5 over 1"),
        (lambda r: r.look(1, r.input(12), 2, 1, 1.0), "window and place: found 0 and 1"),
        (lambda r: r.scale(r.input(8), mx.ones((7,))), "scale: found float32 of shape (7)"),
        (lambda r: r.scale(r.input(8), mx.ones((8,), mx.float16)), "scale: found float16 of shape (8)"),
    ],
)
def test_what_does_not_fit_is_refused_when_it_is_built(build: Callable[[Recipe], Any], found: str) -> None:
    assert refusal(build).startswith(found)


def test_what_does_not_fit_is_refused_when_it_is_called() -> None:
    recipe = Recipe()
    x = recipe.input(16)
    recipe.output(recipe.attend(x, recipe.input(16), recipe.input(16), 1, 1, 1.0))
    program, rows, room = recipe.build(mx.float32), [mx.zeros((1, 2, 16))] * 3, mx.zeros((1, 1, 8, 16))
    cases: list[tuple[list[Any], dict[str, Any], str]] = [
        (rows[:2], {}, "inputs: found 2"),
        ([*rows[:2], mx.zeros((1, 3, 16))], {}, "input 2: found float32 of shape (1,3,16)"),
        ([r.astype(mx.float16) for r in rows], {}, "input 0: found float16"),
        (rows, {}, "storage: found none"),
        (rows, {"keys": room, "values": room, "start": 7}, "storage: found (1,1,8,16)"),
        (rows, {"keys": room, "values": room, "start": 2, "low": 3}, "storage: found (1,1,8,16)"),
        (rows, {"keys": room.astype(mx.float16), "values": room}, "storage: found (1,1,8,16)"),
        ([mx.zeros((2, 2, 16))] * 3, {"keys": room, "values": room}, "positions of an attention: found 2 batches"),
        (
            rows,
            {"keys": room, "values": room, "offset": mx.array([1, 2], mx.int32)},
            "offset: found int32 of shape (2)",
        ),
    ]
    for given, where, found in cases:
        with pytest.raises(ValueError, match=".*") as refused:
            program(*given, **where)
        assert str(refused.value).startswith(found), str(refused.value)
    recipe = Recipe()
    recipe.output(recipe.look(0, recipe.input(16), 1, 1, 1.0))
    program, two = recipe.build(mx.float32), rows[0]
    for lent, found in (
        ([], "lent storages: found 0"),
        ([(room, room, 0, 9)], "lent storage 0: found (1,1,8,16)"),
        ([(room, room, 3, 4)], "lent storage 0: found (1,1,8,16)"),
        ([(room, room.astype(mx.float16), 0, 4)], "lent storage 0: found (1,1,8,16)"),
    ):
        with pytest.raises(ValueError, match=".*") as refused:
            program(two, lent=lent)
        assert str(refused.value).startswith(found), str(refused.value)
    with pytest.raises(ValueError, match="activations: found int32"):
        recipe.build(mx.int32)


# -- decoder layers ----------------------------------------------------------------------------------------

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 6, "vocab_size": 50}
SIZES |= {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 100.0, "tie_word_embeddings": True}


def model_of(family: Any, **more: Any) -> Any:
    """A random model; its norms do something."""
    settings = SIZES | {"model_type": family.__name__.rsplit(".", 1)[1], "head_dim": 16, "max_position_embeddings": 90}
    if family is qwen2:
        del settings["head_dim"]
        settings["hidden_size"] = 96
    model = family.Model(family.ModelArgs.from_dict(settings | more))
    model.apply(lambda a: mx.random.normal(a.shape, key=mx.random.key(a.size)) * 0.3)
    return model


def states(model: Any, window: int | None = None) -> StateGroup:
    return StateGroup(KVState() if window is None else WindowState(window, 8) for _ in model.layers)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
TOKENS = mx.array([[(7 * i) % 50 for i in range(30)]])


@pytest.mark.parametrize("family", [llama, qwen2, qwen3])
@pytest.mark.parametrize("bits", [0, 4])
def test_layers_are_replaced_and_give_what_they_gave(family: Any, bits: int) -> None:
    model = model_of(family, **({"rope_scaling": LLAMA3} if family is llama and bits else {}))
    if bits:
        nn.quantize(
            model, 32, bits, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0
        )
    expected = model(TOKENS)
    swap(model)
    assert [type(layer).__name__ for layer in model.layers] == ["RowTransformerBlock"] * 2
    assert isinstance(model.layers[0], family.TransformerBlock)
    cache = states(model)
    parts = [
        model(TOKENS[:, :11], cache=cache),
        model(TOKENS[:, 11:12], cache=cache),
        model(TOKENS[:, 12:], cache=cache),
    ]
    found = mx.concatenate(parts, axis=1)
    assert mx.allclose(found, expected, atol=2e-4 * mx.abs(expected).max().item()).item()
    assert mx.allclose(model(TOKENS), expected, atol=2e-4 * mx.abs(expected).max().item()).item()


def test_a_layer_has_the_same_bytes_wherever_its_keys_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one operation over a state's storage, in two with the state's own append, ragged beside another row."""
    model = model_of(llama)
    swap(model)
    seen = []
    for room in (True, False):
        if not room:
            monkeypatch.setattr(KVState, "room", lambda self, count: None)
        cache = states(model)
        out = [
            model(TOKENS[:, :9], cache=cache),
            model(TOKENS[:, 9:13], cache=cache),
            model(TOKENS[:, 13:14], cache=cache),
        ]
        mx.eval(out)
        seen.append([raw(a) for a in out])
        assert cache.lengths == (14,)
    assert seen[0] == seen[1]
    monkeypatch.undo()
    first, other = states(model), states(model)
    model(TOKENS[:, :9], cache=first), model(TOKENS[:, 3:8], cache=other)
    both = StateGroup(type(a).merge([a, b]) for a, b in zip(first, other, strict=True))
    together = model(mx.concatenate([TOKENS[:, 9:13], TOKENS[:, :4]]), cache=both)
    assert raw(together[0]) == seen[0][1]


def test_steps_and_blocks_over_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 7}
    model = model_of(llama, **kinds)
    swap(model)
    cache = StateGroup([KVState(), WindowState(7, 8)])
    model(TOKENS[:, :12], cache=cache)
    mark = cache.mark()
    block = model(TOKENS[:, 12:16], cache=cache)
    mx.eval(block)
    cache.rewind(mark, [0])
    steps = [model(TOKENS[:, i : i + 1], cache=cache) for i in range(12, 16)]
    assert raw(block) == raw(mx.concatenate(steps, axis=1))


def test_a_rejected_block_leaves_no_trace() -> None:
    model = model_of(llama)
    swap(model)
    clean, used = states(model), states(model)
    for cache in (clean, used):
        model(TOKENS[:, :9], cache=cache)
    mark = used.mark()
    model(TOKENS[:, 20:25], cache=used)
    used.rewind(mark, [1])
    model(TOKENS[:, 20:21], cache=clean)
    assert raw(model(TOKENS[:, 10:11], cache=clean)) == raw(model(TOKENS[:, 10:11], cache=used))


def test_parts_that_are_replaced_later_are_used() -> None:
    model = model_of(llama)
    swap(model)
    before = model(TOKENS)
    layer = model.layers[0]
    layer.mlp.down_proj.weight = layer.mlp.down_proj.weight * 2
    doubled = model(TOKENS)
    assert not mx.allclose(doubled, before, atol=1e-3).item()

    layer.mlp.down_proj.weight = layer.mlp.down_proj.weight * 0.5
    layer.mlp.down_proj = Twice(layer.mlp.down_proj)
    assert mx.allclose(model(TOKENS), doubled, atol=1e-4 * mx.abs(doubled).max().item()).item()


def test_only_what_is_known_is_replaced() -> None:
    class Own(llama.TransformerBlock):
        pass

    args = llama.ModelArgs.from_dict(SIZES | {"model_type": "llama"})
    assert type(swap(Own(args))) is Own
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    scaled = llama.TransformerBlock(llama.ModelArgs.from_dict(SIZES | {"model_type": "llama", "rope_scaling": yarn}))
    assert type(swap(scaled)) is llama.TransformerBlock
    wide = llama.TransformerBlock(args)
    swapped = swap(wide)
    mixed = swapped(mx.ones((1, 3, 64), mx.bfloat16))  # float32 weights widen what they are given: part by part
    assert mixed.dtype == mx.float32
    assert whole(swapped).steps


def test_angles_that_are_held_from_call_to_call_are_those_of_the_call(library: Any) -> None:
    """One thing they are made of changes from call to call, each in turn; q and k of a layer share them."""
    offsets: list[Any] = [0, 7, 8, mx.array([7, 8]), mx.array([8, 7]), mx.array([7])]
    inverse = [mx.exp(-mx.arange(8) / n) for n in (2.0, 3.0)]
    made = {}
    for dtype, waves, scale in product((mx.float32, mx.bfloat16), (0, 1), (1.0, 0.5)):
        recipe = Recipe()
        for heads in (4, 2):
            turned = recipe.rotate(recipe.input(heads * 16, heads), heads, 16, False, scale, inverse[waves])
            recipe.output(turned, heads)
        made[dtype, waves, scale] = recipe.build(dtype)
    choices: list[list[Any]] = [SETS, [1, 3], offsets, [mx.float32, mx.bfloat16], [0, 1], [1.0, 0.5]]
    for turn in range(len(choices)):
        for case in product(*choices[turn:], *choices[:turn]):
            kernels, L, offset, dtype, waves, scale = (*case[-turn or len(case) :], *case[: -turn or len(case)])
            assert library.use_kernels(kernels)
            given = [mx.random.normal((2, heads, L, 16), key=mx.random.key(heads)).astype(dtype) for heads in (4, 2)]
            for found, x in zip(made[dtype, waves, scale](*given, offset=offset), given, strict=True):
                assert raw(found) == raw(library.rope(x, 16, False, scale, inverse[waves], offset))
