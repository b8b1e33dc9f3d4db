"""Rows rounded to whole numbers (MLX_SPEC_ACTIVATIONS): exact products of rounded rows, in any company."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cpu_layers import Packing, as_float64, make_layer, raw
from mlx_lm.utils import load_model, quantize_model, save_model

from mlx_spec import Sampling, generate, load
from mlx_spec.errors import UsageError
from mlx_spec.pair import pair_key
from mlx_spec.settings import get_settings, reset_settings
from mlx_spec.testing.tiny import write_llama
from mlx_spec_cpu import native
from mlx_spec_cpu.recipe import Recipe

SETS = native.library().kernel_names().split(",")
DTYPES = [mx.float32, mx.bfloat16, mx.float16]
TOLERANCE = {mx.float32: 2e-6, mx.bfloat16: 4e-3, mx.float16: 5e-4}
ROUNDED = [Packing("affine", bits, group) for bits in (4, 8) for group in (32, 64, 128)]
OTHERS = [Packing("dense"), *(Packing("affine", bits, 64) for bits in (2, 3, 5, 6)), Packing("mxfp4", 4, 32)]
GROUP = 32  # elements of a row that are rounded together
FORMS = {"int8": 127, "int16": 127 * 128}  # the largest whole number of each


def activations(rows: int, K: int, dtype: mx.Dtype, seed: int = 1) -> mx.array:
    """Rows whose groups differ in size, some of them zero."""
    size = mx.repeat(mx.random.randint(-9, 9, (rows, K // GROUP), key=mx.random.key(seed + 1)), GROUP, axis=1)
    x = mx.random.normal((rows, K), key=mx.random.key(seed)) * 2.0**size
    return mx.where(size == 8, 0, x).astype(dtype)


def rounded(x: mx.array, form: str) -> np.ndarray:
    """Each row as whole numbers of a group's largest magnitude over that of the form, in float64."""
    groups = np.array(x.astype(mx.float32)).reshape(-1, GROUP)
    largest = np.abs(groups).max(axis=1, keepdims=True)
    most = np.float32(FORMS[form])
    inverse = np.divide(most, largest, out=np.zeros_like(largest), where=largest > 0)
    whole = np.rint(groups * inverse).astype(np.float64)
    exact: np.ndarray = whole * (largest / most).astype(np.float64)
    return exact.reshape(x.shape)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scales", DTYPES, ids=lambda d: f"scales-{d}")
@pytest.mark.parametrize("packing", ROUNDED, ids=str)
def test_it_is_the_product_of_the_rounded_row(
    library: Any, packing: Packing, scales: mx.Dtype, dtype: mx.Dtype, kernels: str, form: str
) -> None:
    assert library.use_kernels(f"{kernels} {form}")
    for K, N in ((packing.group_size, 5), (384, 33), (640, 18), (1152, 16)):
        layer, x = make_layer(packing, scales, N, K), activations(19, K, dtype)
        alone = [raw(library.linear(x[r : r + 1], **layer.arguments)) for r in range(19)]
        for threads in (1, 3):
            library.set_threads(threads)
            for rows in (*range(1, 10), 16, 19):
                y = library.linear(x[:rows], **layer.arguments)
                assert [raw(y[r : r + 1]) for r in range(rows)] == alone[:rows], (K, rows, threads)
        exact = rounded(x, form) @ layer.exact.T
        sizes = np.abs(rounded(x, form)) @ np.abs(layer.exact).T
        assert (np.abs(as_float64(y) - exact) <= TOLERANCE[y.dtype] * sizes).all()
        # and that is not the product of the row itself, which a test of closeness alone would not tell
        assert np.abs(rounded(x, form) - as_float64(x)).max() > 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("packing", ROUNDED, ids=str)
def test_it_is_near_the_product_of_the_row(library: Any, packing: Packing, kernels: str, form: str) -> None:
    """An element is missed by at most half a whole number."""
    assert library.use_kernels(f"{kernels} {form}")
    layer, x = make_layer(packing, mx.float32, 40, 384), activations(9, 384, mx.float32)
    largest = np.abs(as_float64(x)).reshape(9, -1, GROUP).max(axis=-1).repeat(GROUP, axis=-1)
    y = as_float64(library.linear(x, **layer.arguments))
    assert (np.abs(y - as_float64(x) @ layer.exact.T) <= 0.501 / FORMS[form] * largest @ np.abs(layer.exact).T).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("packing", OTHERS, ids=str)
