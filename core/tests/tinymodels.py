"""Configurations and tokenizers for tiny checkpoints that the kit writes; unequal sizes for unequal axes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_spec.testing import tiny as kit
from mlx_spec.testing.tiny import write_weights

__all__ = [
    "CONFIGS",
    "GEMMA3",
    "LLAMA",
    "MAMBA",
    "SMALL_LLAMA",
    "TEMPLATE",
    "write_model",
    "write_tokenizer",
    "write_weights",
]

# The kit's sizes with a head of 16, which MLX cannot quantise K/V of in groups of 32, and other vocabularies.
LLAMA = {**kit.LLAMA, "head_dim": 16, "vocab_size": 131}
SMALL_LLAMA = {**kit.SMALL_LLAMA, "hidden_size": 32, "vocab_size": 97}
GEMMA3 = {
    **kit.GEMMA3,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "vocab_size": 113,
    "max_position_embeddings": 256,
}
MAMBA = {
    "model_type": "mamba",
    "architectures": ["MambaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 48,
    "state_size": 8,
    "num_hidden_layers": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 6,
}
CONFIGS = {"llama": LLAMA, "small-llama": SMALL_LLAMA, "gemma3": GEMMA3, "mamba": MAMBA}


def write_model(path: Path, config: str | dict[str, Any] = "llama", *, shards: int = 1, seed: int = 3) -> Path:
    """Write a checkpoint of one of CONFIGS by name, or of any config; return its path."""
    return kit.write_model(path, CONFIGS[config] if isinstance(config, str) else config, shards=shards, seed=seed)


CONTROL = ["<bos>", "<eos>", "<pad>", "<|end|>"]
CORPUS = [
    "red green blue white tick tock tick 1 2 3 4 5 6 7",
    "the quick brown fox jumps over the lazy dog",
    "příliš žluťoučký kůň úpěl ďábelské ódy",
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('role ' + m.role + ' is not known') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_tokenizer(
    path: Path, kind: str = "bytes", *, template: str | None = TEMPLATE, extra: Sequence[str] = ("<think>",)
) -> Path:
    """Write tokenizer.json and tokenizer_config.json.

    kind: "bytes" is byte-level BPE; "fallback" has word pieces, a space mark and byte-fallback tokens; "strip"
    is the same with a decoder that strips one leading space. `extra` are added tokens that are not control tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=CONTROL,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(CORPUS, trainer)
    else:
        words = sorted({"▁" + w for line in CORPUS for w in line.split()})
        letters = sorted({c for line in CORPUS for c in line if ord(c) < 128 and c != " "} | {"▁"})
        pieces = CONTROL + [f"<0x{i:02X}>" for i in range(256)] + letters
        vocab = {p: i for i, p in enumerate(dict.fromkeys(pieces + words))}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<pad>"))
        tokenizer.pre_tokenizer = None
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if kind == "strip" else []))
        tokenizer.add_special_tokens([AddedToken(t, special=True) for t in CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in extra])
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
    }
    if template is not None:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path
