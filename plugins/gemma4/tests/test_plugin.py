"""What the plugin registers, and that it costs nothing until it is used."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import pytest
from gemma4_oracles.ours import open_ref

from mlx_spec.api import generate
from mlx_spec.checkpoint import tensor_index
from mlx_spec.pair import load
from mlx_spec.registry import Register, Registry
from mlx_spec_gemma4 import plugin


@pytest.fixture
def registry() -> Registry:
    register = Register("gemma4", "mlx-spec-gemma4")
    plugin.spec_register(register)
    out = Registry()
    out.add(register)
    return out


def test_claims(registry: Registry) -> None:
    assert registry.model_types() == ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
    assert all(registry.target_owner(name) == "gemma4" for name in registry.model_types())
    assert registry.kinds() == ("mtp",)


@pytest.mark.parametrize(("variant", "model_type"), [("E", "gemma4_assistant"), ("UNI", "gemma4_unified_assistant")])
def test_an_assistant_is_recognised_from_its_directory(
    registry: Registry, pair_dirs: Any, variant: str, model_type: str
) -> None:
    target, drafter = map(open_ref, pair_dirs(variant))
    found = registry.drafter_for(drafter)
    assert found is not None
    owner, card = found
    assert (owner, card.kind, card.model_type, card.block_size, card.vocab_size) == (
        "gemma4",
        "mtp",
        model_type,
        4,
        320,
    )
    assert registry.drafter_for(target) is None


@pytest.mark.parametrize(
    ("declared", "asked", "block", "source", "note"),
    [
        (8, None, 8, "drafter", ""),
        (..., None, 4, "default", ""),
        (8, 5, 5, "operator", ""),
        (8, 12, 12, "operator", "block size L=12 from operator is wider than the L=8 the drafter declares"),
    ],
)
def test_the_declared_block_size_is_the_one_that_runs(
    edited: Any, declared: Any, asked: int | None, block: int, source: str, note: str
) -> None:
    target, drafter = edited("E", drafter={"block_size": declared})
    pair = load(str(target), str(drafter), block_size=asked, probe=False)
    assert (pair.plan.block_size, pair.plan.block_size_from) == (block, source)
    assert f"block_size={block} block_size_from={source}" in pair.plan.line()
    assert [text.split(";")[0] for text in pair.plan.notes] == ([note] if note else [])
    out = generate(pair, [9, 8, 7], None, 40, ignore_eos=True, adaptive=False)
    assert out.speculation.block_size == block
    assert len(out.speculation.proposed_by_position) == block - 1


def test_an_assistant_adds_its_weights_and_no_more(pair_dirs: Any, request: pytest.FixtureRequest) -> None:
    target, drafter = pair_dirs("E", seed=6)
    weights = sum(info.nbytes for info in tensor_index(drafter).values())

    def active() -> int:
        gc.collect()
        return mx.get_active_memory()

    limit = mx.set_cache_limit(0)  # a buffer that is used again may be larger than what is put into it
    request.addfinalizer(lambda: mx.set_cache_limit(limit))
    start = active()
    alone = load(str(target))
    one = active()
    pair = load(str(target), str(drafter))  # with a probe, which must leave nothing either
    both = active()
    assert pair.plan.active and alone.drafter is None
    assert weights <= both - one - (one - start) <= 1.1 * weights


def test_the_hooks_load_a_pair_that_runs(pair_dirs: Any) -> None:
    target_ref, drafter_ref = map(open_ref, pair_dirs("D31"))
    target = plugin.spec_load_target(ref=target_ref, config=target_ref.config)
    drafter = plugin.spec_load_drafter(ref=drafter_ref, card=plugin.detect(drafter_ref), target=target)
    assert (target.vocab_size, target.hidden_size, target.context, target.dtype) == (320, 64, 4096, mx.float32)
    assert target.capabilities.window
    assert drafter.kind == "mtp"
    assert drafter.capabilities.history == "last"
    assert set(drafter.taps) <= set(target.tap_names)
    assert drafter.make_state().nbytes == 0
