"""The target against mlx-lm, and blocks against single steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import qwen3_5, qwen3_5_moe
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from mlx_lm.utils import load_model
from qwen35_oracles.ours import load

import mlx_spec
from mlx_spec.errors import RefusedError, UsageError
from mlx_spec.gated_delta import GatedDelta, Owed
from mlx_spec.state import DeltaState, StateGroup
from mlx_spec.testing.watch import first_difference, saved
from mlx_spec_qwen35.target import Qwen35Target
from mlx_spec_qwen35.tiny import write_tiny

Loaded = Callable[..., Qwen35Target]
GROUP = 32  # the smallest MLX quantises by, and the width of a head here
STORED = [
    pytest.param({}, id="dense-f32"),
    pytest.param({"dtype": "bfloat16"}, id="dense-bf16"),
    pytest.param({"bits": 4, "dtype": "bfloat16"}, id="dense-4bit-bf16"),
    pytest.param({"bits": 8}, id="dense-8bit-f32"),
    pytest.param({"variant": "tied", "wrapper": True, "raw": True, "dtype": "bfloat16"}, id="tied-published-bf16"),
    pytest.param({"variant": "tied", "bits": 4}, id="tied-4bit-f32"),
    pytest.param({"variant": "moe"}, id="moe-f32"),
    pytest.param({"variant": "moe", "norm_topk_prob": False}, id="moe-unnormalised-f32"),
    pytest.param({"variant": "moe", "bits": 4, "dtype": "bfloat16"}, id="moe-4bit-bf16"),
    pytest.param({"variant": "moe", "bits": 8}, id="moe-8bit-f32"),
]


def ids(count: int, seed: int = 0) -> list[int]:
    """Seeded token ids that stand for text."""
    return [int(t) for t in np.random.default_rng(seed).integers(7, 300, count)]


def row(*tokens: int) -> mx.array:
    return mx.array([list(tokens)], dtype=mx.int32)


def mlx_lm_model(path: Path) -> Any:
    """The same checkpoint through mlx-lm's own class, which has no name for flat text checkpoints."""
    module = qwen3_5_moe if "moe" in (path / "config.json").read_text() else qwen3_5
    return load_model(path, get_model_classes=lambda config: (module.Model, module.ModelArgs))[0]


def prefilled(target: Qwen35Target, prompt: list[int], kv_bits: int | None = None) -> StateGroup:
    states = target.make_states(kv_bits, GROUP)
    target.prefill(row(*prompt), states)
    return states


def settled(states: StateGroup) -> dict[str, mx.array]:
    """What a state holds once nothing before it can be asked for."""
    states.mark()
    return saved(states)


@pytest.mark.parametrize("stored", STORED)
def test_prompts_and_single_steps_are_byte_for_byte_mlx_lm(loaded: Loaded, checkpoint: Any, stored: Any) -> None:
    ours, theirs = loaded(**stored), mlx_lm_model(checkpoint(**stored))
    states, cache = ours.make_states(), theirs.make_cache()
    prompt = row(*ids(9))
    assert mx.array_equal(ours.forward(prompt, states).logits, theirs(prompt, cache=cache))
    for token in ids(8, seed=1):
        assert mx.array_equal(ours.forward(row(token), states).logits, theirs(row(token), cache=cache))
    for state, other in zip(states, cache, strict=True):
        if isinstance(state, DeltaState):
            held = settled(StateGroup([state]))
            assert mx.array_equal(held["0.window"], other[0]) and mx.array_equal(held["0.recurrent"], other[1])


@pytest.mark.parametrize("stored", STORED)
def test_a_block_equals_single_steps_in_bytes(loaded: Loaded, stored: Any) -> None:
    target = loaded(**stored)
    for length, width in ((1, 2), (3, 4), (21, 5), (21, 8), (2, 16)):
        tokens = ids(length + width, seed=width)
        block, single = prefilled(target, tokens[:length]), prefilled(target, tokens[:length])
        block.mark()
        wide = target.forward(row(*tokens[length:]), block, target.tap_names)
        narrow = [target.forward(row(t), single, target.tap_names) for t in tokens[length:]]
        assert mx.array_equal(wide.logits, mx.concatenate([n.logits for n in narrow], axis=1)), (length, width)
        for name, value in wide.taps.items():
            assert mx.array_equal(value, mx.concatenate([n.taps[name] for n in narrow], axis=1)), (name, width)
        assert first_difference(settled(block), settled(single)) == ""


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_kv_is_byte_for_byte_mlx_lm(loaded: Loaded, checkpoint: Any, bits: int) -> None:
    ours, theirs = loaded(), mlx_lm_model(checkpoint())
    cache = [QuantizedKVCache(GROUP, bits) if type(c) is KVCache else c for c in theirs.make_cache()]
    states = ours.make_states(bits, GROUP)
    for token in ids(9):
        assert mx.array_equal(ours.forward(row(token), states).logits, theirs(row(token), cache=cache))


