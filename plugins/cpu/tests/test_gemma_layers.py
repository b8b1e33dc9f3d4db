"""Gemma's decoder layers as one operation: what they gave before, and the same bytes wherever keys are stored."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from cpu_layers import Twice, raw
from mlx_lm.models import gemma3_text, gemma4_text

from mlx_spec.kernels import swap_modules
from mlx_spec.state import KVState, StateGroup, WindowState
from mlx_spec_cpu import gemma, swap
from mlx_spec_cpu.blueprint import Blueprint, swap_described
from mlx_spec_cpu.operations import layer_reference

TOKENS = mx.array([[(7 * i) % 50 for i in range(30)]])
WINDOW = 7
GEMMA4 = {
    "model_type": "gemma4_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "vocab_size_per_layer_input": 50,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "final_logit_softcapping": 30.0,
    "enable_moe_block": False,
    "attention_k_eq_v": False,
    "use_double_wide_mlp": False,
    "max_position_embeddings": 200,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
VARIANTS: dict[str, dict[str, Any]] = {
    "shared": {},
    "keys-are-values": {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    },
    "wide": {"use_double_wide_mlp": True},
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 20,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "vocab_size": 50,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000.0,
}


def model_of(variant: str, bits: int = 0, dtype: mx.Dtype = mx.float32) -> Any:
    """A random model; its norms and factors do something."""
    family = gemma3_text if variant == "gemma3" else gemma4_text
    settings = GEMMA3 if family is gemma3_text else GEMMA4 | VARIANTS[variant]
    model: Any = family.Model(family.ModelArgs.from_dict(settings))
    model.apply(lambda a: mx.random.normal(a.shape, key=mx.random.key(a.size)) * 0.3)
    model.set_dtype(dtype)
    if bits:
        fits = lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0  # noqa: E731
        nn.quantize(model, 32, bits, class_predicate=fits)
    return model


def states(model: Any) -> StateGroup:
    from mlx_lm.models.cache import KVCache

    return StateGroup(KVState() if isinstance(c, KVCache) else WindowState(WINDOW, 8) for c in model.make_cache())


def pieces(model: Any, cache: StateGroup, *sizes: int) -> list[mx.array]:
    """Logits of the tokens in pieces of these sizes."""
    out, start = [], 0
    for size in sizes:
        out.append(model(TOKENS[:, start : start + size], cache=list(cache)))
        start += size
    mx.eval(out)
    return out


ALL = [*VARIANTS, "gemma3"]


@pytest.mark.parametrize("variant", ALL)
@pytest.mark.parametrize("bits", [0, 4])
def test_layers_are_replaced_and_give_what_they_gave(variant: str, bits: int) -> None:
    model = model_of(variant, bits)
    sizes = (5, 1, 1, 9, 4, 1)
    expected = mx.concatenate(pieces(model, states(model), *sizes), axis=1)
    swap(model)
    name = "RowGemma3Block" if variant == "gemma3" else "RowDecoderLayer"
    assert {type(layer).__name__ for layer in model.layers} == {name}
    found = mx.concatenate(pieces(model, states(model), *sizes), axis=1)
    tolerance = 3e-4 * mx.abs(expected).max().item()
    assert mx.allclose(found, expected, atol=tolerance).item()
    uncached = model(TOKENS[:, :5])
    assert mx.allclose(uncached, expected[:, :5], atol=tolerance).item()


@pytest.mark.parametrize("variant", ALL)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_one_operation_has_the_bytes_of_its_parts(
    variant: str, dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a state's storage, with the state's own append between two operations, and beside another row."""
    model = model_of(variant, dtype=dtype)
    swap(model)
    ran: list[str] = []
    kept = gemma.Built.run
    monkeypatch.setattr(gemma.Built, "run", lambda self, name, write: ran.append(name) or kept(self, name, write))
    sizes = (6, 4, 1, 5)
    whole = pieces(model, states(model), *sizes)
    assert {name.split()[0] for name in ran} <= {"whole", "reader", "before", "after", "asking"}
    assert "whole" in ran and ("reader 0" in ran) == (variant in ("shared", "wide"))
    del ran[:]
    with monkeypatch.context() as without:
        without.setattr(KVState, "room", lambda self, count: None)
        parts = pieces(model, states(model), *sizes)
    assert "before" in ran and "whole" not in ran
    assert [raw(a) for a in whole] == [raw(a) for a in parts]
    first, other = states(model), states(model)
    pieces(model, first, 6)
    model(TOKENS[:, 3:8], cache=list(other))
    both = StateGroup(type(a).merge([a, b]) for a, b in zip(first, other, strict=True))
    together = model(mx.concatenate([TOKENS[:, 6:10], TOKENS[:, :4]]), cache=list(both))
    assert raw(together[0]) == raw(whole[1])


@pytest.mark.parametrize("variant", ALL)
def test_blocks_are_steps_before_and_after_the_window_is_full(variant: str) -> None:
    model = model_of(variant, dtype=mx.bfloat16)
    swap(model)
    for start in (1, 5, 12):
        cache = states(model)
        pieces(model, cache, start)
        mark = cache.mark()
        block = model(TOKENS[:, start : start + 5], cache=list(cache))
        mx.eval(block)
        cache.rewind(mark, [0])
        steps = [model(TOKENS[:, i : i + 1], cache=list(cache)) for i in range(start, start + 5)]
        assert raw(block) == raw(mx.concatenate(steps, axis=1))


