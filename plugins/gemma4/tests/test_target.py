"""The target against mlx-lm, and blocks against single steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gemma4_oracles.ours import Ours, open_ref
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from mlx_lm.utils import load_model

from mlx_spec.errors import LoadError, UsageError
from mlx_spec_gemma4.target import Gemma4Target

WINDOW = 8
GROUP = 32  # the smallest MLX quantises by, and the width of a full-attention head here
LOADABLE = ("E", "D31", "MOE", "UNI", "VLM")  # the variants stock mlx-lm loads


def ids(count: int, seed: int = 0) -> list[int]:
    """Seeded token ids that stand for text."""
    return [int(t) for t in np.random.default_rng(seed).integers(7, 300, count)]


def row(*tokens: int) -> mx.array:
    return mx.array([list(tokens)], dtype=mx.int32)


@pytest.mark.parametrize(
    ("variant", "stored"),
    [
        *((variant, {}) for variant in LOADABLE),
        ("E", {"dtype": "bfloat16"}),
        ("E", {"quantise": 4}),
        ("D31", {"quantise": 8, "dtype": "bfloat16"}),
        ("MOE", {"quantise": 4, "dtype": "bfloat16"}),
    ],
)
def test_single_steps_are_byte_for_byte_mlx_lm(
    loaded: Callable[..., Ours], pair_dirs: Any, variant: str, stored: Any
) -> None:
    ours = loaded(variant, **stored).target
    theirs, _ = load_model(pair_dirs(variant, **stored)[0])
    states, cache = ours.make_states(), theirs.make_cache()
    for token in ids(WINDOW):  # past the window the ring's key order differs
        mine = ours.forward(row(token), states).logits
        assert mx.array_equal(mine, theirs(row(token), cache=cache))


@pytest.mark.parametrize(
    ("variant", "length"),
    [*(("E", n) for n in (1, WINDOW - 1, WINDOW, WINDOW + 1, 25)), ("D31", 25), ("MOE", 9), ("UNI", 8), ("VLM", 25)],
)
def test_prefill_is_byte_for_byte_mlx_lm_and_stays_close(
    loaded: Callable[..., Ours], pair_dirs: Any, variant: str, length: int
) -> None:
    ours = loaded(variant).target
    theirs, _ = load_model(pair_dirs(variant)[0])
    states, cache = ours.make_states(), theirs.make_cache()
    prompt = row(*ids(length))
    assert mx.array_equal(ours.forward(prompt, states).logits, theirs(prompt, cache=cache))
    for token in ids(WINDOW + 3, seed=1):
        mine, other = ours.forward(row(token), states).logits, theirs(row(token), cache=cache)
        assert mx.allclose(mine, other, rtol=0, atol=1e-4)
        assert mx.argmax(mine).item() == mx.argmax(other).item()


EVERY_WIDTH = ((3, 2), (WINDOW - 1, 3), (WINDOW, 4), (WINDOW + 1, 5), (21, 6), (21, 7), (21, 8))
SOME_WIDTHS = ((3, 8), (WINDOW, 4), (21, 5))  # below, at and past the window
BLOCKS = [  # float32 with dense K/V is in test_conformance.py
    pytest.param("E", {"dtype": "bfloat16"}, None, EVERY_WIDTH, id="E-bf16"),
    pytest.param("E", {"quantise": 4}, None, SOME_WIDTHS, id="E-4bit"),
    pytest.param("E", {}, 8, SOME_WIDTHS, id="E-f32-kv8"),
    pytest.param("E", {"quantise": 8, "dtype": "bfloat16"}, 4, SOME_WIDTHS, id="E-8bit-bf16-kv4"),
    pytest.param("D31", {"dtype": "bfloat16"}, 8, SOME_WIDTHS, id="D31-bf16-kv8"),
    pytest.param("D31", {"quantise": 4}, 4, SOME_WIDTHS, id="D31-4bit-kv4"),
    pytest.param("MOE", {"quantise": 4, "dtype": "bfloat16"}, None, SOME_WIDTHS, id="MOE-4bit-bf16"),
]


@pytest.mark.parametrize(("variant", "stored", "kv_bits", "blocks"), BLOCKS)
def test_block_equals_single_steps_in_bytes(
    loaded: Callable[..., Ours], variant: str, stored: Any, kv_bits: int | None, blocks: Any
) -> None:
    target = loaded(variant, **stored).target
    for length, width in blocks:
        tokens = ids(length + width, seed=width)
        block, single = target.make_states(kv_bits, GROUP), target.make_states(kv_bits, GROUP)
        for states in (block, single):
            target.forward(row(*tokens[:length]), states)
        wide = target.forward(row(*tokens[length:]), block, ("hidden",))
        narrow = [target.forward(row(t), single, ("hidden",)) for t in tokens[length:]]
        assert mx.array_equal(wide.logits, mx.concatenate([n.logits for n in narrow], axis=1)), (length, width)
        assert mx.array_equal(wide.taps["hidden"], mx.concatenate([n.taps["hidden"] for n in narrow], axis=1))


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_kv_is_byte_for_byte_mlx_lm_where_it_can_do_it(
    loaded: Callable[..., Ours], pair_dirs: Any, bits: int
) -> None:
    ours = loaded("D31").target  # no shared K/V: mlx-lm's own cache works here
    theirs, _ = load_model(pair_dirs("D31")[0])
    cache = [QuantizedKVCache(GROUP, bits) if type(c) is KVCache else c for c in theirs.make_cache()]
    states = ours.make_states(bits, GROUP)
    for token in ids(WINDOW):
        assert mx.array_equal(ours.forward(row(token), states).logits, theirs(row(token), cache=cache))


def test_shared_layers_read_quantised_kv(loaded: Callable[..., Ours]) -> None:
    target = loaded("E").target
    prompt = row(*ids(20))
    dense, eight = target.make_states(), target.make_states(8, GROUP)
    a, b = target.forward(prompt, dense).logits, target.forward(prompt, eight).logits
    assert 0 < mx.abs(a - b).max().item() < 0.5
    assert eight.nbytes < dense.nbytes


def test_taps_are_the_hidden_state_before_and_after_the_norm(loaded: Callable[..., Ours]) -> None:
    target = loaded("E").target
    seen = target.forward(row(*ids(6)), target.make_states(), target.tap_names)
    assert set(seen.taps) == {"hidden", "hidden_pre"}
    assert mx.array_equal(target.model.model.norm(seen.taps["hidden_pre"]), seen.taps["hidden"])
    assert mx.array_equal(target.head(seen.taps["hidden"]), seen.logits)


@pytest.mark.parametrize("kv_bits", [None, 8])
@pytest.mark.parametrize("variant", ["E", "D31"])
@pytest.mark.parametrize("lengths", [(5,), (1, 1), (WINDOW + 9,), (WINDOW - 2, 7, 3)])
def test_a_prefill_that_wants_one_row_gives_the_taps_of_a_whole_one(
    loaded: Callable[..., Ours], variant: str, kv_bits: int | None, lengths: tuple[int, ...]
) -> None:
    target = loaded(variant).target
    whole, cheap = target.make_states(kv_bits, GROUP), target.make_states(kv_bits, GROUP)
    for turn, length in enumerate(lengths):
        chunk = row(*ids(length, seed=turn))
        wanted = target.forward(chunk, whole, target.tap_names).taps
        found = target.prefill(chunk, cheap, target.tap_names, last=True)
        assert {name: value.shape[1] for name, value in found.items()} == {"hidden": 1, "hidden_pre": 1}
        for name, value in found.items():
            assert mx.array_equal(value, wanted[name][:, -1:]), (turn, name)
        full = target.prefill(chunk, whole.extract(0), target.tap_names)
        assert [value.shape[1] for value in full.values()] == [length, length]
    assert whole.lengths == cheap.lengths == (sum(lengths),)
    pairs = zip(whole.to_tensors()[0].items(), cheap.to_tensors()[0].items(), strict=True)
    assert all(mx.array_equal(a, b) for (_, a), (_, b) in pairs)


@pytest.mark.parametrize("rows", [2, 9, 16])
def test_experts_of_a_block_are_not_sorted_however_wide_it_is(tmp_path: Path, rows: int) -> None:
    from mlx_spec_gemma4.tiny import write_tiny

    path, _ = write_tiny(tmp_path, "MOE", 5, num_experts=16, top_k_experts=8)  # 8 rows reach the sort threshold
    target = Gemma4Target.load(open_ref(path), open_ref(path).config)
    block, single = target.make_states(), target.make_states()
    tokens = ids(rows)
    wide = target.forward(row(*tokens), block).logits
    narrow = [target.forward(row(t), single).logits for t in tokens]
    assert mx.array_equal(wide, mx.concatenate(narrow, axis=1))


def test_embedding_is_scaled_and_works_quantised(loaded: Callable[..., Ours]) -> None:
    for options in ({}, {"quantise": 4}):
        target = loaded("E", **options).target
        core = target.model.model
        table = core.embed_tokens(mx.arange(target.vocab_size))
        out = target.embed(mx.array([[3, 7]], dtype=mx.int32))
        assert out.shape == (1, 2, target.hidden_size)
        assert mx.allclose(out[0], table[mx.array([3, 7])] * 8.0)


# -- checkpoints as they come --------------------------------------------------------------------------


def test_other_media_and_bundled_heads_are_dropped_and_listed(loaded: Callable[..., Ours]) -> None:
    target = loaded("BUNDLED").target
    for part in ("vision_tower", "embed_vision", "mtp.pre_projection", "layers.5.self_attn.k_proj"):
        assert any(part in name for name in target.dropped), part
    plain = loaded("E").target
    assert mx.array_equal(
        target.forward(row(*ids(9)), target.make_states()).logits,
        plain.forward(row(*ids(9)), plain.make_states()).logits,
    )


def test_placeholders_for_other_media_are_refused_by_name(loaded: Callable[..., Ours]) -> None:
    target = loaded("VLM").target
    target.check_prompt(ids(5))
    with pytest.raises(UsageError, match=r"prompt token 2: found id 4, the placeholder for image input.*mlx-vlm"):
        target.check_prompt([9, 8, 4, 7])
    with pytest.raises(UsageError, match="audio input"):
        target.check_prompt([5])
    loaded("E").target.check_prompt([4, 5, 6])  # a text-only directory declares no placeholders


def test_both_spellings_of_full_layers_load_the_same_model(edited: Any) -> None:
    path, _ = edited("D31")
    reference = Gemma4Target.load(open_ref(path), open_ref(path).config)
    config = json.loads((path / "config.json").read_text())
    text = config["text_config"]
    text["per_layer_config"] = {
        "5": {"head_dim": text.pop("global_head_dim"), "num_key_value_heads": text.pop("num_global_key_value_heads")}
    }
    (path / "config.json").write_text(json.dumps(config))
    target = Gemma4Target.load(open_ref(path), open_ref(path).config)
    prompt = row(*ids(11))
    assert mx.array_equal(
        target.forward(prompt, target.make_states()).logits, reference.forward(prompt, reference.make_states()).logits
    )


def test_missing_rotation_means_the_family_defaults(edited: Any) -> None:
    path, _ = edited("E")
    reference = Gemma4Target.load(open_ref(path), open_ref(path).config)
    path, _ = edited("E", target={"rope_parameters": ...})
    target = Gemma4Target.load(open_ref(path), open_ref(path).config)
    prompt = row(*ids(11))
    assert mx.array_equal(
        target.forward(prompt, target.make_states()).logits, reference.forward(prompt, reference.make_states()).logits
    )


def test_no_soft_cap_and_an_untied_head(edited: Any) -> None:
    path, _ = edited("E", target={"final_logit_softcapping": 0.0}, tie_word_embeddings=False)
    target = Gemma4Target.load(open_ref(path), open_ref(path).config)
    seen = target.forward(row(*ids(7)), target.make_states(), ("hidden",))
    assert mx.allclose(seen.logits, seen.taps["hidden"] @ target.model.lm_head.weight.T, rtol=0, atol=1e-5)


def test_unified_text_directory_loads_though_mlx_lm_has_no_such_type(loaded: Callable[..., Ours]) -> None:
    flat, wrapped = loaded("UNITEXT").target, loaded("UNI").target
    prompt = row(*ids(13))
    assert mx.array_equal(
        flat.forward(prompt, flat.make_states()).logits, wrapped.forward(prompt, wrapped.make_states()).logits
    )
    assert flat.model_type == "gemma4_unified_text"


def test_missing_target_tensor_is_named(edited: Any) -> None:
    path, _ = edited(
        "E", target={"num_hidden_layers": 9, "layer_types": [*["sliding_attention"] * 8, "full_attention"]}
    )
    with pytest.raises(LoadError):
        Gemma4Target.load(open_ref(path), open_ref(path).config)
