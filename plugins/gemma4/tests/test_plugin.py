"""What the plugin registers, and that it costs nothing until it is used."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from gemma4_oracles.ours import open_ref

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