@pytest.mark.parametrize("kv_bits", [None, 4])
@pytest.mark.parametrize("stored", [{}, {"variant": "moe", "bits": 4, "dtype": "bfloat16"}], ids=["dense", "moe"])
def test_every_keep_leaves_what_running_only_the_kept_rows_leaves(
    loaded: Loaded, stored: Any, kv_bits: int | None
) -> None:
    target, tokens = loaded(**stored), ids(12, seed=3)
    for keep in range(6):
        taken, only = (prefilled(target, tokens[:7], kv_bits) for _ in range(2))
        mark = taken.mark()
        target.forward(row(*tokens[7 : 7 + keep], *ids(5 - keep, seed=9)), taken)
        taken.rewind(mark, [keep])
        if keep:
            target.forward(row(*tokens[7 : 7 + keep]), only)
        assert first_difference(settled(taken), settled(only)) == "", keep


def test_a_rewind_calls_no_layer(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    target = loaded()
    states = prefilled(target, ids(9))
    mark = states.mark()
    target.forward(row(*ids(5)), states)
    for module in {type(m) for m in target.model.modules()} - {GatedDelta}:
        monkeypatch.setattr(module, "__call__", lambda *_: pytest.fail("a layer ran"), raising=False)
    states.rewind(mark, [3])
    mx.eval(states.arrays())
    assert states.lengths == (12,)


def test_a_tape_is_a_small_part_of_the_state(tmp_path: Path) -> None:
    wide = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_hidden_layers": 4}
    target = load(write_tiny(tmp_path, **wide)[0])
    states = prefilled(target, ids(9))
    states.mark()
    target.forward(row(*ids(4)), states)
    linear = [state for state in states if isinstance(state, DeltaState)]
    assert sum(s.tape_nbytes for s in linear) < 0.2 * sum(s._live.recurrent.nbytes for s in linear)


def test_a_prompt_leaves_no_tape_and_computes_no_logits(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    target = loaded()
    states = target.make_states()
    states.mark()
    monkeypatch.setattr(Qwen35Target, "_project", lambda *_: pytest.fail("logits"))
    target.prefill(row(*ids(40)), states)
    assert [s.tape_nbytes for s in states if isinstance(s, DeltaState)] == [0, 0, 0]


class Resuming(GatedDelta):
    """The plain rule, paying what is owed on its way, as kernels do; it never replays alone."""

    resumes = True

    def replay(self, *given: mx.array) -> mx.array:
        return pytest.fail("replayed alone")

    def resume(self, owed: Owed, *steps: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        state = GatedDelta().replay(*owed)
        y, _, delta = self(*steps, state)
        return y, state, delta


def with_rule(monkeypatch: pytest.MonkeyPatch, target: Qwen35Target, rule: GatedDelta) -> None:
    for layer in target.model.language_model.model.layers:
        if layer.is_linear:
            monkeypatch.setitem(layer.linear_attn, "gated_delta", rule)


def test_rounds_and_plain_steps_pay_kept_rows_on_their_way(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    target, logits = loaded(), []
    for rule in (GatedDelta(), Resuming()):
        with_rule(monkeypatch, target, rule)
        states, found = prefilled(target, ids(9)), []
        for keep, length in ((2, 4), (1, 1), (3, 3), (1, 1), (1, 2)):
            mark = states.mark()
            found.append(target.forward(row(*ids(length)), states).logits)
            states.rewind(mark, [keep])
        logits.append(found)
    assert all(mx.array_equal(a, b) for a, b in zip(*logits, strict=True))


def test_layers_of_a_block_start_before_the_rest_is_built(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    target = loaded()
    with_rule(monkeypatch, target, GatedDelta())
    started: list[mx.array] = []
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: started.extend(arrays))
    states = prefilled(target, ids(9))
    target.forward(row(5), states)
    assert started == []  # a prompt, a plain step
    taps = target.forward(row(*ids(3)), states, target.tap_names[1:]).taps
    assert [id(array) for array in started] == [id(tap) for tap in taps.values()]
    with_rule(monkeypatch, target, Resuming())
    target.forward(row(*ids(3)), states)
    assert len(started) == len(taps)  # few layers of few operations start with the rest


@pytest.mark.parametrize("last", [False, True])
def test_taps_of_a_prompt_are_those_of_a_forward(loaded: Loaded, last: bool) -> None:
    target = loaded()
    states, other = target.make_states(), target.make_states()
    for length in (5, 1, 9):
        chunk = row(*ids(length))
        wanted = target.forward(chunk, states, target.tap_names).taps
        found = target.prefill(chunk, other, target.tap_names, last)
        for name, value in found.items():
            assert mx.array_equal(value, wanted[name][:, -1:] if last else wanted[name]), name
    assert first_difference(settled(states), settled(other)) == ""


@pytest.mark.parametrize("rows", [2, 9, 16])
def test_experts_of_a_block_are_not_sorted_however_wide_it_is(tmp_path: Path, rows: int) -> None:
    experts = {"num_experts": 16, "num_experts_per_tok": 8}  # 8 rows reach the sort threshold
    target = load(write_tiny(tmp_path, 5, variant="moe", num_hidden_layers=4, **experts)[0])
    block, single, tokens = target.make_states(), target.make_states(), ids(rows)
    wide = target.forward(row(*tokens), block).logits
    narrow = [target.forward(row(t), single).logits for t in tokens]
    assert mx.array_equal(wide, mx.concatenate(narrow, axis=1))


def test_small_queries_and_keys_are_normalised_alike_in_blocks_and_steps(tmp_path: Path, checkpoint: Any) -> None:
    """Where the constant under the root matters: a convolution fifty times smaller."""
    path = write_tiny(tmp_path, 6, num_hidden_layers=4)[0]
    target, theirs = load(path), mlx_lm_model(path)
    for model in (target.model, theirs):
        for layer in model.language_model.model.layers:
            if layer.is_linear:
                layer.linear_attn.conv1d.weight = 0.02 * layer.linear_attn.conv1d.weight
    tokens = ids(14)
    block, single, cache = target.make_states(), target.make_states(), theirs.make_cache()
    wide = target.forward(row(*tokens), block).logits
    narrow = [target.forward(row(t), single).logits for t in tokens]
    stock = [theirs(row(t), cache=cache) for t in tokens]
    assert mx.array_equal(wide, mx.concatenate(narrow, axis=1))
    assert mx.array_equal(wide, mx.concatenate(stock, axis=1))


def test_a_forward_that_fails_half_way_can_be_taken_back(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    target, tokens = loaded(), ids(9)
    states, only = prefilled(target, tokens), prefilled(target, tokens)
    mark = states.mark()
    broken = target.model.language_model.model.layers[3].mlp
    with monkeypatch.context() as patch:
        patch.setattr(type(broken), "__call__", lambda self, x: 1 / 0 if self is broken else x)
        with pytest.raises(ZeroDivisionError):
            target.forward(row(*ids(4, seed=5)), states)
    states.rewind(mark, [0])
    assert first_difference(settled(states), settled(only)) == ""


def test_four_thousand_rejected_rounds_do_not_drift(tmp_path: Path) -> None:
    """Every draft is wrong, so every round keeps its anchor alone; compared with the same tokens as a prompt."""
    small = {"num_hidden_layers": 3, "full_attention_interval": 2, "intermediate_size": 32}
    target = load(write_tiny(tmp_path, 7, **small)[0])
    tokens = ids(4000, seed=8)
    states = target.make_states()
    for place, token in enumerate(tokens):
        mark = states.mark()
        target.forward(row(token, 7 + place % 250, 9), states)
        states.rewind(mark, [1])
        if place % 16 == 0:
            mx.eval(states.arrays())
    fresh = target.make_states()
    for start in range(0, 4000, 500):
        target.prefill(row(*tokens[start : start + 500]), fresh)
    a, b = settled(states), settled(fresh)
    assert a.keys() == b.keys() and {"0.recurrent", "0.window", "2.recurrent", "2.window"} < a.keys()
    for name, value in a.items():
        # behind attention, whose long prompts round otherwise than single rows
        alike = mx.array_equal(value, b[name]) if name[0] == "0" else mx.allclose(value, b[name], rtol=0, atol=1e-4)
        assert alike, name
    mine, other = (target.forward(row(11), s).logits for s in (states, fresh))
    assert mx.allclose(mine, other, rtol=0, atol=1e-5) and mx.argmax(mine).item() == mx.argmax(other).item()


def test_the_engine_replies_what_a_greedy_loop_over_mlx_lm_replies(checkpoint: Any) -> None:
    for stored in ({}, {"variant": "moe", "bits": 4, "dtype": "bfloat16"}):
        path = checkpoint(**stored, vocab_size=262)  # no id without text: the engine never picks one of those
        prompt = [token % 255 for token in ids(23, seed=4)]
        theirs = mlx_lm_model(path)
        cache, token, expected = theirs.make_cache(), prompt[-1], []
        theirs(row(*prompt[:-1]), cache=cache)
        for _ in range(30):
            token = int(mx.argmax(theirs(row(token), cache=cache)[0, -1]).item())
            expected.append(token)
        for kind in ("none", "prompt-lookup"):
            pair = mlx_spec.load(str(path), kind=kind)
            assert list(mlx_spec.generate(pair, prompt, max_tokens=30, ignore_eos=True).token_ids) == expected


# -- what it says of itself ----------------------------------------------------------------------------


def test_taps_embedding_and_head(loaded: Loaded) -> None:
    for stored in ({}, {"variant": "tied", "bits": 4}):
        target = loaded(**stored)
        assert target.tap_names == ("hidden", *(f"residual.{i}" for i in range(5)))
        seen = target.forward(row(*ids(6)), target.make_states(), target.tap_names)
        trunk = target.model.language_model.model
        assert mx.array_equal(trunk.norm(seen.taps["residual.4"]), seen.taps["hidden"])
        assert mx.array_equal(target.head(seen.taps["hidden"]), seen.logits)
        table = trunk.embed_tokens(mx.arange(target.vocab_size))
        assert mx.array_equal(target.embed(mx.array([[3, 7]])), table[mx.array([[3, 7]])])


@pytest.mark.parametrize("name", ["residual.5", "residual.-1", "hidden_pre"])
def test_an_unknown_tap_is_refused_with_those_there_are(loaded: Loaded, name: str) -> None:
    target = loaded()
    for call in (target.forward, target.prefill):
        with pytest.raises(RefusedError, match=r"taps hidden, residual\.0 to residual\.4"):
            call(row(5), target.make_states(), (name,))


def test_sizes_and_capabilities(loaded: Loaded) -> None:
    target = loaded(dtype="bfloat16", bits=4)
    assert (target.vocab_size, target.hidden_size, target.context, target.dtype) == (320, 64, 4096, mx.bfloat16)
    flags = target.capabilities
    assert flags.recurrent and flags.conv and flags.batch and flags.quantised_kv and not flags.window
    assert [type(s).__name__ for s in target.make_states()] == ["DeltaState", "KVState"] * 2 + ["DeltaState"]


def test_placeholders_for_other_media_are_refused_by_name(loaded: Loaded) -> None:
    target = loaded(variant="tied", wrapper=True, raw=True, dtype="bfloat16")
    target.check_prompt(ids(5))
    with pytest.raises(UsageError, match=r"prompt token 2: found id 4, the placeholder for image input.*mlx-vlm"):
        target.check_prompt([9, 8, 4, 7])
    with pytest.raises(UsageError, match="video input") as caught:
        target.check_prompt([5])
    assert caught.value.code == "QW02"
    loaded().check_prompt([4, 5, 6])  # a text-only directory declares no placeholders


def test_a_text_only_wrapper_is_the_flat_model(edited: Any, checkpoint: Any) -> None:
    """language_model_only, as text releases of a vision model declare it."""
    path = edited({"language_model_only": True, "vision_config": ...}, wrapper=True)
    flat = edited({}, wrapper=False)
    prompt = row(*ids(9))
    one, other = load(path), load(flat)
    assert mx.array_equal(
        one.forward(prompt, one.make_states()).logits, other.forward(prompt, other.make_states()).logits
    )
