"""What a head and a target that do not fit are told, from files alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from qwen35_oracles.mtp_ours import open_ref

from mlx_spec.errors import Finding, LoadError, PairError, UsageError
from mlx_spec.loading import choose_drafter, load_target, validate_pair
from mlx_spec_qwen35.mtp_config import head_card
from mlx_spec_qwen35.mtp_validate import validate

MakePair = Callable[..., tuple[Path, Path]]


@pytest.fixture
def findings(mtp_dirs: MakePair, tmp_path: Path) -> Callable[..., list[Finding]]:
    """findings(tensors=, text=, top=, **options): the pair with changes in the drafter, validated."""

    def ask(
        tensors: Callable[[dict[str, mx.array]], dict[str, mx.array]] | None = None,
        text: dict[str, Any] | None = None,
        top: dict[str, Any] | None = None,
        **options: Any,
    ) -> list[Finding]:
        target, source = mtp_dirs(**{"drafter": "mtp", **options})
        path = Path(shutil.copytree(source, tmp_path / "head"))
        config = json.loads((path / "config.json").read_text())
        config["text_config"] |= text or {}
        (path / "config.json").write_text(json.dumps(config | (top or {})))
        if tensors is not None:
            weights = dict(mx.load(str(path / "model.safetensors")))
            mx.eval(weights)
            mx.save_safetensors(str(path / "model.safetensors"), tensors(weights), {"format": "mlx"})
        one, two = open_ref(target), open_ref(path)
        card = head_card(two)
        assert card is not None
        return validate(one, two, card)

    return ask


def without(*names: str) -> Callable[[dict[str, mx.array]], dict[str, mx.array]]:
    return lambda weights: {n: v for n, v in weights.items() if n not in names}


def test_a_sound_pair_has_no_findings(findings: Any) -> None:
    assert findings() == []


@pytest.mark.parametrize(
    ("text", "code", "found", "expected"),
    [
        ({"hidden_size": 128}, "QW23", "128 in the drafter", "64, as in the target"),
        ({"vocab_size": 640}, "QW24", "640 in the drafter", "320, as in the target"),
        ({"mtp_use_dedicated_embeddings": True}, "QW29", "True", "False: heads here borrow their target's embedding"),
        ({"num_hidden_layers": 12}, "QW32", "12 in the drafter", "8, as in the target"),
        ({"linear_key_head_dim": 16}, "QW32", "16 in the drafter", "32, as in the target"),
        ({"max_position_embeddings": 1024}, "QW34", "1024 in the drafter", "4096, as in the target"),
        (
            {"model_type": "qwen3_5_moe_text"},
            "QW22",
            "qwen3_5_moe_text in the drafter",
            "qwen3_5_text, as in the target",
        ),
        ({"mtp_num_hidden_layers": 9}, "QW28", "9", "1 to 8 layers"),
        ({"mtp_num_hidden_layers": 2}, "QW28", "1 in the tensors", "2 (mtp_num_hidden_layers), as config.json says"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("QW") else "",
)
def test_a_config_that_does_not_fit(findings: Any, text: dict, code: str, found: str, expected: str) -> None:
    assert (code, found, expected) in [(f.code, f.found, f.expected) for f in findings(text=text)]


def test_another_rotation_is_told_key_by_key(findings: Any, mtp_dirs: MakePair) -> None:
    config = json.loads((mtp_dirs(drafter="mtp")[1] / "config.json").read_text())
    rope = config["text_config"]["rope_parameters"] | {"rope_theta": 1000000.0, "partial_rotary_factor": 0.5}
    told = [(f.code, f.subject.partition(" of ")[0], f.found) for f in findings(text={"rope_parameters": rope})]
    assert told == [
        ("QW31", "rope_parameters.rope_theta", "1000000.0 in the drafter"),
        ("QW31", "rope_parameters.partial_rotary_factor", "0.5 in the drafter"),
    ]


@pytest.mark.parametrize(
    ("tensors", "code", "found"),
    [
        (without("norm.weight"), "QW26", "no norm.weight"),
        (lambda w: w | {"lm_head.weight": mx.zeros((3, 4))}, "QW26", "unexpected lm_head.weight"),
        (lambda w: w | {"fc.weight": mx.zeros((64, 64))}, "QW25", "[64, 64]"),
        (lambda w: w | {"layers.0.self_attn.q_proj.weight": mx.zeros((128, 64))}, "QW27", "[128, 64]"),
        (
            lambda w: w | {"fc.weight_scale_inv": mx.zeros((1, 1))},
            "QW30",
            "fc.weight_scale_inv: FP8 with a scale per block",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("QW") else "",
)
def test_tensors_that_do_not_fit(findings: Any, tensors: Any, code: str, found: str) -> None:
    told = [f for f in findings(tensors=tensors) if f.severity == "error"]
    assert [(f.code, f.found) for f in told] == [(code, found)]


def test_scales_without_biases_need_a_mode(findings: Any) -> None:
    drop = without("fc.biases")
    (told,) = findings(tensors=drop, bits=4)
    assert (told.code, told.found) == ("QW30", "scales without biases")


def test_a_head_in_other_bits_than_config_json_says_is_read_by_its_shapes(findings: Any) -> None:
    assert findings(top={"quantization": {"group_size": 32, "bits": 8}}, bits=4) == []


def test_targets_of_other_families_are_refused(mtp_dirs: MakePair, tmp_path: Path) -> None:
    from mlx_spec.testing import write_tiny

    llama, head = open_ref(write_tiny("llama", tmp_path).target), mtp_dirs(drafter="mtp")[1]
    choice = choose_drafter(str(head), None, {}, llama)
    assert choice is not None
    with pytest.raises(PairError, match="target model_type 'llama' with drafter model_type 'qwen3_5_mtp'"):
        validate_pair(llama, choice)
    from mlx_spec_qwen35.mtp import MtpDrafter

    with pytest.raises(LoadError, match="a target of model_type 'llama', expected a Qwen 3.5 target"):
        MtpDrafter.load(open_ref(head), choice.card, load_target(llama))


def test_an_own_head_of_another_checkpoint_is_held_against_the_target(mtp_dirs: MakePair) -> None:
    """The original as drafter of its conversion fits; that of another width does not."""
    converted = open_ref(mtp_dirs(drafter="mtp", bits=4)[0])
    original = mtp_dirs(drafter="own", raw=True, wrapper=True)[1]
    choice = choose_drafter(str(original), None, {}, converted)
    assert choice is not None and choice.card.model_type == "qwen3_5"
    assert validate_pair(converted, choice) == []
    other = choose_drafter(str(mtp_dirs(drafter="own", num_hidden_layers=4)[1]), "mtp", {}, converted)
    assert other is not None
    with pytest.raises(PairError, match="num_hidden_layers of .*found 4 in the drafter, expected 8"):
        validate_pair(converted, other)


def test_a_drafter_given_as_the_main_model_is_refused(mtp_dirs: MakePair) -> None:
    with pytest.raises(
        LoadError, match=r"found a drafter \(model_type qwen3_5_mtp\).*Pass this directory as --draft-model"
    ):
        load_target(open_ref(mtp_dirs(drafter="mtp")[1]))


def test_a_kind_that_contradicts_the_directory_is_refused(mtp_dirs: MakePair) -> None:
    target, head = mtp_dirs(drafter="mtp")
    with pytest.raises(UsageError, match="full-model for .*, a drafter of kind mtp"):
        choose_drafter(str(head), "full-model", {}, open_ref(target))