def test_other_weights_are_multiplied_as_ever(library: Any, packing: Packing, kernels: str, form: str) -> None:
    layer, x = make_layer(packing, mx.bfloat16, 21, 192), activations(9, 192, mx.bfloat16)
    results = []
    for name in (kernels, f"{kernels} {form}"):
        assert library.use_kernels(name)
        results.append(raw(library.linear(x, **layer.arguments)))
    assert results[0] == results[1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize("packing", [Packing("affine", 4, 32), Packing("affine", 8, 64)], ids=str)
@pytest.mark.parametrize("odd", [mx.nan, mx.inf, -mx.inf, 2.0**113, 2.0**-101])
def test_rows_that_cannot_be_rounded_are_not(
    library: Any, packing: Packing, odd: float, kernels: str, form: str
) -> None:
    """NaN, infinities and values beyond any factor: such a row is the exact kernels', its neighbours are rounded."""
    layer, x = make_layer(packing, mx.float32, 21, 128), activations(9, 128, mx.float32)
    if abs(odd) < 1:  # of a row whose groups are larger nobody would see it
        x = mx.where(mx.arange(9)[:, None] == 4, mx.where(mx.arange(128) < 32, 0, x), x)
    x = mx.where((mx.arange(9)[:, None] == 4) & (mx.arange(128) == 5), odd, x)
    assert library.use_kernels(kernels)
    exact = raw(library.linear(x[4:5], **layer.arguments))
    assert library.use_kernels(f"{kernels} {form}")
    y = library.linear(x, **layer.arguments)
    assert raw(y[4:5]) == exact
    assert [raw(y[r : r + 1]) for r in range(9)] == [
        raw(library.linear(x[r : r + 1], **layer.arguments)) for r in range(9)
    ]
    others = [r for r in range(9) if r != 4]
    sizes = np.abs(rounded(x[mx.array(others)], form)) @ np.abs(layer.exact).T
    assert (np.abs(as_float64(y)[others] - rounded(x[mx.array(others)], form) @ layer.exact.T) <= 2e-6 * sizes).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernels", SETS)
def test_rows_that_lie_apart_biases_and_no_rows(library: Any, kernels: str, form: str) -> None:
    assert library.use_kernels(f"{kernels} {form}")
    layer, x = make_layer(Packing("affine", 4, 64), mx.bfloat16, 35, 192), activations(11, 192, mx.bfloat16)
    y = library.linear(x, **layer.arguments)
    apart = mx.as_strided(mx.contiguous(x.T), x.shape, (1, x.shape[0]))
    assert raw(library.linear(apart, **layer.arguments)) == raw(y)
    assert library.linear(x[:0], **layer.arguments).shape == (0, 35)
    whole = library.linear(x.astype(mx.float32), **layer.arguments)  # the same rows: these are rounded alike
    bias = mx.random.normal((35,)).astype(mx.float32)
    biased = library.linear(x.astype(mx.float32), bias=bias, **layer.arguments)
    assert raw(biased) == raw(whole + bias)
    assert raw(library.linear(x, bias=bias.astype(mx.bfloat16), **layer.arguments)) == raw(
        (whole + bias.astype(mx.bfloat16).astype(mx.float32)).astype(mx.bfloat16)
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernels", SETS)
def test_experts_and_recipes_give_the_same_rows(library: Any, kernels: str, form: str) -> None:
    assert library.use_kernels(f"{kernels} {form}")
    layers = [make_layer(Packing("affine", 4, 32), mx.bfloat16, 29, 96, seed) for seed in range(3)]
    arrays = {name: mx.stack([layer.arguments[name] for layer in layers]) for name in ("weight", "scales", "biases")}
    x = activations(12, 96, mx.bfloat16)
    chosen = mx.array([row % 2 for row in range(12)], mx.uint32)[:, None]
    y = library.gathered(x[:, None, None, :], indices=chosen, **{**layers[0].arguments, **arrays})
    alone = [raw(library.linear(x[r : r + 1], **layers[r % 2].arguments)) for r in range(12)]
    assert [raw(y[r, 0]) for r in range(12)] == alone
    recipe = Recipe()
    start = recipe.input(96)
    for layer in layers[:2]:  # side by side, prepared once
        recipe.output(recipe.linear(start, **layer.arguments))
    for rows in (1, 3, 8, 12):
        both = recipe.build(mx.bfloat16)(x[None, :rows])[0]
        for layer, out in zip(layers[:2], both, strict=False):
            assert raw(out) == raw(library.linear(x[:rows], **layer.arguments))


# -- whole models ------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, library: Any) -> Iterator[Callable[..., None]]:
    """function(value, kernels="on"): the variables from now on, as a new process would read them."""

    def ask(value: str, kernels: str = "on") -> None:
        monkeypatch.setenv("MLX_SPEC_ACTIVATIONS", value)
        monkeypatch.setenv("MLX_SPEC_KERNELS", kernels)
        reset_settings()
        native._library.cache_clear()
        library.use_kernels(SETS[0])
        native.library()

    yield ask
    monkeypatch.undo()
    reset_settings()
    native._library.cache_clear()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(4-bit target, float32 drafter) of a tiny llama pair."""
    target, drafter = write_llama(tmp_path_factory.mktemp("llama"), seed=3, hidden_size=64, intermediate_size=96)
    model, config = load_model(target)
    model, config = quantize_model(model, config, group_size=32, bits=4)
    save_model(target, model)
    (target / "config.json").write_text(json.dumps(config))
    return target, drafter


PROMPT = [(7 * i) % 120 + 3 for i in range(19)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("settings", [None, Sampling(temperature=0.9, seed=7)], ids=["greedy", "coupled"])
def test_speculative_replies_are_plain_replies(
    folders: tuple[Path, Path], asked: Callable[..., None], settings: Sampling | None, form: str
) -> None:
    target, drafter = map(str, folders)
    asked(form)
    plain = generate(load(target), PROMPT, settings, 40, ignore_eos=True)
    for draft, name in ((drafter, None), (None, "prompt-lookup")):
        for width in (2, 4, 8):
            pair = load(target, draft, name, width)
            assert pair.plan.level == "bitwise" and pair.plan.block_size == width
            out = generate(pair, PROMPT, settings, 40, ignore_eos=True, adaptive=False)
            assert out.token_ids == plain.token_ids


def test_it_is_said_and_kept_apart(folders: tuple[Path, Path], asked: Callable[..., None]) -> None:
    target = str(folders[0])
    lines, keys, logits = [], set(), []
    for value in ("full", *FORMS):
        asked(value)
        pair = load(target)
        lines.append(pair.plan.kernels.line())
        keys.add(pair_key(pair))
        logits.append(as_float64(pair.target.forward(mx.array([PROMPT]), pair.target.make_states()).logits))
        assert not any("MLX_SPEC_ACTIVATIONS" in note for note in pair.plan.notes)
    assert lines[0].startswith(f"cpu {SETS[0]} (")
    assert all(line.startswith(f"cpu {SETS[0]} {form} (") for line, form in zip(lines[1:], FORMS, strict=True))
    assert len(keys) == 3
    for found, form in zip(logits[1:], FORMS, strict=True):
        difference = np.abs(logits[0] - found).max() / np.abs(logits[0]).max()
        assert 0 < difference < 25 / FORMS[form]  # a tiny model of random weights: some hundredths in 8 bits


@pytest.mark.parametrize("form", FORMS)
def test_asking_in_vain_is_said(
    folders: tuple[Path, Path],
    asked: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    form: str,
) -> None:
    asked(form)
    said = f"MLX_SPEC_ACTIVATIONS={form} changes nothing here: found "
    note = f"{said}no affine weights of 4 or 8 bits (spec convert --q-bits 4 makes such)"
    assert load(str(folders[1])).plan.notes == [note] and note in caplog.messages
    asked(form, kernels="off")
    pair = load(str(folders[0]))
    assert pair.plan.notes == [f"{said}mlx (MLX_SPEC_KERNELS=off), expected kernels of mlx-spec-cpu for linear layers"]
    assert pair.plan.kernels.line() == "mlx (MLX_SPEC_KERNELS=off)"
    asked(form, kernels="rms-norm")  # the linear layers are left to mlx
    pair = load(str(folders[0]))
    assert pair.plan.notes == [f"{said}{pair.plan.kernels.line()}, expected kernels of mlx-spec-cpu for linear layers"]


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch, asked: Callable[..., None]) -> None:
    with pytest.raises(UsageError, match="MLX_SPEC_ACTIVATIONS: found 'int4', expected 'full', 'int16' or 'int8'"):
        asked("int4")


def test_values_are_read_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SPEC_ACTIVATIONS", "INT16")
    reset_settings()
    assert get_settings().activations == "int16"
    monkeypatch.undo()
    reset_settings()
