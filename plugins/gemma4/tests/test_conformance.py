"""The conformance kit on Gemma 4: plugin, targets, states, assistants and pairs, on tiny checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from gemma4_oracles.reference import Assistant, Target

from mlx_spec.testing import (
    DrafterContract,
    Mutation,
    PairContract,
    PluginContract,
    StateContract,
    TargetContract,
    TinyPair,
)

TARGET = {"batch", "sampling", "window", "taps", "quantised_kv"}
UNREAD = "an assistant has no K/V projections and no experts of its own"


class E:
    """Shared K/V and per-layer inputs."""

    family = "gemma4"
    options = {"variant": "E"}


class D31(E):
    """V from K in full layers."""

    options = {"variant": "D31"}


class MOE(E):
    """Experts."""

    options = {"variant": "MOE"}


class UNI(E):
    """The unified layout."""

    options = {"variant": "UNI"}


class TestPlugin(PluginContract):
    plugin = "mlx_spec_gemma4.plugin"
    entry_point = "gemma4"


class TestTargetE(E, TargetContract):
    capabilities = TARGET


class TestTargetD31(D31, TargetContract):
    capabilities = TARGET


class TestTargetMOE(MOE, TargetContract):
    capabilities = TARGET


class TestTargetUNI(UNI, TargetContract):
    capabilities = TARGET


class TestState(E, StateContract):
    capabilities = {"batch", "window"}


class Assistants(DrafterContract):
    """Drafts are compared with an implementation in float64 that shares no code with the plugin."""

    capabilities = TARGET

    @pytest.fixture
    def reference_draft(self, folders: TinyPair) -> Callable[[Sequence[int], int], list[int]]:
        target = Target(folders.target)
        assistant = Assistant(folders.drafter, target)

        def draft(tokens: Sequence[int], budget: int) -> list[int]:
            if len(tokens) < 2:
                return []
            _, hidden = target.run(list(tokens[:-1]))
            return assistant.draft(tokens[-1], hidden[-1], len(tokens) - 2, budget)[0]

        return draft


class TestAssistantE(E, Assistants):
    pass


class TestAssistantWithCentroids(E, Assistants):
    options = {"variant": "E", "ordered": True}


class TestAssistantD31(D31, Assistants):
    pass


class TestAssistantMOE(MOE, Assistants):
    pass


class TestAssistantUNI(UNI, Assistants):
    pass


class TestPair(E, PairContract):
    mutations = {
        "model_type": Mutation("gemma4_unified_assistant", ("gemma4_text", "gemma4_unified_assistant")),
        "use_ordered_embeddings": Mutation(True, ("masked_embedding.centroids.weight",)),
        "tie_word_embeddings": Mutation(False, ("lm_head.weight",)),
        "text_config.num_attention_heads": Mutation(5, ("5 query heads", "a multiple of 2")),
        "text_config.max_position_embeddings": Mutation(2048, ("2048", "4096"), severity="warning"),
        "text_config.final_logit_softcapping": Mutation(30.0, ("30", "null"), severity="warning"),
        "text_config.num_hidden_layers": Mutation(5, ("5", "4")),
        "text_config.layer_types": Mutation(["sliding_attention"] * 4, ("[64, 32]", "[128, 32]")),
        "text_config.use_bidirectional_attention": Mutation(3, ("use_bidirectional_attention", "int 3")),
    }
    free = {
        "num_centroids": "read with use_ordered_embeddings only, which is tried below",
        "centroid_intermediate_top_k": "read with use_ordered_embeddings only, which is tried below",
        "block_size": "how many tokens to draft is up to the user",
        "text_config.num_key_value_heads": UNREAD,
        "text_config.num_global_key_value_heads": UNREAD,
        "text_config.attention_k_eq_v": UNREAD,
        "text_config.num_experts": UNREAD,
        "text_config.top_k_experts": UNREAD,
        "text_config.moe_intermediate_size": UNREAD,
        "text_config.rms_norm_eps": "any value runs; the norms come from the tensors",
        "text_config.tie_word_embeddings": "the outer one decides",
        "text_config.model_type": "the outer one decides",
    }


class TestPairWithCentroids(PairContract):
    """The two fields of the centroid head, where there is one."""

    family = "gemma4"
    options = {"variant": "E", "ordered": True}
    mutations = {
        **TestPair.mutations,
        "use_ordered_embeddings": Mutation(False, ("masked_embedding.centroids.weight",)),
        "num_centroids": Mutation(15, ("num_centroids 15", "a divisor of vocab_size 320")),
        "centroid_intermediate_top_k": Mutation(17, ("centroid_intermediate_top_k 17", "at most num_centroids 16")),
    }
    free = {name: reason for name, reason in TestPair.free.items() if "centroid" not in name}
