"""How the head is found, refused and loaded: its own directory, another, converted and damaged ones."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlx_spec
from mlx_spec import LoadError, ModelRef, NoEmbeddedMtpHead, PairError, Target
from mlx_spec_mimo.drafter import MimoDrafter
from mlx_spec_mimo.validate import PREFIX

Folder = Callable[..., Path]
PROMPT = [7, 9, 8, 7, 9, 8, 7, 9]


@pytest.fixture
def damaged(folder: Folder, tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """A copy of the MiMo directory whose head has other tensors: name -> array, or None to take it out."""

    def make(changes: dict[str, Any]) -> Path:
        path = tmp_path / "damaged"
        shutil.copytree(folder(), path)
        weights = {n: a for file in sorted(path.glob("*.safetensors")) for n, a in mx.load(str(file)).items()}
        weights |= {PREFIX + name: value for name, value in changes.items()}
        for file in path.glob("model*"):
            file.unlink()
        kept = {name: value for name, value in weights.items() if value is not None}
        mx.save_safetensors(str(path / "model.safetensors"), kept)
        return path

    return make


def test_one_directory_is_target_and_drafter(folder: Folder) -> None:
    path = str(folder())
    by_kind, twice = mlx_spec.load(path, kind="mtp", probe=False), mlx_spec.load(path, path, probe=False)
    for pair in (by_kind, twice):
        assert isinstance(pair.drafter, MimoDrafter)
        assert (pair.plan.requested, pair.plan.active, pair.drafter_owner) == ("mtp", True, "mimo")
        assert pair.drafter_ref is not None and pair.drafter_ref.path == folder()


def test_the_probe_passes_and_the_reply_is_the_targets_own(folder: Folder) -> None:
    pair = mlx_spec.load(str(folder()), kind="mtp")
    assert pair.plan.level == "bitwise"
    out = mlx_spec.generate(pair, PROMPT, None, 40, ignore_eos=True)
    assert out.token_ids == mlx_spec.generate(pair, PROMPT, None, 40, ignore_eos=True, speculative=False).token_ids


def test_a_converted_target_takes_the_head_of_the_original(folder: Folder) -> None:
    converted, original = folder(head=False, bits=4), folder()
    pair = mlx_spec.load(str(converted), str(original), probe=False)
    out = mlx_spec.generate(pair, PROMPT, None, 40, ignore_eos=True, adaptive=False)
    plain = mlx_spec.generate(pair, PROMPT, None, 40, ignore_eos=True, speculative=False)
    assert out.token_ids == plain.token_ids and out.timings.draft_n_accepted > 0


def test_a_converted_directory_has_no_head(folder: Folder) -> None:
    path = str(folder(head=False))
    for drafter in (None, path):
        with pytest.raises(NoEmbeddedMtpHead, match="no head tensors"):
            mlx_spec.load(path, drafter, kind="mtp")


def test_packed_heads_are_loaded_as_they_are(folder: Folder) -> None:
    packed, plain = (mlx_spec.load(str(folder(bits=bits)), kind="mtp", probe=False) for bits in (8, None))
    assert "scales" in packed.drafter.model.input_proj and "scales" not in plain.drafter.model.input_proj
    x = mx.random.normal((1, 2, 64), key=mx.random.key(0))
    outs = [pair.drafter.model(x, x, None) for pair in (packed, plain)]
    assert mx.allclose(*outs, rtol=0, atol=0.1) and not mx.array_equal(*outs)


@pytest.mark.parametrize(
    ("changes", "code", "found", "expected"),
    [
        ({"input_proj.weight": None}, "MM12", f"no {PREFIX}input_proj.weight", "every tensor of the layer"),
        ({"extra.weight": mx.zeros(3)}, "MM12", f"{PREFIX}extra.weight", "tensors of the layer only"),
        ({"mlp.up_proj.weight": mx.zeros((96, 63))}, "MM13", "shape (96, 63)", "(96, 64), by config.json"),
    ],
)
def test_a_head_with_other_tensors_is_refused_before_loading(damaged, changes, code, found, expected) -> None:
    path = str(damaged(changes))
    with pytest.raises(PairError) as refused:
        mlx_spec.load(path, kind="mtp")
    (finding,) = refused.value.findings
    assert (finding.code, finding.found, finding.expected) == (code, found, expected)


def test_a_head_that_is_not_finite_is_refused(damaged) -> None:
    path = str(damaged({"final_layernorm.weight": mx.full((64,), float("nan"))}))
    with pytest.raises(LoadError, match=r"head of .* final_layernorm\.weight"):
        mlx_spec.load(path, kind="mtp")


def test_a_head_of_another_shape_names_every_difference(folder: Folder) -> None:
    other = folder(num_hidden_layers=2, rope_theta=10000)
    with pytest.raises(PairError) as refused:
        mlx_spec.load(str(folder()), str(other))
    told = [(f.code, f.found, f.expected) for f in refused.value.findings]
    assert told == [
        ("MM11", "2 in the drafter", "3, as in the target"),
        ("MM11", "10000 in the drafter", "640000, as in the target"),
    ]


def test_a_head_is_for_mimo_targets_only(folder: Folder) -> None:
    from mlx_spec_mimo.validate import head_card

    class Other(Target):
        model_type = "llama"
        make_states = forward = embed = head = None

    ref = ModelRef("mimo", folder(), json.loads((folder() / "config.json").read_text()))
    with pytest.raises(LoadError, match="'llama', expected a MiMo target"):
        MimoDrafter.load(ref, head_card(ref), Other())


def test_everything_taken_from_core_is_public() -> None:
    """Names are in __all__ of mlx_spec, mlx_spec.state, .checkpoint or .testing; and `Code`."""
    for file in Path(__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "mlx_spec":
                continue
            module = import_module(node.module)
            public = ["Code"] if node.module == "mlx_spec.codes" else module.__all__
            assert {alias.name for alias in node.names} <= set(public), f"{file.name}: {ast.unparse(node)}"


def test_the_layout_is_that_of_a_published_checkpoint(folder: Folder) -> None:
    index = json.loads((folder() / "model.safetensors.index.json").read_text())["weight_map"]
    head = {name.removeprefix("model.mtp_layers.0.") for name in index if name.startswith("model.mtp_layers.0.")}
    assert {"token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight", "final_layernorm.weight"} < head
    assert len(set(index.values())) == 2 and all(name.startswith(("model.", "lm_head.")) for name in index)
