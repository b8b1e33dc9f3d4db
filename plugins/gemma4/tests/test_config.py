"""config.json: types, missing keys, both spellings, and values no text target can have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gemma4_oracles.ours import open_ref

from mlx_spec.errors import LoadError
from mlx_spec_gemma4.config import DEFAULT_ROPE, assistant_config, media_ids, target_config

HERE = Path("model")
FULL, SLIDING = "full_attention", "sliding_attention"
BASE: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_kv_shared_layers": 0,
}


def read(**changes: Any) -> Any:
    """The text configuration of BASE with changes; `...` removes a key."""
    return target_config({k: v for k, v in {**BASE, **changes}.items() if v is not ...}, HERE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, "hidden_size in config.json of model: found nothing, expected a value"),
        ({"hidden_size": "64"}, "hidden_size in config.json of model: found str '64', expected a valid integer"),
        ({"hidden_size": 64.0}, "found float 64.0, expected a valid integer"),
        ({"num_attention_heads": True}, "found bool True, expected a valid integer"),
        ({"num_key_value_heads": 0}, "found int 0, expected greater than 0"),
        ({"sliding_window": -1}, "sliding_window .*found int -1, expected greater than 0"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps .*found str '1e-6', expected a valid number"),
        ({"layer_types": [SLIDING]}, r"layer_types .*expected one entry per layer, 6 in all \(found 1\)"),
        (
            {"layer_types": ["linear_attention"] * 6},
            r"layer_types.0 .*found str 'linear_attention', expected 'full_attention' or",
        ),
        ({"layer_types": SLIDING}, "layer_types .*found str 'sliding_attention', expected a valid list"),
        ({"rope_parameters": {SLIDING: {"rope_theta": 1e4}}}, "rope_parameters.full_attention .*found nothing"),
        (
            {"rope_parameters": {SLIDING: {}, FULL: {"rope_theta": 1e6}}},
            "rope_parameters.sliding_attention.rope_theta .*found nothing",
        ),
        ({"rope_parameters": {SLIDING: 1e4, FULL: 1e6}}, "rope_parameters.sliding_attention .*found float 10000.0"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers .*found 6, expected 0 to 5"),
        (
            {"num_kv_shared_layers": 2, "layer_types": [SLIDING] * 5 + [FULL]},
            "leaving no full_attention layer with K/V",
        ),
        ({"use_bidirectional_attention": "all"}, "an encoder"),
        ({"num_attention_heads": 5}, "num_attention_heads .*found 5, expected a multiple of 2 K/V heads"),
        ({"enable_moe_block": True}, "num_experts .*found nothing, expected a positive integer"),
        ({"attention_bias": True}, "attention_bias .*found bool True, expected False"),
        ({"hidden_activation": "silu"}, "hidden_activation .*found str 'silu', expected 'gelu_pytorch_tanh'"),
        ({"model_type": "gemma4"}, "text_config .*found nothing, expected an object"),
        ({"text_config": [1]}, r"text_config .*found list \[1\], expected an object"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_key_is_named_with_what_was_found_and_expected(changes: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message) as caught:
        read(**changes)
    assert caught.value.code == "GM01"
    assert caught.value.next_step


def test_missing_keys_mean_what_mlx_lm_takes_them_to_mean() -> None:
    text = read(num_kv_shared_layers=..., num_hidden_layers=25)
    assert (text.num_kv_shared_layers, text.sliding_window, text.final_logit_softcapping) == (20, 512, 30.0)
    assert text.layer_types[:6] == [*[SLIDING] * 4, FULL, SLIDING]
    assert {kind: rope.model_dump() for kind, rope in text.rope_parameters.items()} == {
        FULL: DEFAULT_ROPE[FULL],
        SLIDING: {**DEFAULT_ROPE[SLIDING], "partial_rotary_factor": 1.0},
    }


def test_unified_models_have_their_own_defaults() -> None:
    text = read(model_type="gemma4_unified_text", num_kv_shared_layers=...)
    assert (text.num_kv_shared_layers, text.hidden_size_per_layer_input, text.sliding_window) == (0, 0, 1024)
    assert text.layer_types == [*[SLIDING] * 5, FULL]


def test_null_counts_as_missing_except_for_the_soft_cap() -> None:
    assert read(sliding_window=None).sliding_window == 512
    assert read(final_logit_softcapping=None).final_logit_softcapping is None
    assert read(final_logit_softcapping=0).final_logit_softcapping is None
    assert read(global_head_dim=None).global_head_dim == 512
    assert read(global_head_dim=0).global_head_dim == 16


def test_wrapper_keys_fill_in_for_the_text_stack() -> None:
    wrapper = {"model_type": "gemma4", "text_config": dict(BASE), "vocab_size": 320, "tie_word_embeddings": False}
    text = target_config(wrapper, HERE)
    assert (text.vocab_size, text.tie_word_embeddings) == (320, False)
    wrapper["text_config"] |= {"vocab_size": 256, "tie_word_embeddings": True}
    text = target_config(wrapper, HERE)
    assert (text.vocab_size, text.tie_word_embeddings) == (256, True)


PER_LAYER = {"4": {"head_dim": 64, "num_key_value_heads": 1}}


def test_per_layer_spelling_becomes_the_flat_one() -> None:
    text = read(global_head_dim=..., attention_k_eq_v=True, per_layer_config=PER_LAYER)
    assert (text.width(FULL), text.kv_heads(FULL)) == (64, 1)
    assert (text.width(SLIDING), text.kv_heads(SLIDING)) == (16, 2)
    assert read(global_head_dim=..., per_layer_config={"4": {"head_dim": 64}}).width(FULL) == 64
    assert read(global_head_dim=..., per_layer_config={}).width(FULL) == 16  # nothing overridden


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_k_eq_v": True}, "global_head_dim .*found 32, while per_layer_config says 64, expected one value"),
        ({"global_head_dim": 64}, "num_key_value_heads .*found 1 with attention_k_eq_v false"),
        ({"per_layer_config": {"4": {"sliding_window": 3}}}, "per_layer_config.4 .*the key 'sliding_window'"),
        ({"per_layer_config": {"0": {"head_dim": 64}}}, "per_layer_config of sliding_attention layers"),
        (
            {"layer_types": [SLIDING, FULL] * 3, "per_layer_config": {"1": {"head_dim": 32}, "3": {"head_dim": 64}}},
            "per_layer_config of full_attention layers .*the same values in all of them",
        ),
        ({"per_layer_config": []}, r"per_layer_config .*found list \[\], expected an object"),
    ],
    ids=str,
)
def test_contradicting_spellings_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        read(**{"per_layer_config": PER_LAYER, **changes})


def test_media_ids_come_from_the_file() -> None:
    assert media_ids({"image_token_id": 9, "audio_token_id": None, "video_token_id": 7}) == {9: "image", 7: "video"}
    assert media_ids({}) == {}


def test_assistant_keys(edited: Any) -> None:
    ref = open_ref(edited("E", drafter={"block_size": ..., "text_config.num_kv_shared_layers": 0})[1])
    config = assistant_config(ref.config, ref.path)
    assert config.block_size is None
    assert config.text.num_kv_shared_layers == 4
    assert config.text.final_logit_softcapping is None


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("backbone_hidden_size", ..., "backbone_hidden_size .*found nothing"),
        ("block_size", "4", "block_size .*found str '4', expected a valid integer"),
        ("block_size", 1, "block_size .*found int 1, expected greater than or equal to 2"),
        ("text_config", 3, "text_config .*found int 3, expected an object"),
        ("text_config.layer_types", ..., "text_config.layer_types .*found nothing"),
        ("text_config.head_dim", [16], r"text_config.head_dim .*found list \[16\]"),
        ("use_ordered_embeddings", "yes", "use_ordered_embeddings .*found str 'yes', expected a valid boolean"),
    ],
)
def test_bad_assistant_keys(edited: Any, key: str, value: Any, message: str) -> None:
    ref = open_ref(edited("E", drafter={key: value})[1])
    with pytest.raises(LoadError, match=message):
        assistant_config(ref.config, ref.path)
