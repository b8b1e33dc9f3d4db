"""Finding a head, the form of its norms, experts in any layout; and reading nothing but the head."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from qwen35_oracles.mtp_ours import Ours, open_ref

import mlx_spec
from mlx_spec import tensorfiles
from mlx_spec.errors import LoadError, NoEmbeddedMtpHead
from mlx_spec.testing import write_weights
from mlx_spec_qwen35.mtp_config import head_card
from mlx_spec_qwen35.mtp_files import find_head, norm_form

MakePair = Callable[..., tuple[Path, Path]]


@pytest.fixture(autouse=True)
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_spec.settings import reset_settings

    monkeypatch.setenv("MLX_SPEC_QUANTIZE_DRAFTER", "0")
    reset_settings()


@pytest.fixture
def copied(mtp_dirs: MakePair, tmp_path: Path) -> Callable[..., Path]:
    """copied(change, layout, **options): a target with its own head, tensors changed by change(dict)."""

    def make(change: Callable[[dict[str, mx.array]], Any] = dict, layout: str | None = "mlx", **options: Any) -> Path:
        source = mtp_dirs(drafter="own", **options)[0]
        path = tmp_path / "target"
        shutil.copytree(source, path)
        weights: dict[str, mx.array] = {}
        for file in sorted(path.glob("*.safetensors*")):
            if file.suffix == ".safetensors":
                weights |= mx.load(str(file))
        mx.eval(weights)
        for file in path.glob("*.safetensors*"):
            file.unlink()
        weights = change(weights) or weights
        if layout is None:
            mx.save_safetensors(str(path / "model.safetensors"), weights)
        else:
            write_weights(path, weights, layout=layout)
        return path

    return make


def norms_of(path: Path) -> dict[str, list[float]]:
    """The norms of a loaded head, as used."""
    head = Ours(path, path).drafter.model.head
    return {name: value.tolist() for name, value in tree_flatten(head.parameters()) if "norm" in name}


def lowered(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    return {n: v - 1 if "mtp." in n and "norm" in n else v for n, v in weights.items()}


def close(one: dict[str, list[float]], other: dict[str, list[float]]) -> bool:
    pairs = [(a, b) for name in one for a, b in zip(one[name], other[name], strict=True)]
    return len(one) == 7 and one.keys() == other.keys() and max(abs(a - b) for a, b in pairs) < 1e-6


# -- norms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "layout", "form", "reason"),
    [
        ("weights", "mlx", "weights", "labelled as converted for MLX"),
        ("deltas", "pt", "deltas", "as published (labelled pt)"),
        ("weights", None, "weights", "no label, and the values look like weights"),
        ("deltas", None, "deltas", "no label, and the values look like deltas"),
    ],
)
def test_the_file_decides_how_norms_are_stored(
    mtp_dirs: MakePair, copied: Callable[..., Path], stored: str, layout: str | None, form: str, reason: str
) -> None:
    path = copied(lowered if stored == "deltas" else dict, layout)
    files = find_head(open_ref(path))
    assert files is not None
    found = norm_form(files)
    assert (found.form, found.doubt) == (form, "")
    assert reason in found.reason
    assert head_card(open_ref(path)).extra["norms"] == f"{form}: {found.reason}"
    assert close(norms_of(path), norms_of(mtp_dirs(drafter="own")[0]))


@pytest.mark.parametrize(("stored", "layout"), [("deltas", "mlx"), ("weights", "pt")])
def test_a_label_that_the_values_contradict_is_told_and_can_be_overruled(
    mtp_dirs: MakePair, copied: Callable[..., Path], stored: str, layout: str
) -> None:
    path = copied(lowered if stored == "deltas" else dict, layout)
    files = find_head(open_ref(path))
    assert files is not None
    assert norm_form(files).doubt == f"the values look like {stored}"
    pair = mlx_spec.load(str(path), kind="mtp", probe=False)
    assert [f.code for f in pair.plan.findings] == ["QW33"]
    assert f'{{"mtp_norms": "{stored}"}}' in str(pair.plan.findings[0])
    pair = mlx_spec.load(str(path), kind="mtp", probe=False, options={"mtp_norms": stored})
    assert pair.plan.findings == []
    assert pair.drafter.card.extra["norms"] == f"{stored}: the option mtp_norms"
    right = Ours(*mtp_dirs(drafter="own")).drafter.model.head.norm.weight
    assert mx.allclose(pair.drafter.model.head.norm.weight, right, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("label", "form"), [("pt", "deltas"), ("mlx", "weights")])
def test_a_drafter_directory_that_kept_the_prefix_is_read_by_its_label(
    mtp_dirs: MakePair, tmp_path: Path, label: str, form: str
) -> None:
    target, head = mtp_dirs(drafter="mtp")
    path = Path(shutil.copytree(head, tmp_path / "head"))
    weights = {
        f"mtp.{n}": v - (form == "deltas" and "norm" in n) for n, v in mx.load(str(path / "model.safetensors")).items()
    }
    mx.eval(weights)
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": label})
    assert norm_form(find_head(open_ref(path))).form == form
    right = Ours(target, head).drafter.model.head.norm.weight
    assert mx.allclose(Ours(target, path).drafter.model.head.norm.weight, right, rtol=0, atol=1e-6)


def test_values_are_read_in_every_dtype_of_norms(copied: Callable[..., Path]) -> None:
    for dtype in (mx.bfloat16, mx.float16):
        path = copied(lambda w, d=dtype: {n: v.astype(d) for n, v in lowered(w).items()}, None)
        assert norm_form(find_head(open_ref(path))).form == "deltas"
        shutil.rmtree(path)


# -- places ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp."])
def test_a_head_is_found_under_every_prefix(mtp_dirs: MakePair, copied: Callable[..., Path], prefix: str) -> None:
    path = copied(lambda w: {n.replace("mtp.", prefix) if n.startswith("mtp.") else n: v for n, v in w.items()})
    assert head_card(open_ref(path)).extra["place"] == "shards"
    assert close(norms_of(path), norms_of(mtp_dirs(drafter="own")[0]))
    assert mlx_spec.load(str(path), kind="mtp", probe=False).plan.active


@pytest.mark.parametrize("name", ["model-mtp-head.safetensors", "mtp.safetensors"])
@pytest.mark.parametrize("prefix", ["mtp.", ""])
def test_a_head_in_a_file_of_its_own(mtp_dirs: MakePair, copied: Callable[..., Path], name: str, prefix: str) -> None:
    head: dict[str, mx.array] = {}

    def part(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        head.update({n.replace("mtp.", prefix): v for n, v in weights.items() if n.startswith("mtp.")})
        return {n: v for n, v in weights.items() if not n.startswith("mtp.")}

    path = copied(part)
    with pytest.raises(NoEmbeddedMtpHead, match=r"\(config\.json declares 1 layer\)"):
        mlx_spec.load(str(path), kind="mtp")
    mx.save_safetensors(str(path / name), head)
    assert head_card(open_ref(path)).extra["place"] == "file"
    assert close(norms_of(path), norms_of(mtp_dirs(drafter="own")[0]))
    assert mlx_spec.load(str(path), str(path), probe=False).plan.active


def test_two_heads_are_refused(copied: Callable[..., Path]) -> None:
    path = copied(lambda w: w | {"model.mtp.fc.weight": mx.zeros((64, 128))})
    with pytest.raises(
        LoadError, match=r"found (mtp|model\.mtp)\.fc\.weight and (model\.)?mtp\.fc\.weight, expected each"
    ):
        find_head(open_ref(path))


def test_only_the_head_is_read_and_kept(copied: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two shards the one with the trunk is not opened again, and no trunk is held."""
    path = copied()
    weights = dict(mx.load(str(path / "model.safetensors")))
    mx.eval(weights)
    (path / "model.safetensors").unlink()
    placed = {name: f"model-0000{1 + name.startswith('mtp.')}-of-00002.safetensors" for name in weights}
    for file in set(placed.values()):
        mx.save_safetensors(
            str(path / file), {n: v for n, v in weights.items() if placed[n] == file}, {"format": "mlx"}
        )
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    pair = Ours(path, path)
    opened: list[str] = []
    real = tensorfiles._load_file
    monkeypatch.setattr(tensorfiles, "_load_file", lambda file: (opened.append(file.name), real(file))[1])
    drafter = pair.load_head(path)
    assert opened == ["model-00002-of-00002.safetensors"]
    held = sum(value.nbytes for _, value in tree_flatten(drafter.model.parameters()))
    assert held == sum(value.nbytes for name, value in weights.items() if name.startswith("mtp."))


