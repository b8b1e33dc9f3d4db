"""The conformance kit on DFlash and DFlash2 drafters: drafter and pair, on tiny checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import pytest
from qwen35_oracles.dflash_ours import Ours, unpacked

from mlx_spec.testing import DrafterContract, Mutation, PairContract, TinyPair

BORROWED = "the output head is the target's"


@pytest.fixture(autouse=True, scope="module")
def as_stored() -> Iterator[None]:
    """Packed to 4 bits a drafter cannot be compared with one in float64."""
    with unpacked():
        yield


class Blocks(DrafterContract):
    """Drafts are compared with an implementation in float64, fed with the target's own layer outputs."""

    family = "qwen35"
    capabilities: ClassVar = {"batch", "sampling", "taps", "quantised_kv"}

    @pytest.fixture
    def reference_draft(self, folders: TinyPair) -> Callable[[Sequence[int], int], list[int]]:
        if folders.drafter is None:
            raise ValueError("no drafter was written")
        ours = Ours(folders.target, folders.drafter)

        def draft(tokens: Sequence[int], budget: int) -> list[int]:
            _, features = ours.start(tokens)
            return ours.reference.greedy(features, tokens[-1], budget + 1)[0]

        return draft


class TestBlocks(Blocks):
    options: ClassVar = {"drafter": "dflash", "block_size": 8}


class TestSlidingBlocks(Blocks):
    options: ClassVar = {"drafter": "dflash", "block_size": 8, "sliding": True}


class TestSecond(Blocks):
    options: ClassVar = {"drafter": "dflash2", "block_size": 8, "sliding": True}


class TestPair(PairContract):
    family = "qwen35"
    options: ClassVar = {"drafter": "dflash", "block_size": 8, "sliding": True, "causal": False}
    mutations: ClassVar = {
        "hidden_act": Mutation("gelu", ("gelu", "silu")),
        "intermediate_size": Mutation(192, ("[96, 64]", "[192, 64]")),
        "num_attention_heads": Mutation(3, ("3", "a multiple of num_key_value_heads (2)")),
        "num_key_value_heads": Mutation(1, ("[48, 64]", "[24, 64]")),
        "head_dim": Mutation(48, ("[24]", "[48]")),
        "max_position_embeddings": Mutation(2048, ("2048", "4096"), severity="warning"),
        "layer_types": Mutation(["sliding_attention", "linear"], ("'linear'", "full_attention or sliding_attention")),
        "sliding_window": Mutation(None, ("nothing", "sliding_attention")),
        "block_size": Mutation(1, ("L=1", "at least 2")),
        "dflash_config.mask_token_id": Mutation(320, ("320", "an id below vocab_size 320")),
        "dflash_config.target_layer_ids": Mutation([1, 5, 3], ("[1, 5, 3]", "increasing numbers of layers 0 to 7")),
        "dflash_config.causal": Mutation("yes", ("yes", "a valid boolean")),
    }
    free: ClassVar = {
        "model_type": "names the layout of the layers, which is one for all; dflash_config marks the drafter",
        "rms_norm_eps": "any value runs; the norms come from the tensors",
        "rope_theta": "the drafter's own; its context is made by itself",
        "tie_word_embeddings": BORROWED,
    }


class TestPairSecond(PairContract):
    family = "qwen35"
    options: ClassVar = {"drafter": "dflash2", "block_size": 8}
    mutations: ClassVar = {
        **{k: v for k, v in TestPair.mutations.items() if k not in ("sliding_window", "dflash_config.causal")},
        "dflash_config.conv_kernel_size": Mutation(4, ("[2, 3, 64]", "[2, 4, 64]")),
        "dflash_config.conv_group_size": Mutation(24, ("24", "a divisor of 64")),
        "dflash_config.selector_rank": Mutation(13, ("[320, 12]", "[320, 13]")),
        "dflash_config.selector_top_k": Mutation(321, ("321", "at most vocab_size 320")),
        "dflash_config.runtime_block_size": Mutation(9, ("L=9", "2 to 8")),
        "dflash_config.final_logit_softcapping": Mutation(-1.0, ("-1.0", "greater than or equal to 0")),
    }
    free: ClassVar = {
        **TestPair.free,
        "dflash_config.output_multiplier": "any value runs, and is the drafter's own",
        "dflash_config.input_embedding_scale": "any value runs, and is the drafter's own",
    }
