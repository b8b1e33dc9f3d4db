"""Sizes, schedules and file names; everything a retraining could want to change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_training.settings import BOS, EOS, PAD, VOCAB

LINEAR, FULL = "linear_attention", "full_attention"

TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "use_cache": True,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": BOS,
    "dtype": "bfloat16",
}

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "language_model_only": True,
    "text_config": TEXT,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
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

    minutes: float = 30.0
    long_share: float = 0.1  # the last part of the time uses long_length
    batch_tokens: int = 1024  # in every process
    short_length: int = 128
    long_length: int = 512
    peak_rate: float = 3e-3
    warm_up: float = 0.03
    weight_decay: float = 0.1


@dataclass(frozen=True, slots=True)
class HeadSchedule:
    """As TargetSchedule, for the head; `steps` is the number of unrolled drafts per anchor."""

    minutes: float = 15.0
    batch_rows: int = 8  # in every process
    length: int = 192
    steps: int = 4
    step_weights: tuple[float, ...] = (1.0, 0.9, 0.8, 0.5)
    hard_share: float = 0.5  # part of the loss on the target's argmax, the rest on its distribution
    peak_rate: float = 2e-3
    warm_up: float = 0.03
    weight_decay: float = 0.05
    rows: int = 2048  # sequences sampled from the target
    sample_length: int = 192  # prompt included


@dataclass(frozen=True, slots=True)
class Work:
    """Where intermediate results live."""

    root: Path

    @property
    def target(self) -> Path:
        """Checkpoint of the target."""
        return self.root / "target.pt"

    @property
    def head(self) -> Path:
        """Checkpoint of the MTP head."""
        return self.root / "head.pt"

    @property
    def samples(self) -> Path:
        """Token rows sampled from the target."""
        return self.root / "samples.pt"
