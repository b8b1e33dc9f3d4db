"""Sizes, schedules and file names of the demonstration pair; everything a retraining could want to change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_training.settings import BOS, EOS, PAD, VOCAB

SLIDING, FULL = "sliding_attention", "full_attention"

ROPE: dict[str, dict[str, Any]] = {
    FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}

_COMMON: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": None,
    "head_dim": 32,
    "global_head_dim": 64,
    "attention_k_eq_v": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_double_wide_mlp": False,
    "sliding_window": 128,
    "rope_parameters": ROPE,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
    "use_bidirectional_attention": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "use_cache": True,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": BOS,
    "dtype": "bfloat16",
}

TARGET: dict[str, Any] = {
    **_COMMON,
    "architectures": ["Gemma4ForCausalLM"],
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "num_kv_shared_layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL, SLIDING, SLIDING, FULL],
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 30.0,
}

DRAFTER: dict[str, Any] = {
    "architectures": ["Gemma4AssistantForCausalLM"],
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": TARGET["hidden_size"],
    "use_ordered_embeddings": False,
    "num_centroids": 64,
    "centroid_intermediate_top_k": 8,
    "tie_word_embeddings": True,
    "block_size": 8,
    "dtype": "bfloat16",
    "text_config": {
        **_COMMON,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_kv_shared_layers": 2,
        "layer_types": [SLIDING, FULL],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "final_logit_softcapping": None,
    },
}

GENERATION: dict[str, Any] = {
    "bos_token_id": BOS,
    "eos_token_id": [EOS],
    "pad_token_id": PAD,
    "do_sample": False,
}


@dataclass(frozen=True, slots=True)
class TargetSchedule:
    """Minutes rather than steps: the learning rate follows the clock, so any machine finishes in time."""

    minutes: float = 36.0
    long_share: float = 0.1  # the last part of the time uses long_length
    batch_tokens: int = 1024  # in every process
    short_length: int = 256
    long_length: int = 1024
    peak_rate: float = 3e-3
    warm_up: float = 0.03
    weight_decay: float = 0.1


@dataclass(frozen=True, slots=True)
class DrafterSchedule:
    """As TargetSchedule, for the drafter; `steps` is the number of unrolled drafts per anchor."""

    minutes: float = 45.0
    batch_rows: int = 8  # in every process
    length: int = 256
    steps: int = 7
    step_weights: tuple[float, ...] = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
    hard_share: float = 0.5  # part of the loss on the target's argmax, the rest on its distribution
    peak_rate: float = 3e-3
    warm_up: float = 0.03
    weight_decay: float = 0.05
    rows: int = 6144  # sequences sampled from the target
    sample_length: int = 256  # prompt included


@dataclass(frozen=True, slots=True)
class Work:
    """Where intermediate results live."""

    root: Path

    @property
    def tokenizer(self) -> Path:
        """Directory with tokenizer.json and tokenizer_config.json."""
        return self.root / "tokenizer"

    @property
    def target(self) -> Path:
        """Checkpoint of the target."""
        return self.root / "target.pt"

    @property
    def drafter(self) -> Path:
        """Checkpoint of the drafter."""
        return self.root / "drafter.pt"

    @property
    def samples(self) -> Path:
        """Token rows sampled from the target."""
        return self.root / "samples.pt"
