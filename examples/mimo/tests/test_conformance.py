"""The conformance kit on MiMo: plugin, target, state, head and pair, on tiny checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from mimo_reference import Reference

from mlx_spec.testing import (
    DrafterContract,
    Mutation,
    PairContract,
    PluginContract,
    StateContract,
    TargetContract,
    TinyPair,
)


class TestPlugin(PluginContract):
    plugin = "mlx_spec_mimo.plugin"
    entry_point = "mimo"


class TestTarget(TargetContract):
    family = "mimo"
    capabilities = {"batch", "sampling", "taps", "quantised_kv"}


class TestState(StateContract):
    family = "mimo"
    capabilities = {"batch"}


class TestHead(DrafterContract):
    family = "mimo"
    capabilities = {"batch", "sampling", "taps", "quantised_kv"}
    least_acceptance = 0.15

    @pytest.fixture
    def reference_draft(self, folders: TinyPair) -> Callable[[Sequence[int], int], list[int]]:
        reference = Reference(folders.target)
        return lambda tokens, budget: reference.drafts(tokens, budget)[0]


class TestPair(PairContract):
    family = "mimo"
    mutations = {"model_type": Mutation("mimo_other", ("mimo_other",))}
    free = {
        "architectures": "names the class of another library",
        "attention_bias": "every MiMo has biases on q, k and v; the tensors are there or missing",
        "max_position_embeddings": "releases differ in how far they were extended",
        "tie_word_embeddings": "the output head is the target's",
        "num_nextn_predict_layers": "the first layer is used, whatever the number",
        "bos_token_id": "the target's are used",
        "eos_token_id": "the target's are used",
    }
