"""The generic target against mlx-lm's own caches, its taps, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tinymodels import CONFIGS, GEMMA3, LLAMA, write_model

from mlx_spec.errors import LoadError, RefusedError
from mlx_spec.generic_target import GenericTarget
from mlx_spec.memory import kv_rows, memory_needed
from mlx_spec.refs import resolve
from mlx_spec.tensorfiles import tensor_index

SERVED = ("llama", "small-llama", "gemma3")
COHERE = {
    "model_type": "cohere", "architectures": ["CohereForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2,
    "intermediate_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 1e4, "vocab_size": 71,
    "layer_norm_eps": 1e-5, "logit_scale": 0.25, "attention_bias": False, "layer_norm_bias": False,
    "use_qk_norm": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("generic")
    return {name: write_model(root / name, name) for name in CONFIGS} | {"cohere": write_model(root / "cohere", COHERE)}


@pytest.fixture(scope="module")
def targets(folders) -> dict[str, GenericTarget]:
    return {name: GenericTarget.load(resolve(folders[name])) for name in (*SERVED, "cohere")}


def same_bytes(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bytes(memoryview(a)) == bytes(memoryview(b))


def ids(target: GenericTarget, n: int, seed: int = 5) -> mx.array:
    return mx.random.randint(0, target.vocab_size, (1, n), dtype=mx.int32, key=mx.random.key(seed))


@pytest.mark.parametrize("name", SERVED)
def test_attributes(targets, name):
    target, config = targets[name], CONFIGS[name]
    assert (target.vocab_size, target.hidden_size) == (config["vocab_size"], config["hidden_size"])
    assert (target.context, target.model_type) == (config["max_position_embeddings"], config["model_type"])
    assert target.dtype == mx.float32 and target.tap_names == ("hidden",)
    assert target.capabilities.window == (name == "gemma3")


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("prompt", [1, 5, 11])
def test_single_steps_equal_mlx_lm(targets, name, prompt):
    """Below the window byte for byte; past it mlx-lm's ring has another key order (differences near rounding)."""
    target = targets[name]
    window = GEMMA3["sliding_window"] if name == "gemma3" else 10**9
    cache, states = make_prompt_cache(target.model), target.make_states()
    tokens = ids(target, prompt + 6)
    for i, part in enumerate([tokens[:, :prompt], *mx.split(tokens[:, prompt:], 6, axis=1)]):
        wanted = target.model(part, cache=cache)
        got = target.forward(part, states).logits
        assert same_bytes(got, wanted) if prompt + i <= window else mx.allclose(got, wanted, atol=1e-4).item()
    assert states.lengths == (prompt + 6,)


@pytest.mark.parametrize("name", SERVED)
def test_block_then_rewind_equals_single_steps(targets, name):
    target = targets[name]
    tokens = ids(target, 17)
    states = target.make_states()
    target.forward(tokens[:, :12], states)
    mark = states.mark()
    target.forward(tokens[:, 12:], states)
    states.rewind(mark, [2])
    plain = target.make_states()
    target.forward(tokens[:, :12], plain)
    for i in (12, 13):
        target.forward(tokens[:, i : i + 1], plain)
    step = tokens[:, 14:15]
    assert states.lengths == plain.lengths == (14,)
    assert mx.allclose(target.forward(step, states).logits, target.forward(step, plain).logits, atol=1e-5)


@pytest.mark.parametrize("name", SERVED)
def test_hidden_tap_does_not_change_logits(targets, name):
    target = targets[name]
    tokens = ids(target, 7)
    plain = target.forward(tokens, target.make_states())
    tapped = target.forward(tokens, target.make_states(), ["hidden"])
    assert plain.taps == {} and same_bytes(plain.logits, tapped.logits)
    assert tapped.taps["hidden"].shape == (1, 7, target.hidden_size)
    assert same_bytes(target.head(tapped.taps["hidden"]), tapped.logits)


@pytest.mark.parametrize("name", SERVED)
def test_embed_is_what_the_first_layer_receives(targets, name):
    target = targets[name]
    tokens = mx.array([[3, 9, 40], [1, 2, 3]])
    rows = target.model.model.embed_tokens(tokens)
    if name == "gemma3":
        rows = rows * mx.array(target.hidden_size**0.5, mx.bfloat16).astype(rows.dtype)
    assert same_bytes(target.embed(tokens), rows)
    assert target.embed(tokens[0, 1]).shape == (target.hidden_size,)
    # the module itself is left as it was
    assert len(target.model.model.layers) == CONFIGS[name]["num_hidden_layers"]


