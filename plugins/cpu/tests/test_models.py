"""Whole models on the kernels: layers are replaced and share weights, blocks equal steps, replies equal plain ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from cpu_layers import raw
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear
from mlx_lm.utils import load_model, quantize_model, save_model

from mlx_spec import Sampling, generate, load
from mlx_spec.errors import UsageError
from mlx_spec.kernels import swap_modules, use_kernels
from mlx_spec.linear import HeldLinear
from mlx_spec.pair import pair_key
from mlx_spec.settings import reset_settings
from mlx_spec.testing.tiny import write_llama
from mlx_spec_cpu import modules, swap

SIZES = {"hidden_size": 64, "intermediate_size": 96}
PROMPT = [(7 * i) % 120 + 3 for i in range(19)]
NEXT = [5, 90, 17, 33, 8, 121, 4, 66, 9]


def write_gemma4(out: Path, seed: int) -> tuple[Path, Path]:
    from mlx_spec.testing.writers import writer_of

    return writer_of("gemma4")(out, seed=seed)


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """function(value): MLX_SPEC_KERNELS from now on."""

    def set_kernels(value: str) -> None:
        monkeypatch.setenv("MLX_SPEC_KERNELS", value)
        reset_settings()

    return set_kernels


@pytest.fixture(scope="module", params=["float32", "bfloat16", "4bit"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """(target, drafter, kind) of a tiny llama pair."""
    target, drafter = write_llama(tmp_path_factory.mktemp("llama"), seed=3, **SIZES)
    if request.param == "4bit":
        model, config = load_model(target)
        model, config = quantize_model(model, config, group_size=32, bits=4)
        save_model(target, model)
        (target / "config.json").write_text(json.dumps(config))
    return target, drafter, request.param


def dtype_of(kind: str) -> str | None:
    return "bfloat16" if kind == "bfloat16" else None


def kinds(model: Any) -> dict[str, int]:
    """Class name -> how many modules of it."""
    found: dict[str, int] = {}
    for module in model.modules():
        found[type(module).__name__] = found.get(type(module).__name__, 0) + 1
    return found


def test_a_loaded_pair_runs_on_the_kernels(folders: tuple[Path, Path, str], choose: Callable[[str], None]) -> None:
    target, drafter, kind = folders
    choose("on")
    pair = load(str(target), str(drafter), dtype=dtype_of(kind), probe=False)
    have = kinds(pair.target.model)
    assert not {"Linear", "QuantizedLinear", "Embedding", "QuantizedEmbedding", "RMSNorm"} & set(have)
    assert have["RowRMSNorm"] == 7 and have["RowAttention"] == 3
    assert have["RowQuantizedLinear" if kind == "4bit" else "RowLinear"] == 22
    assert "RowLinear" in kinds(pair.drafter.model)
    assert "kernels='cpu " in pair.plan.line() and "linear 38" in pair.plan.line()


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("off", "mlx (MLX_SPEC_KERNELS=off)"),
        ("rms-norm", "(rms-norm 7)"),
        ("on", "(activation 3, attention 3, greedy 1, layers 3, linear 23, rms-norm 7, rope 3)"),
    ],
)
def test_the_setting_chooses(
    folders: tuple[Path, Path, str], choose: Callable[[str], None], value: str, line: str
) -> None:
    choose(value)
    assert line in load(str(folders[0])).plan.kernels.line()


def test_an_unknown_kernel_is_named(folders: tuple[Path, Path, str], choose: Callable[[str], None]) -> None:
    choose("linear,norm")
    with pytest.raises(
        UsageError, match="MLX_SPEC_KERNELS: found norm, expected on | off | experts | linear"
    ) as refused:
        load(str(folders[0]))
    assert refused.value.code == "U05"


def test_proofs_and_costs_are_kept_per_kernels(folders: tuple[Path, Path, str], choose: Callable[[str], None]) -> None:
    keys = set()
    for value in ("on", "off", "linear"):
        choose(value)
        keys.add(pair_key(load(str(folders[0]))))
    assert len(keys) == 3


def steps_and_block(target: Any) -> tuple[mx.array, list[mx.array]]:
    """Logits of one block after the prompt, and of the same tokens one by one."""
    block, single = target.make_states(), target.make_states()
    for states in (block, single):
        target.forward(mx.array([PROMPT]), states)
    whole = target.forward(mx.array([NEXT]), block).logits[0]
    return whole, [target.forward(mx.array([[token]]), single).logits[0, 0] for token in NEXT]


def test_a_block_gives_the_bytes_of_single_steps(
    folders: tuple[Path, Path, str], choose: Callable[[str], None]
) -> None:
    target, _, kind = folders
    choose("on")
    whole, steps = steps_and_block(load(str(target), dtype=dtype_of(kind)).target)
    assert [raw(whole[i]) == raw(step) for i, step in enumerate(steps)] == [True] * len(NEXT)


@pytest.mark.parametrize("settings", [None, Sampling(temperature=0.9, seed=7)], ids=["greedy", "coupled"])
def test_speculative_replies_are_plain_replies(
    folders: tuple[Path, Path, str], choose: Callable[[str], None], settings: Sampling | None
) -> None:
    target, drafter, kind = folders
    choose("on")
    plain = generate(load(str(target), dtype=dtype_of(kind)), PROMPT, settings, 40, ignore_eos=True)
    for draft, name in ((str(drafter), None), (None, "prompt-lookup")):
        pair = load(str(target), draft, name, 4, dtype=dtype_of(kind))
        assert pair.plan.level == "bitwise" and pair.plan.block_size == 4
        out = generate(pair, PROMPT, settings, 40, ignore_eos=True, adaptive=False)
        assert out.token_ids == plain.token_ids


def test_gemma4_with_its_assistant(tmp_path: Path, choose: Callable[[str], None]) -> None:
    target, drafter = write_gemma4(tmp_path, 5)
    choose("on")
    alone = load(str(target))
    whole, steps = steps_and_block(alone.target)
    assert [raw(whole[i]) == raw(step) for i, step in enumerate(steps)] == [True] * len(NEXT)
    pair = load(str(target), str(drafter), None, 4)
    assert pair.plan.level == "bitwise" and pair.plan.block_size == 4 and "linear" in pair.plan.kernels.line()
    out = generate(pair, PROMPT, None, 40, ignore_eos=True, adaptive=False)
    assert out.token_ids == generate(alone, PROMPT, None, 40, ignore_eos=True).token_ids
    assert out.timings.draft_n > 0


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_an_assistant_drafts_the_same_bytes_in_one_operation(
    tmp_path: Path, choose: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, dtype: str | None
) -> None:
    from mlx_spec_gemma4.drafter import Gemma4Assistant, TargetKV

    choose("on")
    pair = load(*map(str, write_gemma4(tmp_path, seed=1)), dtype=dtype)
    assert type(pair.drafter.model).__name__ == "RowGemma4Assistant"
    states, model = pair.target.make_states(), pair.drafter.model
    pair.target.prefill(mx.array([PROMPT * 3]), states)
    place = states.lengths[0] - 1
    x = mx.random.normal((1, 1, model.width), key=mx.random.key(1)).astype(pair.target.dtype)
    asked: list[int] = []
    own = Gemma4Assistant.__call__
    monkeypatch.setattr(Gemma4Assistant, "__call__", lambda self, *given: asked.append(1) or own(self, *given))

    def step() -> list[bytes]:
        shared = TargetKV(states, pair.drafter.sources, [place], pair.drafter._windows)
        return [raw(a) for a in model(x, shared, place)]

    one = step()
    assert not asked
    monkeypatch.setattr(Gemma4Assistant, "arrange", lambda self, *given: None)
    assert step() == one and asked


@pytest.mark.parametrize(
    "stored",
    [{}, {"variant": "moe", "dtype": "bfloat16"}, {"variant": "tied", "bits": 4, "dtype": "float16"}],
    ids=["dense-float32", "moe-bfloat16", "tied-4bit-float16"],
)
def test_qwen35_goes_back_on_the_kernels(tmp_path: Path, choose: Callable[[str], None], stored: dict[str, Any]) -> None:
    """Blocks equal steps, and a rewind by tape equals running only the kept rows, in bytes."""
    from mlx_spec.testing.watch import first_difference, saved
    from mlx_spec.testing.writers import write_tiny

    small = {"num_hidden_layers": 5, "full_attention_interval": 2, **stored}
    choose("on")
    target = load(str(write_tiny("qwen35", tmp_path, 6, small).target), kind="none").target
    assert kinds(target.model)["RowGatedDelta"] == 3
    whole, steps = steps_and_block(target)
    assert [raw(whole[i]) == raw(step) for i, step in enumerate(steps)] == [True] * len(NEXT)
    for keep in (0, 1, 4, 6):
        taken, only = target.make_states(), target.make_states()
        for states in (taken, only):
            target.prefill(mx.array([PROMPT]), states)
        mark = taken.mark()
        target.forward(mx.array([NEXT[:keep] + [7] * (6 - keep)]), taken)
        taken.rewind(mark, [keep])
        if keep:
            target.forward(mx.array([NEXT[:keep]]), only)
        for states in (taken, only):
            states.mark()
        assert first_difference(saved(taken), saved(only)) == "", keep


def test_logits_are_close_to_mlx(folders: tuple[Path, Path, str], choose: Callable[[str], None]) -> None:
    logits = []
    for value in ("off", "on"):
        choose(value)
        target = load(str(folders[0])).target
        logits.append(target.forward(mx.array([PROMPT]), target.make_states()).logits)
    assert logits[0].dtype == logits[1].dtype
    assert mx.abs(logits[0] - logits[1]).max().item() < 1e-4 * mx.abs(logits[0]).max().item()


# -- layers ------------------------------------------------------------------------------------------------


class Odd(nn.Linear):
    """A subclass may compute anything."""

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x) * 2


def test_a_layer_is_replaced_by_one_with_its_weights() -> None:
    layer = nn.Linear(12, 8)
    new = swap(layer)
    assert type(new) is modules.RowLinear and isinstance(new, nn.Linear)
    assert new.weight is layer.weight and new.bias is layer.bias
    x = mx.random.normal((3, 12))
    assert mx.allclose(new(x), layer(x), atol=1e-5).item()
    assert mx.allclose(new(mx.ones((2, 12), mx.int32)), layer(mx.ones((2, 12), mx.int32)), atol=1e-5).item()


def test_transposes_that_core_holds_for_mlx_are_let_go() -> None:
    layer = HeldLinear.of(nn.Linear(12, 8))
    new = swap(layer)
    assert type(new) is modules.RowLinear and set(new) == {"weight", "bias"} and new.weight is layer.weight


def test_a_tree_is_changed_in_place_and_shared_layers_stay_shared() -> None:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(6, 6)
            self.same = self.one
            self.odd = Odd(6, 6)
            self.many = [nn.RMSNorm(6), {"deep": nn.Embedding(5, 6)}]

    tree = Tree()
    names = [name for name, _ in tree_flatten(tree.parameters())]
    assert swap(tree) is tree
    assert type(tree.one) is modules.RowLinear and tree.same is tree.one
    assert type(tree.odd) is Odd
    assert type(tree.many[0]) is modules.RowRMSNorm and type(tree.many[1]["deep"]) is modules.RowEmbedding
    assert [name for name, _ in tree_flatten(tree.parameters())] == names
    assert swap_modules(tree, modules.swapper(modules.LINEAR)) == (tree, 0)


@pytest.mark.parametrize("bits", [None, 4])
def test_expert_layers_sorted_and_not(bits: int | None) -> None:
    layer = SwitchGLU(64, 96, 6)
    if bits:
        nn.quantize(layer, 32, bits)
    x = mx.random.normal((2, 20, 64))
    chosen = mx.random.randint(0, 6, (2, 20, 2)).astype(mx.uint32)
    before = [layer(x, chosen), layer(x[:, :3], chosen[:, :3])]
    assert swap(layer) is layer and type(layer.up_proj) is not SwitchLinear
    after = [layer(x, chosen), layer(x[:, :3], chosen[:, :3])]
    for old, new in zip(before, after, strict=True):
        assert mx.allclose(old, new, atol=1e-4 * mx.abs(old).max().item()).item()
    assert raw(after[0][:, :3]) == raw(after[1])  # sorted or not, a row is a row


@pytest.mark.parametrize("mode, options", [("mxfp8", {}), ("affine", {"bits": 4, "group_size": 64})])
def test_only_layouts_that_are_known_are_replaced(mode: str, options: dict[str, int]) -> None:
    layer = nn.QuantizedLinear(128, 8, False, mode=mode, **options)
    assert (type(swap(layer)) is modules.RowQuantizedLinear) is (mode == "affine")


def test_quantised_heads_and_their_rows() -> None:
    table = nn.QuantizedEmbedding(40, 64, 32, 4)
    new = swap(table)
    x = mx.random.normal((3, 64))
    assert raw(new(mx.array([1, 7]))) == raw(table(mx.array([1, 7])))
    assert mx.allclose(new.as_linear(x), table.as_linear(x), atol=1e-4).item()


def test_no_model_no_kernels(choose: Callable[[str], None]) -> None:
    choose("on")
    assert use_kernels(None).line() == "mlx"
