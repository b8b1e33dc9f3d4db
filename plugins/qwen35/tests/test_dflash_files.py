"""What a DFlash directory is, how wide it runs, and everything that can be wrong with it, from files alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from qwen35_oracles.dflash_ours import open_ref, unpacked

import mlx_spec
from mlx_spec.errors import Finding, LoadError, PairError, UsageError
from mlx_spec.loading import choose_drafter, load_target, validate_pair
from mlx_spec.registry import CORE
from mlx_spec.width import resolve_block_size
from mlx_spec_qwen35 import plugin
from mlx_spec_qwen35.codes import CODES
from mlx_spec_qwen35.dflash import DFlashDrafter
from mlx_spec_qwen35.dflash_config import DFlashConfig, dflash_card, dflash_config, parsed, spread
from mlx_spec_qwen35.tiny import write_tiny

Edit = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    made: dict[str, tuple[Path, Path]] = {}

    def write(drafter: str) -> tuple[Path, Path]:
        if drafter not in made:
            folder = tmp_path_factory.mktemp(drafter)
            made[drafter] = write_tiny(folder, 3, drafter=drafter, block_size=8, sliding=True)
        return made[drafter]

    return write


@pytest.fixture
def edited(written: Any, tmp_path: Path) -> Edit:
    """edited(drafter, tensors=..., **keys): a copy whose config.json and tensors were changed.

    Keys with `__` for a dot; `...` removes one. `tensors` takes the tensors and returns others.
    """

    def edit(drafter: str = "dflash", tensors: Any = None, **keys: Any) -> tuple[Path, Path]:
        target, source = written(drafter)
        copy = tmp_path / "copy"
        shutil.copytree(source, copy)
        config = json.loads((copy / "config.json").read_text())
        for dotted, value in keys.items():
            *parents, key = dotted.split("__")
            place = config
            for parent in parents:
                place = place[parent]
            if value is ...:
                place.pop(key, None)
            else:
                place[key] = value
        (copy / "config.json").write_text(json.dumps(config))
        if tensors is not None:
            files = sorted(copy.glob("*.safetensors"))
            held = {name: value for file in files for name, value in mx.load(str(file)).items()}
            for file in [*files, *copy.glob("*.index.json")]:
                file.unlink()
            mx.save_safetensors(str(copy / "model.safetensors"), tensors(held), {"format": "pt"})
        return target, copy

    return edit


def findings(dirs: tuple[Path, Path]) -> list[Finding]:
    target, drafter = map(open_ref, dirs)
    card = dflash_card(drafter)
    assert card is not None
    return plugin.spec_validate_pair(target=target, drafter=drafter, card=card) or []


# -- what it is ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["dflash", "dflash2"])
@pytest.mark.parametrize("model_type", ["qwen3", "llama", "qwen3_5_text", "something_else"])
def test_dflash_config_makes_a_drafter_whatever_model_type_says(edited: Edit, drafter: str, model_type: Any) -> None:
    target, copy = edited(drafter, model_type=model_type)
    choice = choose_drafter(str(copy), None, {}, open_ref(target))
    assert choice is not None
    assert (choice.kind, choice.owner, choice.card.extra) == ("dflash", "qwen35", {"layout": drafter})
    assert validate_pair(open_ref(target), choice) == []


def test_dflash2_is_known_by_its_keys_as_well(edited: Edit) -> None:
    _, copy = edited("dflash2", architectures=...)
    assert dflash_card(open_ref(copy)).extra == {"layout": "dflash2"}  # type: ignore[union-attr]


def test_a_kind_that_contradicts_the_directory_is_refused(written: Any) -> None:
    target, drafter = written("dflash")
    with pytest.raises(UsageError, match="mtp for .*, a drafter of kind dflash") as caught:
        choose_drafter(str(drafter), "mtp", {}, open_ref(target))
    assert caught.value.code == "U23"
    with pytest.raises(UsageError, match="dflash for .*a drafter of kind dflash") as caught:
        choose_drafter(str(target), "dflash", {}, open_ref(target))
    assert caught.value.code == "U24"


def test_a_drafter_given_as_the_model_is_explained(written: Any) -> None:
    _, drafter = written("dflash")
    with pytest.raises(LoadError, match="--draft-model"):
        load_target(open_ref(drafter))


@pytest.mark.parametrize(
    "sign", [{"dflash_config__projector_type": "dspark"}, {"dflash_config__markov_rank": 8}], ids=str
)
def test_dspark_is_refused_by_name(edited: Edit, sign: dict[str, Any]) -> None:
    target, copy = edited(**sign)
    choice = choose_drafter(str(copy), None, {}, open_ref(target))
    assert choice is not None and choice.owner == CORE
    with pytest.raises(PairError, match="DSpark") as caught:
        validate_pair(open_ref(target), choice)
    assert "QW54" in [finding.code for finding in caught.value.findings]
    with pytest.raises(UsageError, match="a drafter of kind dflash"):
        choose_drafter(str(copy), "dflash", {}, open_ref(target))


# -- how wide it runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafter", "keys", "width", "cap"),
    [
        ("dflash", {}, 8, None),
        ("dflash", {"block_size": ...}, 16, None),
        ("dflash", {"dflash_config__block_size": 6}, 6, None),
        ("dflash", {"dflash_config__runtime_block_size": 3}, 3, 3),
        ("dflash2", {}, 5, 5),
        ("dflash2", {"dflash_config__runtime_block_size": ...}, 5, 5),
        ("dflash2", {"dflash_config__runtime_block_size": ..., "block_size": 4}, 4, 4),
        ("dflash2", {"dflash_config__runtime_block_size": 7}, 7, 7),
    ],
)
def test_the_file_decides_the_width_and_the_operator_within_its_cap(
    edited: Edit, drafter: str, keys: dict[str, Any], width: int, cap: int | None
) -> None:
    ref = open_ref(edited(drafter, **keys)[1])
    card = dflash_card(ref)
    assert card is not None
    chosen = resolve_block_size(None, card, "dflash", {})
    assert (chosen.L, chosen.source, card.max_block_size) == (width, "drafter", cap)
    assert dflash_config(ref.config, ref.path).cap == cap
    assert resolve_block_size((2, "--draft-block-size"), card, "dflash", {}).L == 2
    if cap is not None:
        with pytest.raises(UsageError, match="cannot exceed"):
            resolve_block_size((cap + 1, "--draft-block-size"), card, "dflash", {})


# -- what can be wrong -----------------------------------------------------------------------------------


def without(name: str) -> Any:
    return lambda held: {key: value for key, value in held.items() if key != name}


def also(name: str, *shape: int) -> Any:
    return lambda held: {**held, name: mx.zeros(shape)}


WRONG = [
    ("dflash", "QW40", {"hidden_size": "64"}, "hidden_size", "str '64'"),
    ("dflash", "QW40", {"num_attention_heads": ...}, "num_attention_heads", "nothing"),
    ("dflash", "QW40", {"dflash_config__mask_token_id": ...}, "mask_token_id", "nothing"),
    ("dflash", "QW40", {"dflash_config__attention_sink_bias": True}, "attention_sink_bias", "bool True"),
    ("dflash", "QW40", {"attention_bias": True}, "attention_bias", "bool True"),
    ("dflash", "QW42", {"hidden_size": 128}, "hidden_size", "128 in the drafter"),
    ("dflash", "QW43", {"vocab_size": 640}, "vocab_size", "640 in the drafter"),
    ("dflash", "QW44", {"num_target_layers": 12}, "num_target_layers", "12 in the drafter"),
    ("dflash", "QW44", {"num_target_layers": ..., "dflash_config__target_layer_ids": [1, 3, 8]}, "ids", "[1, 3, 8]"),
    ("dflash", "QW45", {"dflash_config__target_layer_ids": [1, 3, 8]}, "ids", "[1, 3, 8]"),
    ("dflash", "QW45", {"dflash_config__target_layer_ids": [3, 3, 5]}, "target_layer_ids", "[3, 3, 5]"),
    ("dflash", "QW45", {"dflash_config__target_layer_ids": [-1, 3, 5]}, "target_layer_ids", "[-1, 3, 5]"),
    ("dflash", "QW46", {"dflash_config__mask_token_id": 320}, "mask_token_id", "320"),
    ("dflash", "QW46", {"dflash_config__mask_token_id": -1}, "mask_token_id", "-1"),
    ("dflash", "QW47", {"block_size": 1}, "block_size", "L=1, anchor counted"),
    ("dflash", "QW47", {"dflash_config__runtime_block_size": 1}, "runtime_block_size", "L=1"),
    ("dflash", "QW47", {"dflash_config__runtime_block_size": 9}, "runtime_block_size", "L=9"),
    ("dflash", "QW48", {"layer_types": ["full_attention"] * 3}, "layer_types", "3 entries"),
    ("dflash", "QW48", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types", "'linear_attention'"),
    ("dflash", "QW48", {"sliding_window": ...}, "sliding_window", "nothing"),
    ("dflash", "QW49", {"num_attention_heads": 3}, "num_attention_heads", "3"),
    ("dflash", "QW50", {"tensors": also("lm_head.weight", 320, 64)}, "file", "an own lm_head"),
    ("dflash", "QW50", {"tensors": also("model.embed_tokens.weight", 320, 64)}, "file", "an own embed_tokens"),
    ("dflash", "QW51", {"tensors": without("fc.weight")}, "tensors", "no fc.weight"),
    ("dflash", "QW51", {"tensors": also("layers.2.mlp.up_proj.weight", 96, 64)}, "tensors", "unexpected layers.2.mlp"),
    ("dflash", "QW51", {"tensors": also("model.norm.weight", 64)}, "tensors", "model.norm.weight under two names"),
    ("dflash", "QW52", {"tensors": also("fc.weight", 64, 128)}, "tensor fc.weight", "[64, 128]"),
    ("dflash2", "QW51", {"tensors": without("candidate_selector.successor_codebook")}, "", "no candidate_selector"),
    ("dflash2", "QW52", {"tensors": also("layers.0.mlp_conv.base_kernel", 2, 2, 64)}, "", "[2, 2, 64]"),
    ("dflash2", "QW55", {"dflash_config__selector_rank": ...}, "selector_rank", "nothing"),
    ("dflash2", "QW55", {"dflash_config__conv_group_size": 24}, "conv_group_size", "24"),
    ("dflash2", "QW55", {"dflash_config__selector_top_k": 321}, "selector_top_k", "321"),
    ("dflash2", "QW55", {"dflash_config__causal": True}, "causal", "true"),
]  # fmt: skip


@pytest.mark.parametrize(("drafter", "code", "changes", "what", "found"), WRONG, ids=lambda value: str(value)[:40])
def test_a_drafter_that_cannot_be_used_has_one_clear_finding(
    edited: Edit, drafter: str, code: str, changes: dict[str, Any], what: str, found: str
) -> None:
    said = [f for f in findings(edited(drafter, **changes)) if f.code == code]
    assert [f.severity for f in said] == ["error"]
    assert what in said[0].subject and found in said[0].found and said[0].expected and said[0].next_step


def test_a_target_of_another_family_is_named(written: Any) -> None:
    _, drafter = written("dflash")
    card = dflash_card(open_ref(drafter))
    said = plugin.spec_validate_pair(target=open_ref(drafter), drafter=open_ref(drafter), card=card)
    assert said is not None and [f.code for f in said] == ["QW41"] and "'qwen3'" in said[0].found


def test_a_shorter_context_is_a_warning(edited: Edit) -> None:
    said = findings(edited(max_position_embeddings=2048))
    assert [(f.code, f.severity) for f in said] == [("QW58", "warning")]


def test_every_code_of_the_table_is_tried() -> None:
    tried = {code for _, code, *_ in WRONG} | {"QW41", "QW53", "QW54", "QW56", "QW58"}
    assert tried == {c.code for c in CODES if "QW40" <= c.code <= "QW59"}


# -- reading and loading ---------------------------------------------------------------------------------


def test_other_spellings_of_a_config_mean_the_same(written: Any) -> None:
    config = json.loads((written("dflash")[1] / "config.json").read_text())
    plain, own = parsed(config), config["dflash_config"]
    assert isinstance(plain, DFlashConfig)
    for change in (
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
        {"block_size": 3, "dflash_config": {**own, "block_size": 8}},
        {"rope_scaling": None, "unknown": 1},
    ):
        assert parsed({**config, **change}) == plain
    unlisted = parsed({**config, "dflash_config": {"mask_token_id": own["mask_token_id"]}})
    assert isinstance(unlisted, DFlashConfig) and unlisted.target_layer_ids == spread(2, 8)
    scaled = parsed({**config, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}})
    assert isinstance(scaled, DFlashConfig) and scaled.rope_scaling == {"rope_type": "yarn", "factor": 2.0}
    asked = parsed({**config, "dflash_query_causal": True})
    assert isinstance(asked, DFlashConfig) and asked.causal is True


@pytest.mark.parametrize(("count", "layers", "ids"), [(1, 32, [16]), (5, 32, [1, 8, 15, 22, 29]), (3, 8, [1, 3, 5])])
def test_layers_are_spread_where_a_file_names_none(count: int, layers: int, ids: list[int]) -> None:
    assert spread(count, layers) == ids


@pytest.mark.parametrize("drafter", ["dflash", "dflash2"])
def test_names_with_model_in_front_and_codebooks_as_modules_load_alike(
    edited: Edit, written: Any, drafter: str
) -> None:
    def renamed(held: dict[str, mx.array]) -> dict[str, mx.array]:
        return {f"model.{n}.weight" if n.endswith("codebook") else f"model.{n}": value for n, value in held.items()}

    dirs = edited(drafter, renamed)
    assert findings(dirs) == []
    target = load_target(open_ref(dirs[0]))
    one, other = (load(folder, target) for folder in (written(drafter)[1], dirs[1]))
    assert weights(one) == weights(other)


def test_a_quantised_drafter_is_checked_and_loads(tmp_path: Path) -> None:
    dirs = write_tiny(tmp_path, 4, drafter="dflash2", bits=4)
    assert findings(dirs) == []  # type: ignore[arg-type]
    target, drafter = dirs
    loaded = load(drafter, load_target(open_ref(target)))  # type: ignore[arg-type]
    assert loaded.model.fc.bits == 4 and loaded.model.fc.group_size == 32
    file = drafter / "config.json"  # type: ignore[operator]
    config = json.loads(file.read_text())
    for table in ({**config["quantization"], "bits": 8}, None):
        file.write_text(json.dumps({**config, "quantization": table}))
        said = findings(dirs)  # type: ignore[arg-type]
        assert said and {f.code for f in said} == {"QW53"}


def load(folder: Path, target: Any) -> DFlashDrafter:
    ref = open_ref(folder)
    card = dflash_card(ref)
    assert card is not None
    return DFlashDrafter.load(ref, card, target)


def weights(drafter: DFlashDrafter) -> dict[str, Any]:
    from mlx.utils import tree_flatten

    return {name: value.tolist() for name, value in tree_flatten(drafter.model.parameters())}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dense_drafter_is_packed_and_cast_to_the_targets_dtype(tmp_path: Path, dtype: str) -> None:
    dirs = write_tiny(tmp_path, 4, drafter="dflash2", dtype=dtype)
    ref = open_ref(dirs[1])  # type: ignore[arg-type]
    (ref.path / "config.json").write_text(json.dumps({**ref.config, "dtype": "float16"}))
    target = load_target(open_ref(dirs[0]))
    packed = load(ref.path, target)
    fc, tables = packed.model.fc, packed.model.candidate_selector
    assert (fc.bits, fc.group_size, fc.scales.dtype) == (4, 64, getattr(mx, dtype))
    assert "scales" not in tables.successor_codebook and tables.successor_codebook.weight.dtype == getattr(mx, dtype)
    assert "scales" not in packed.model.layers[0].mlp.down_proj  # 96 columns are no whole number of groups
    with unpacked():
        plain = load(ref.path, target)
    assert "scales" not in plain.model.fc and plain.model.fc.weight.dtype == getattr(mx, dtype)


def test_a_drafter_is_not_loaded_for_another_kind_of_target(written: Any) -> None:
    class Other:
        model_type = "llama"

    with pytest.raises(LoadError, match="llama") as caught:
        load(written("dflash")[1], Other())
    assert caught.value.code == "QW56"


def test_loading_without_a_pairing_names_the_same_faults(edited: Edit) -> None:
    target, copy = edited(tensors=without("fc.weight"))
    loaded = load_target(open_ref(target))
    with pytest.raises(LoadError, match=r"no fc\.weight") as caught:
        load(copy, loaded)
    assert caught.value.code == "QW51"
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "hidden_size": None}))
    with pytest.raises(LoadError, match="hidden_size") as caught:
        load(copy, loaded)
    assert caught.value.code == "QW40"


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 6])
def test_a_tiny_drafter_reads_layers_that_its_target_has(tmp_path: Path, layers: int) -> None:
    target, drafter = write_tiny(tmp_path, 1, drafter="dflash", num_hidden_layers=layers, full_attention_interval=2)
    assert mlx_spec.load(str(target), str(drafter), probe=False).plan.active
