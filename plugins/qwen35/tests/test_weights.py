"""Every layout of a target's files loads as one and the same model; what cannot be read is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5, qwen3_5_moe
from qwen35_oracles.ours import load

from mlx_spec.errors import LoadError
from mlx_spec_qwen35.target import Qwen35Target
from mlx_spec_qwen35.tiny import write_tiny
from mlx_spec_qwen35.weights import bare_name, converted, split_names

Tensors = dict[str, mx.array]


def tensors(path: Path) -> Tensors:
    """Every tensor of a checkpoint."""
    return {name: value for file in sorted(path.glob("*.safetensors")) for name, value in mx.load(str(file)).items()}


def parameters(target: Qwen35Target) -> Tensors:
    return dict(tree_flatten(target.model.parameters()))


def rewritten(path: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """The same directory with other tensors, in one file."""
    changed = change(tensors(path))
    for file in [*path.glob("*.safetensors"), path / "model.safetensors.index.json"]:
        file.unlink()
    mx.save_safetensors(str(path / "model.safetensors"), changed)
    return path


@pytest.mark.parametrize("drafter", ["none", "own"])
@pytest.mark.parametrize("wrapper", [False, True])
@pytest.mark.parametrize("variant", ["dense", "tied", "moe"])
def test_the_published_layout_is_the_converted_one(checkpoint: Any, variant: str, wrapper: bool, drafter: str) -> None:
    plain = parameters(load(checkpoint(variant=variant)))
    for raw in (False, True):
        found = parameters(load(checkpoint(variant=variant, wrapper=wrapper, drafter=drafter, raw=raw)))
        assert found.keys() == plain.keys()
        for name, value in found.items():
            assert mx.allclose(value, plain[name], rtol=0, atol=2e-7), name  # w - 1 + 1 rounds


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(("variant", "module"), [("dense", qwen3_5), ("tied", qwen3_5), ("moe", qwen3_5_moe)])
def test_every_tensor_has_the_bytes_mlx_lm_gives_it(checkpoint: Any, variant: str, module: Any, raw: bool) -> None:
    path = checkpoint(variant=variant, wrapper=True, drafter="own", raw=raw)
    target = load(path)
    args = module.ModelArgs("x", target.text.mlx_lm_args())
    theirs = module.Model(args).sanitize(tensors(path))
    ours = parameters(target)
    assert theirs.keys() == ours.keys()
    assert [name for name, value in theirs.items() if not mx.array_equal(value, ours[name])] == []


@pytest.mark.parametrize("head", ["as deltas", "as they are"])
def test_a_head_kept_by_a_conversion_does_not_decide_about_the_norms(tmp_path: Path, head: str) -> None:
    plain = parameters(load(write_tiny(tmp_path / "plain", num_hidden_layers=4)[0]))
    path, _ = write_tiny(tmp_path / "kept", num_hidden_layers=4, drafter="own")
    if head == "as deltas":
        rewritten(path, lambda t: {n: v - 1 if "mtp." in n and v.ndim == 1 else v for n, v in t.items()})
    kept = load(path)
    assert [name for name, value in parameters(kept).items() if not mx.array_equal(value, plain[name])] == []
    assert "mtp.fc.weight" in kept.dropped and "mtp.norm.weight" in kept.dropped


def test_the_norm_inside_a_linear_layer_is_never_shifted(checkpoint: Any) -> None:
    path = checkpoint(raw=True)
    name = "model.layers.0.linear_attn.norm.weight"
    stored = tensors(path)[name]
    assert mx.array_equal(load(path).model.language_model.model.layers[0].linear_attn.norm.weight, stored)


def numbered(weights: Tensors) -> Tensors:
    """Fused experts one by one."""
    out: Tensors = {}
    for name, value in weights.items():
        base, fused, part = name.partition(".experts.")
        if not fused:
            out[name] = value
            continue
        for i, own in enumerate(value):
            parts = dict(zip(("gate", "up"), mx.split(own, 2, axis=0), strict=True)) if "up" in part else {"down": own}
            out |= {f"{base}.experts.{i}.{kind}_proj.weight": w for kind, w in parts.items()}
    return out


def test_experts_one_by_one_are_stacked(tmp_path: Path) -> None:
    fused = write_tiny(tmp_path / "fused", variant="moe", raw=True, num_hidden_layers=4)[0]
    expected = parameters(load(fused))
    found = parameters(load(rewritten(fused, numbered)))
    assert [name for name, value in found.items() if not mx.array_equal(value, expected[name])] == []


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, variant="moe", raw=True, num_hidden_layers=4)[0]
    lost = "model.layers.1.mlp.experts.2.up_proj.weight"
    rewritten(path, lambda t: {name: value for name, value in numbered(t).items() if name != lost})
    message = r"found 5 experts for layers.1.mlp.switch_mlp.up_proj.weight, none of number 2, expected experts 0 to 5"
    with pytest.raises(LoadError, match=message) as caught:
        load(path)
    assert caught.value.code == "QW03"


def test_fused_experts_with_scales_are_split_like_their_weights() -> None:
    weight, scales = mx.arange(48).reshape(2, 6, 4), mx.arange(12).reshape(2, 6, 1)
    for suffixes in (("", "_scales"), (".weight", ".scales")):
        named = dict(zip((f"layers.0.mlp.experts.gate_up_proj{s}" for s in suffixes), (weight, scales), strict=True))
        out = converted(named)
        for part, whole in (("weight", weight), ("scales", scales)):
            halves = [out[f"layers.0.mlp.switch_mlp.{kind}_proj.{part}"] for kind in ("gate", "up")]
            assert mx.array_equal(mx.concatenate(halves, axis=1), whole)


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("model.language_model.layers.3.mlp.gate.weight", "layers.3.mlp.gate.weight"),
        ("language_model.model.norm.weight", "norm.weight"),
        ("model.embed_tokens.weight", "embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.scales", "lm_head.scales"),
        ("model.visual.blocks.0.norm1.weight", "visual.blocks.0.norm1.weight"),
    ],
)
def test_names_lose_what_wraps_them(name: str, bare: str) -> None:
    assert bare_name(name) == bare


def test_towers_heads_and_a_tied_output_head_are_dropped_and_listed() -> None:
    one = mx.ones((2, 2))
    names = [
        "model.language_model.norm.weight",
        "model.visual.pos_embed.weight",
        "visual.merger.norm.weight",
        "vision_tower.blocks.0.attn.qkv.weight",
        "mtp.fc.weight",
        "model.mtp.fc.weight",
        "language_model.mtp.layers.0.mlp.gate.weight",
        "lm_head.weight",
    ]
    text, dropped = split_names(dict.fromkeys(names, one), tied=True)
    assert list(text) == ["norm.weight"] and dropped == tuple(sorted(names[1:]))
    assert "lm_head.weight" in split_names(dict.fromkeys(names, one), tied=False)[0]


@pytest.mark.parametrize(
    ("change", "message", "code"),
    [
        (
            lambda t: {**t, "model.layers.0.mlp.up_proj.weight_scale_inv": mx.ones((1, 1))},
            "found layers.0.mlp.up_proj.weight_scale_inv: weights in FP8 with a scale per block",
            "QW03",
        ),
        (
            lambda t: {
                n: v.moveaxis(2, 1) if n == "model.layers.2.linear_attn.conv1d.weight" else v for n, v in t.items()
            },
            "found convolution weights with their axes in two orders",
            "QW03",
        ),
        (lambda t: {n: v for n, v in t.items() if not n.endswith("layers.0.linear_attn.A_log")}, "A_log", "L17"),
        (lambda t: {**t, "model.layers.0.surprise.weight": mx.ones(2)}, "layers.0.surprise.weight", "L19"),
        (lambda t: {**t, "model.norm.weight": mx.ones(3)}, "a wrong shape", "L19"),
        (lambda t: {**t, "model.norm.weight": mx.full(64, float("nan"))}, "model.norm.weight", "L18"),
    ],
    ids=["fp8", "two layouts", "missing", "unknown", "shape", "nan"],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, change: Any, message: str, code: str) -> None:
    path = rewritten(write_tiny(tmp_path, raw=True, num_hidden_layers=4)[0], change)
    with pytest.raises(LoadError, match=message) as caught:
        load(path)
    assert caught.value.code == code


def test_a_log_stays_in_float32_whatever_the_rest_is(checkpoint: Any) -> None:
    for name, value in parameters(load(checkpoint(dtype="bfloat16", raw=True))).items():
        assert value.dtype == (mx.float32 if name.endswith("A_log") else mx.bfloat16), name
