"""The conformance kit on Qwen 3.5: plugin, targets and states, on tiny checkpoints."""

from __future__ import annotations

from typing import ClassVar

import pytest

from mlx_spec.full_model import FullModelDrafter
from mlx_spec.models import Drafter, Target
from mlx_spec.testing import DrafterContract, PluginContract, StateContract, TargetContract

TARGET = {"batch", "sampling", "recurrent", "conv", "taps", "quantised_kv"}
SMALL = {"num_hidden_layers": 3, "full_attention_interval": 2}  # the last layer is a linear one


class Dense:
    """Untied, flat."""

    family = "qwen35"
    options: ClassVar = {"variant": "dense", "num_hidden_layers": 4}


class Published:
    """The published layout: a wrapper with a vision tower and an MTP head, tied."""

    family = "qwen35"
    options: ClassVar = {"variant": "tied", "wrapper": True, "raw": True, "drafter": "own", **SMALL}


class Experts:
    """Experts, quantised, activations in bfloat16."""

    family = "qwen35"
    options: ClassVar = {"variant": "moe", "bits": 4, "dtype": "bfloat16", **SMALL}


class TestPlugin(PluginContract):
    plugin = "mlx_spec_qwen35.plugin"
    entry_point = "qwen35"


class TestTargetDense(Dense, TargetContract):
    capabilities = TARGET


class TestTargetPublished(Published, TargetContract):
    capabilities = TARGET


class TestTargetExperts(Experts, TargetContract):
    capabilities = TARGET


class TestStateDense(Dense, StateContract):
    capabilities = TARGET


class TestStateExperts(Experts, StateContract):
    capabilities = TARGET


class TestATargetDraftingForItself(DrafterContract):
    """A full model as the drafter: its own states go through single steps, catch-ups and rows of unequal length."""

    family = "qwen35"
    options: ClassVar = {"variant": "dense", **SMALL}
    capabilities: ClassVar = {"batch", "sampling", "recurrent", "conv", "quantised_kv"}
    least_acceptance = 1.0

    @pytest.fixture
    def drafter(self, target: Target) -> Drafter:
        """The target's own weights."""
        return FullModelDrafter(target)