def test_model_that_scales_its_logits_has_no_taps(targets):
    target = targets["cohere"]
    assert target.tap_names == () and target.context == 1 << 20
    assert target.forward(ids(target, 3), target.make_states()).logits.shape == (1, 3, 71)
    for call in (lambda: target.head(mx.zeros((1, 32))), lambda: target.embed(mx.array([1])),
                 lambda: target.forward(ids(target, 3), target.make_states(), ["hidden"])):  # fmt: skip
        with pytest.raises(RefusedError, match="found it changes logits after its head"):
            call()


def test_unknown_tap(targets):
    with pytest.raises(RefusedError, match="tap 'layer.3'.*found taps hidden"):
        targets["llama"].forward(ids(targets["llama"], 2), targets["llama"].make_states(), ["layer.3"])


def test_cache_that_cannot_roll_back_is_refused_at_load(folders):
    with pytest.raises(LoadError, match="ArraysCache, which cannot roll back"):
        GenericTarget.load(resolve(folders["mamba"]))


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size"])
def test_missing_sizes_are_refused(tmp_path, key):
    path = write_model(tmp_path)
    config = json.loads((path / "config.json").read_text())
    del config[key]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=f"found no {key}, expected"):
        GenericTarget.load(resolve(path))


def test_undeclared_context(tmp_path):
    target = GenericTarget.load(
        resolve(write_model(tmp_path, {k: v for k, v in LLAMA.items() if k != "max_position_embeddings"}))
    )
    assert target.context == 1 << 20


def test_nan_weights_are_refused(folders, tmp_path):
    weights = dict(mx.load(str(folders["llama"] / "model.safetensors")))
    weights["model.layers.2.mlp.up_proj.weight"][5, 7] = float("nan")
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "config.json").write_text((folders["llama"] / "config.json").read_text())
    with pytest.raises(LoadError, match="NaN or infinite values in model.layers.2.mlp.up_proj.weight"):
        GenericTarget.load(resolve(tmp_path))


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_state(tmp_path, bits):
    target = GenericTarget.load(resolve(write_model(tmp_path, LLAMA | {"head_dim": 32})))
    states = target.make_states(bits, 32)
    dense = target.make_states()
    tokens = ids(target, 40)
    got, wanted = target.forward(tokens, states).logits, target.forward(tokens, dense).logits
    assert got.shape == wanted.shape and states.lengths == (40,)
    mean = mx.abs(got - wanted).mean().item()
    assert 0 < mean < (0.1 if bits == 8 else 1.0)  # logits span about +-8


# -- memory estimate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVED)
def test_memory_estimate_equals_what_the_states_hold(folders, targets, name):
    """Against the K/V rows really kept, counted from tensor shapes."""
    target, config = targets[name], CONFIGS[name]
    need = memory_needed(config, tensor_index(folders[name]), context=30)
    assert need.weights_bytes == sum(a.nbytes for a in mx.load(str(folders[name] / "model.safetensors")).values())
    heads, width = config["num_key_value_heads"], config["head_dim"]
    layers = config["num_hidden_layers"]
    rows = {"llama": 30 * layers, "small-llama": 30 * layers, "gemma3": 30 + 4 * 8}[name]
    assert need.kv_bytes == rows * 2 * heads * width * 4
    assert need.kv_bytes_per_1k_tokens == 1000 * layers * 2 * heads * width * 4 and need.kv_layers == layers
    assert need.total_bytes == need.weights_bytes + need.kv_bytes
    assert target.make_states().lengths == (0,)


def test_memory_of_quantised_kv_and_other_layouts():
    base = {"num_hidden_layers": 4, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
    assert kv_rows(base) == [(64, None)] * 4
    assert kv_rows(
        base | {"layer_types": ["full_attention", "linear_attention", "conv", "sliding_attention"], "sliding_window": 9}
    ) == [(64, None), (64, 9)]
    assert kv_rows(base | {"full_attention_interval": 2}) == [(64, None)] * 2
    assert kv_rows(base | {"num_kv_shared_layers": 3}) == [(64, None)]
    assert kv_rows(base | {"num_kv_shared_layers": 4}) == []  # an assistant that reads its target's
    assert kv_rows(base | {"kv_lora_rank": 20, "qk_rope_head_dim": 4}) == [(24, None)] * 4
    assert kv_rows(base | {"num_key_value_heads": [1, 2, 3, 4]}) == [(32, None), (64, None), (96, None), (128, None)]
    gemma = {"head_dim": 8, "global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    kinds = ["sliding_attention", "full_attention"] * 2
    assert (
        kv_rows({"text_config": base | gemma | {"layer_types": kinds, "sliding_window": 7}})
        == [(32, 7), (32, None)] * 2
    )
    assert kv_rows({"num_hidden_layers": 3}) == [] and kv_rows({"hidden_size": 9}) == []
    need = memory_needed(base, {}, 2000, kv_bits=4, kv_group_size=32)
    assert need.kv_bytes == 2000 * 4 * (64 // 2 + 64 // 32 * 4) and need.kv_bytes_per_1k_tokens * 2 == need.kv_bytes