# -- experts ---------------------------------------------------------------------------------------------


def split_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Fused experts of the head -> one tensor per expert, as some published files have them."""
    out = {}
    for name, value in weights.items():
        if "mtp." not in name or ".experts." not in name:
            out[name] = value
            continue
        base = name.partition("experts.")[0] + "experts"
        parts = (
            {"down": value} if "down" in name else dict(zip(("gate", "up"), mx.split(value, 2, axis=1), strict=True))
        )
        out |= {f"{base}.{e}.{k}_proj.weight": v[e] for k, v in parts.items() for e in range(v.shape[0])}
    return out


def test_experts_one_by_one_fused_or_stacked_are_the_same_head(mtp_dirs: MakePair, copied: Callable[..., Path]) -> None:
    stacked = Ours(*mtp_dirs(drafter="mtp", variant="moe")).drafter.model.head
    fused = Ours(*mtp_dirs(drafter="own", variant="moe", raw=True)).drafter.model.head
    path = copied(split_experts, "pt", variant="moe", raw=True)
    single = Ours(path, path).drafter.model.head
    for part in ("gate_proj", "up_proj", "down_proj"):
        one, two, three = (h.layers[0].mlp.switch_mlp[part].weight for h in (stacked, fused, single))
        assert mx.array_equal(one, two) and mx.array_equal(one, three)


def test_a_missing_expert_is_named(copied: Callable[..., Path]) -> None:
    gone = "mtp.layers.0.mlp.experts.2.up_proj.weight"
    path = copied(lambda w: {n: v for n, v in split_experts(w).items() if n != gone}, "pt", variant="moe", raw=True)
    with pytest.raises(LoadError, match=r"switch_mlp.up_proj.weight: found no expert 2, expected experts 0 to 5"):
        Ours(path, path)


# -- on load ---------------------------------------------------------------------------------------------


def test_matrices_are_packed_on_load_unless_forbidden(mtp_dirs: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_spec.settings import reset_settings

    dirs = mtp_dirs(drafter="mtp", variant="moe")
    plain = Ours(*dirs).drafter
    assert plain.card.extra["matrices"] == "not packed"
    monkeypatch.delenv("MLX_SPEC_QUANTIZE_DRAFTER")
    reset_settings()
    packed = Ours(*dirs).drafter
    head = packed.model.head
    assert (head.fc.bits, head.fc.group_size) == (4, 64)
    assert (head.layers[0].mlp.gate.bits, head.layers[0].mlp.gate.group_size) == (8, 64)
    assert head.layers[0].mlp.switch_mlp.up_proj.bits == 4
    assert "scales" not in head.layers[0].mlp.switch_mlp.down_proj  # 32 wide: no group of 64 fits
    assert packed.card.extra["matrices"] == "12 packed to 4 bits in groups of 64"
    stored = Ours(*mtp_dirs(drafter="mtp", bits=8)).drafter
    assert stored.model.head.fc.bits == 8
    assert stored.card.extra["matrices"] == "8 as stored"


def test_floats_take_the_targets_dtype(mtp_dirs: MakePair) -> None:
    target = Ours(*mtp_dirs(drafter="own", dtype="bfloat16"))
    drafter = target.load_head(mtp_dirs(drafter="mtp")[1])
    assert {drafter.model.head.fc.weight.dtype, drafter.model.head.norm.weight.dtype} == {mx.bfloat16}
    packed = target.load_head(mtp_dirs(drafter="mtp", bits=4)[1]).model.head.fc
    assert (packed.weight.dtype, packed.scales.dtype) == (mx.uint32, mx.bfloat16)


def test_a_nan_is_named(copied: Callable[..., Path]) -> None:
    path = copied(lambda w: w | {"mtp.norm.weight": mx.full((64,), mx.nan)})
    with pytest.raises(LoadError, match=r"MTP head of target: found NaN or infinite values in norm.weight"):
        Ours(path, path)


def test_a_drafter_directory_without_text_config_is_refused(mtp_dirs: MakePair, tmp_path: Path) -> None:
    path = Path(shutil.copytree(mtp_dirs(drafter="mtp")[1], tmp_path / "head"))
    config = json.loads((path / "config.json").read_text())
    del config["text_config"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=r"text_config in config.json of .*: found None, expected an object"):
        head_card(open_ref(path))
