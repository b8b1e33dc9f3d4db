"""config.json: types, missing keys, spellings, and values no target can have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_spec.errors import LoadError
from mlx_spec_qwen35.config import FULL, LINEAR, media_ids, target_config
from mlx_spec_qwen35.tiny import EXPERTS, TEXT, write_tiny

HERE = Path("model")
ROPE = TEXT["rope_parameters"]


def read(**changes: Any) -> Any:
    """The text configuration of a tiny target with changes; `...` removes a key."""
    values = {"model_type": "qwen3_5_text", **TEXT, **changes}
    return target_config({k: v for k, v in values.items() if v is not ...}, HERE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size in config.json of model: found str '64', expected a valid integer"),
        ({"hidden_size": 64.0}, "found float 64.0, expected a valid integer"),
        ({"num_attention_heads": True}, "found bool True, expected a valid integer"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim .*found int 0, expected greater than 0"),
        ({"linear_conv_kernel_dim": 1}, "found int 1, expected greater than 1"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps .*found str '1e-6', expected a valid number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings .*found str 'no', expected a valid boolean"),
        ({"linear_num_value_heads": 5}, r"found 5, expected a multiple of linear_num_key_heads \(2\)"),
        ({"num_attention_heads": 3}, r"found 3, expected a multiple of num_key_value_heads \(2\)"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step .*found int 2, expected 1"),
        ({"hidden_act": "gelu"}, "hidden_act .*found str 'gelu', expected 'silu'"),
        ({"output_gate_type": "tanh"}, "output_gate_type .*found str 'tanh', expected 'silu' or 'swish'"),
        ({"attn_output_gate": False}, "attn_output_gate .*found bool False, expected True"),
        ({"rope_parameters": [1]}, r"rope_parameters .*found list \[1\], expected an object"),
        (
            {"rope_parameters": {**ROPE, "mrope_interleaved": False}},
            "rope_parameters.mrope_interleaved .*found bool False, expected True",
        ),
        ({"rope_parameters": {**ROPE, "rope_theta": "1e4"}}, "rope_parameters.rope_theta .*found str '1e4'"),
        (
            {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.1}},
            "found 3 of 32 dimensions, expected an even number of rotated dimensions",
        ),
        ({"num_experts": 4}, "num_experts_per_tok .*found nothing, expected a positive integer, since num_experts"),
        ({**EXPERTS, "num_experts_per_tok": 7}, "num_experts_per_tok .*found 7, expected at most 6"),
        ({**EXPERTS, "norm_topk_prob": 1}, "norm_topk_prob .*found int 1, expected a valid boolean"),
        ({"layer_types": FULL}, "layer_types .*found str 'full_attention', expected a list of"),
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types .*expected a list of full_attention and"),
        (
            {"layer_types": [LINEAR, FULL] * 4},
            r"found 8 entries, full_attention at 1, expected 8 entries, full_attention at every 4th",
        ),
        ({"layer_types": [LINEAR] * 3 + [FULL]}, "found 4 entries, none at 4, expected 8 entries"),
        ({"text_config": [1]}, r"text_config .*found list \[1\], expected an object"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_key_is_named_with_what_was_found_and_expected(changes: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        read(**changes)
    assert caught.value.code == "QW01"
    assert caught.value.next_step


def test_a_key_of_a_wrapper_is_named_with_its_place() -> None:
    with pytest.raises(LoadError, match=r"text_config\.head_dim in config.json of model: found str '8'"):
        target_config({"model_type": "qwen3_5", "text_config": {**TEXT, "head_dim": "8"}}, HERE)


def test_missing_keys_mean_what_mlx_lm_takes_them_to_mean() -> None:
    from mlx_lm.models.qwen3_5 import TextModelArgs

    text = target_config({"model_type": "qwen3_5_text"}, HERE)
    args = TextModelArgs.from_dict({"model_type": "qwen3_5_text"})
    ours = text.mlx_lm_args()
    names = set(vars(args)) & set(ours) - {"rope_parameters"}
    assert len(names) > 20 and {name: ours[name] for name in names} == {name: getattr(args, name) for name in names}
    assert {key: ours["rope_parameters"][key] for key in args.rope_parameters} == args.rope_parameters


def test_null_counts_as_absent_and_the_wrapper_fills_in() -> None:
    section = {**TEXT, "vocab_size": None, "tie_word_embeddings": None, "head_dim": None}
    text = target_config(
        {"model_type": "qwen3_5", "text_config": section, "vocab_size": 99, "tie_word_embeddings": True}, HERE
    )
    assert (text.vocab_size, text.tie_word_embeddings, text.head_dim) == (99, True, 16)
    both = {"text_config": TEXT, "tie_word_embeddings": True, "vocab_size": 99}
    text = target_config({"model_type": "qwen3_5", **both}, HERE)
    assert (text.vocab_size, text.tie_word_embeddings) == (320, False)


def test_layer_types_alone_say_where_full_attention_is() -> None:
    kinds = [LINEAR, LINEAR, FULL] * 2 + [LINEAR]
    text = read(full_attention_interval=..., layer_types=kinds, num_hidden_layers=7)
    assert text.full_attention_interval == 3 and list(text.layer_types) == kinds


def test_both_spellings_of_the_rotation() -> None:
    spelled = {"type" if key == "rope_type" else key: value for key, value in ROPE.items()}
    assert read(rope_parameters=spelled) == read()
    old = read(rope_parameters=..., rope_theta=10000.0, partial_rotary_factor=0.25)
    assert (old.rope_parameters.rope_theta, old.rotary_dims) == (10000.0, 8)
    scaled = read(rope_parameters={**ROPE, "rope_type": "yarn", "factor": 4.0})
    assert scaled.mlx_lm_args()["rope_parameters"] == {
        **{key: value for key, value in ROPE.items() if key != "rope_type"},
        "type": "yarn",
        "factor": 4.0,
    }


def test_widths_of_a_linear_layer() -> None:
    text = read()
    assert (text.key_dim, text.value_dim, text.conv_dim) == (64, 96, 224)


def test_placeholders_are_those_of_a_checkpoint_with_a_tower() -> None:
    assert media_ids({"vision_config": {"depth": 1}}) == {248056: "image", 248057: "video"}
    assert media_ids({"image_token_id": 4, "video_token_id": 5}) == {4: "image", 5: "video"}
    assert media_ids({"model_type": "qwen3_5_text"}) == {}


def test_the_readme_names_every_option_of_tiny_checkpoints() -> None:
    from inspect import signature

    text = (Path(__file__).parents[1] / "README.md").read_text()
    table = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = {name.strip().strip("`") for cell in table for name in cell.split(",")}
    assert named == {*signature(write_tiny).parameters} - {"out", "seed", "config"}
