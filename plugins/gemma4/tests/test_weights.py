"""Assistant files: the exact set of tensors, or a LoadError that names what is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from gemma4_oracles.ours import open_ref

from mlx_spec.errors import LoadError
from mlx_spec_gemma4.config import assistant_config
from mlx_spec_gemma4.weights import load_assistant

Tensors = dict[str, mx.array]


@pytest.fixture
def changed(tmp_path: Path, pair_dirs: Any) -> Callable[..., Path]:
    """A copy of a drafter directory as one file, after `change(tensors)`."""

    def make(change: Callable[[Tensors], Any], **options: Any) -> Path:
        source = pair_dirs("E", **options)[1]
        path = tmp_path / "drafter"
        path.mkdir()
        shutil.copy(source / "config.json", path / "config.json")
        tensors = {
            name: value for file in sorted(source.glob("*.safetensors")) for name, value in mx.load(str(file)).items()
        }
        change(tensors)
        mx.save_safetensors(str(path / "model.safetensors"), tensors)
        return path

    return make


def load(path: Path) -> Any:
    """The assistant in `path`."""
    return load_assistant(path, assistant_config(open_ref(path).config, path))


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        ({}, lambda t: t.pop("model.norm.weight"), "tensors: found no model.norm.weight, expected 48 tensors"),
        (
            {},
            lambda t: t.update(extra=mx.zeros((2,))),
            "found unexpected extra, expected only the tensors of an assistant",
        ),
        (
            {},
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": mx.zeros((32, 32))}),
            "model.layers.0.self_attn.k_proj.weight, expected no K/V projections",
        ),
        (
            {},
            lambda t: t.update({"pre_projection.weight": mx.zeros((32, 64))}),
            r"tensor pre_projection.weight: found \[32, 64\], expected \[32, 128\]",
        ),
        ({"quantise": 4}, lambda t: t.pop("post_projection.biases"), "found no post_projection.biases"),
        ({"quantise": 4}, lambda t: t.pop("post_projection.scales"), "post_projection"),
        (
            {"ordered": True},
            lambda t: t.update({"masked_embedding.token_ordering": mx.zeros((320,), dtype=mx.int64)}),
            "token_ordering .*found ids that repeat or lie outside the vocabulary, expected a permutation of 0 to 319",
        ),
        (
            {"ordered": True},
            lambda t: t.update({"masked_embedding.token_ordering": mx.arange(1, 321)}),
            "expected a permutation of 0 to 319",
        ),
    ],
)
def test_wrong_tensors_are_named(changed: Any, options: Any, change: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        load(changed(change, **options))
    assert caught.value.code in ("GM02", "GM03")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.norm.weight", "post_projection.weight"])
def test_weights_that_are_not_finite_are_refused(changed: Any, name: str, value: float) -> None:
    """Logits of such a drafter are NaN: greedy drafts would be noise, and sampled ones would have no law."""

    def spoil(tensors: Tensors) -> None:
        flat = tensors[name].flatten()
        flat[3] = value
        tensors[name] = flat.reshape(tensors[name].shape)

    with pytest.raises(LoadError, match=f"weights of assistant .*drafter: found .*{name}") as caught:
        load(changed(spoil))
    assert caught.value.code == "L18"


def test_a_copy_of_the_tied_head_is_ignored(changed: Any) -> None:
    model = load(changed(lambda t: t.update({"lm_head.weight": mx.zeros((320, 32))})))
    assert "lm_head" not in model


def test_token_ordering_is_int32(changed: Any) -> None:
    model = load(changed(lambda t: None, ordered=True))
    assert model.masked_embedding.token_ordering.dtype == mx.int32


def test_modules_are_quantised_where_the_file_has_scales(changed: Any) -> None:
    model = load(changed(lambda t: None, quantise=4))
    assert "scales" in model.model.embed_tokens
    assert model.pre_projection.bits == 4
    assert "scales" not in model.model.layers[0].mlp.down_proj  # 48 wide: no multiple of the group
