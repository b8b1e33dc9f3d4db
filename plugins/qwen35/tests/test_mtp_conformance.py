"""The conformance kit on MTP heads: external and own, dense and with experts, packed and not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest
from qwen35_oracles.mtp_ours import Ours
from qwen35_oracles.mtp_reference import HeadReference

from mlx_spec.testing import DrafterContract, Mutation, PairContract, TinyPair

HEAD = {"batch", "sampling", "taps", "quantised_kv", "recurrent", "conv"}
SHAPES = "its value shows in the shapes of the tensors"
UNREAD = "read by the target only"


class TestExternalHead(DrafterContract):
    """A drafter directory; matrices are packed when it loads, as by default."""

    family = "qwen35"
    options: ClassVar = {"drafter": "mtp", "agree": True}
    capabilities = HEAD
    least_acceptance = 0.2


class TestOwnHead(DrafterContract):
    """A published checkpoint that drafts for itself, against the float64 reference."""

    family = "qwen35"
    options: ClassVar = {"drafter": "own", "raw": True, "wrapper": True, "agree": True}
    capabilities = HEAD

    @pytest.fixture(autouse=True)
    def unpacked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from mlx_spec.settings import reset_settings

        monkeypatch.setenv("MLX_SPEC_QUANTIZE_DRAFTER", "0")
        reset_settings()

    @pytest.fixture
    def reference_draft(self, folders: TinyPair, unpacked: None) -> Callable[[Sequence[int], int], list[int]]:
        assert folders.drafter is not None
        pair, reference = Ours(folders.target, folders.drafter), HeadReference(folders.drafter, deltas=True)

        def draft(tokens: Sequence[int], budget: int) -> list[int]:
            if len(tokens) < 2:  # nothing is committed yet
                return []
            _, taps = pair.lane(tokens)
            return pair.expected(reference, tokens, taps["hidden"], budget)[0]

        return draft


class TestHeadWithExperts(DrafterContract):
    """Experts in 4 bits, as stored; two layers."""

    family = "qwen35"
    options: ClassVar = {"drafter": "mtp", "variant": "moe", "bits": 4, "mtp_num_hidden_layers": 2, "agree": True}
    capabilities = HEAD


class TestPair(PairContract):
    family = "qwen35"
    options: ClassVar = {"drafter": "mtp"}
    mutations: ClassVar = {
        "model_type": Mutation("qwen3_5_mtp_other", ("a head without its own token embedding",)),
        "block_size": Mutation(1, ("1", "at least 2")),
        "text_config.intermediate_size": Mutation(80, ("[96, 64]", "[80, 64]")),
        "text_config.num_attention_heads": Mutation(2, ("[256, 64]", "[128, 64]")),
        "text_config.num_key_value_heads": Mutation(1, ("[64, 64]", "[32, 64]")),
        "text_config.head_dim": Mutation(16, ("[32]", "[16]")),
        "text_config.attention_bias": Mutation(True, ("layers.0.self_attn.k_proj.bias",)),
        "text_config.max_position_embeddings": Mutation(2048, ("2048", "4096"), severity="warning"),
        "text_config.rope_parameters.rope_type": Mutation("linear", ("linear", "default")),
        "text_config.rope_parameters.mrope_section": Mutation([1, 2, 1], ("[1, 2, 1]", "[2, 1, 1]")),
        "text_config.rope_parameters.mrope_interleaved": Mutation(False, ("False", "True")),
        "text_config.rope_parameters.partial_rotary_factor": Mutation(0.5, ("0.5", "0.25")),
        "text_config.linear_num_value_heads": Mutation(4, ("4", "6")),
        "text_config.linear_num_key_heads": Mutation(3, ("3", "2")),
    }
    free: ClassVar = {
        "tie_word_embeddings": "the output head is the target's",
        "text_config.tie_word_embeddings": "the output head is the target's",
    }


class TestPairWithExperts(PairContract):
    """What only a head with experts declares."""

    family = "qwen35"
    options: ClassVar = {"drafter": "mtp", "variant": "moe"}
    mutations: ClassVar = {
        **{name: value for name, value in TestPair.mutations.items() if "intermediate_size" not in name},
        "text_config.num_experts": Mutation(5, ("5", "6")),
        "text_config.moe_intermediate_size": Mutation(16, ("[6, 32, 64]", "[6, 16, 64]")),
        "text_config.shared_expert_intermediate_size": Mutation(32, ("[64, 64]", "[32, 64]")),
        "text_config.num_experts_per_tok": Mutation(9, ("9", "at most 6")),
        "text_config.decoder_sparse_step": Mutation(2, ("2", "1")),
    }
    free: ClassVar = {
        **TestPair.free,
        "text_config.intermediate_size": "no layer of a model with experts has this width",
        "text_config.norm_topk_prob": "either is a law that experts are mixed by",
    }