def test_a_rejected_block_leaves_no_trace() -> None:
    model = model_of("shared")
    swap(model)
    clean, used = states(model), states(model)
    for cache in (clean, used):
        pieces(model, cache, 9)
    mark = used.mark()
    model(TOKENS[:, 20:25], cache=list(used))
    used.rewind(mark, [1])
    model(TOKENS[:, 20:21], cache=list(clean))
    after = [model(TOKENS[:, 10:11], cache=list(cache)) for cache in (clean, used)]
    assert raw(after[0]) == raw(after[1])


def test_parts_that_are_replaced_later_are_used() -> None:
    model = model_of("shared")
    swap(model)
    before = pieces(model, states(model), 9)[0]
    layer = model.layers[0]
    layer.layer_scalar = layer.layer_scalar * 3
    tripled = pieces(model, states(model), 9)[0]
    assert not mx.allclose(tripled, before, atol=1e-3).item()

    layer.mlp.down_proj.weight = layer.mlp.down_proj.weight * 0.5
    layer.mlp.down_proj = Twice(layer.mlp.down_proj)
    again = pieces(model, states(model), 9)[0]
    assert mx.allclose(again, tripled, atol=1e-3 * mx.abs(tripled).max().item()).item()


def test_what_is_not_known_stays_as_it_is() -> None:
    moe = GEMMA4 | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    args = gemma4_text.ModelArgs.from_dict(moe | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0})
    assert type(swap(gemma4_text.DecoderLayer(args, 0))) is gemma4_text.DecoderLayer

    class Own(gemma3_text.TransformerBlock):
        pass

    assert type(swap(Own(gemma3_text.ModelArgs.from_dict(GEMMA3), 0))) is Own


def test_float16_of_gemma3_runs_its_own_code_which_bounds_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gemma3", dtype=mx.float16)
    swap(model)
    monkeypatch.setattr(gemma, "run_layer", lambda *_: pytest.fail("float16 sums are not bounded there"))
    assert mx.isfinite(pieces(model, states(model), 9)[0]).all().item()


def test_masks_of_another_making_are_honoured() -> None:
    model = model_of("shared")
    swap(model)
    layer, cache = model.layers[0], WindowState(WINDOW, 8)
    x, side = mx.random.normal((1, 3, 64)), mx.random.normal((1, 3, 8))
    hidden = mx.eye(3, dtype=mx.bool_)[None, None]  # each row sees itself alone
    alone = layer(x, hidden, cache, per_layer_input=side)[0]
    causal = layer(x, "causal", WindowState(WINDOW, 8), per_layer_input=side)[0]
    assert mx.allclose(alone[:, 0], causal[:, 0], atol=1e-4).item()
    assert not mx.allclose(alone[:, 2], causal[:, 2], atol=1e-3).item()


# -- modules that describe themselves ----------------------------------------------------------------------


class Doubling(nn.Module):
    """y = 2 norm(W x), as any package may have it."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.norm, self.double = nn.Linear(48, 40), nn.RMSNorm(40), mx.array([2.0])
        self.calls = 0

    def __call__(self, x: mx.array) -> tuple[mx.array]:
        self.calls += 1
        return (self.norm(self.map(x)) * self.double,)

    def arrange(self, x: mx.array) -> tuple[list[mx.array], dict[str, Any]] | None:
        return ([x], {}) if x.shape[0] == 1 else None

    def describe(self, b: Blueprint) -> None:
        b.output(b.weighted(b.normed(b.apply(b.input(48), self.map), self.norm), self.double))


def test_a_module_that_describes_itself_runs_as_one_operation() -> None:
    module = Doubling()
    module.map.bias = mx.random.normal((40,))
    x = mx.random.normal((1, 3, 48))
    (expected,) = module(x)
    swapped: Any = swap(module)
    assert isinstance(swapped, Doubling) and swapped.calls == 1
    (found,) = swapped(x)
    assert swapped.calls == 1 and mx.allclose(found, expected, atol=1e-4).item()
    (two,) = swapped(mx.concatenate([x, x]))
    assert swapped.calls == 2 and raw(two[0]) == raw(found[0])
    assert swap_described(swapped) is None and swap_modules(swapped, swap_described)[1] == 0


def test_its_own_code_runs_when_a_part_is_not_the_librarys() -> None:
    module: Any = swap(Doubling())
    module.norm = nn.LayerNorm(40)
    x = mx.random.normal((1, 3, 48))
    module(x)
    assert module.calls == 1


def test_a_blueprint_says_the_same_by_mlx() -> None:
    module: Any = swap(Doubling())
    blueprint, x = Blueprint(mx.float32), mx.random.normal((1, 3, 48))
    module.describe(blueprint)
    assert mx.allclose(layer_reference(blueprint, x)[0], module(x)[0], atol=1e-5).item()
