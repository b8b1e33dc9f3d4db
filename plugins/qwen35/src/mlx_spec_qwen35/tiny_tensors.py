"""Random tensors of a tiny checkpoint, under bare published names, norms as they are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

Tensors = Iterator[tuple[str, np.ndarray]]
Config = Mapping[str, Any]

MIX = 0.03
"""How much of a layer's work reaches its output in checkpoints that agree."""


class Random:
    """Draws tensors so that activations keep a sensible size through the stack."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng

    def norm(self, size: int) -> np.ndarray:
        """A norm weight near 1."""
        values: np.ndarray = 1 + 0.2 * self.rng.standard_normal(size)
        return values

    def matrix(self, *shape: int) -> np.ndarray:
        """A projection (..., out, in)."""
        values: np.ndarray = self.rng.standard_normal(shape) * 1.5 / np.sqrt(shape[-1])
        return values

    def table(self, rows: int, width: int) -> np.ndarray:
        """An embedding."""
        values: np.ndarray = self.rng.standard_normal((rows, width)) / np.sqrt(width)
        return values

    def between(self, low: float, high: float, *shape: int) -> np.ndarray:
        """Evenly spread values."""
        return self.rng.uniform(low, high, shape)


def text_tensors(draw: Random, config: Config) -> Tensors:
    """The text stack: embed_tokens, layers.<i>, norm and, unless tied, lm_head."""
    H, V = config["hidden_size"], config["vocab_size"]
    yield "embed_tokens.weight", draw.table(V, H)
    for i in range(config["num_hidden_layers"]):
        full = (i + 1) % config["full_attention_interval"] == 0
        for name, value in _layer(draw, config, full):
            yield f"layers.{i}.{name}", value
    yield "norm.weight", draw.norm(H)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", draw.matrix(V, H)


def head_tensors(draw: Random, config: Config) -> Tensors:
    """An MTP head: fc, its norms and full-attention layers."""
    H = config["hidden_size"]
    yield "fc.weight", draw.matrix(H, 2 * H)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield f"{name}.weight", draw.norm(H)
    for i in range(config["mtp_num_hidden_layers"]):
        for name, value in _layer(draw, config, full=True):
            yield f"layers.{i}.{name}", value


def _layer(draw: Random, config: Config, full: bool) -> Tensors:
    H = config["hidden_size"]
    yield "input_layernorm.weight", draw.norm(H)
    yield "post_attention_layernorm.weight", draw.norm(H)
    yield from _attention(draw, config) if full else _linear(draw, config)
    if config.get("num_experts"):
        yield from _experts(draw, config)
    else:
        yield from _mlp(draw, "mlp.", H, config["intermediate_size"])


def _attention(draw: Random, config: Config) -> Tensors:
    H, D = config["hidden_size"], config["head_dim"]
    Q, KV = config["num_attention_heads"] * D, config["num_key_value_heads"] * D
    yield "self_attn.q_proj.weight", draw.matrix(2 * Q, H)
    yield "self_attn.k_proj.weight", draw.matrix(KV, H)
    yield "self_attn.v_proj.weight", draw.matrix(KV, H)
    yield "self_attn.o_proj.weight", draw.matrix(H, Q)
    yield "self_attn.q_norm.weight", draw.norm(D)
    yield "self_attn.k_norm.weight", draw.norm(D)


def _linear(draw: Random, config: Config) -> Tensors:
    H, Hk, Hv = config["hidden_size"], config["linear_num_key_heads"], config["linear_num_value_heads"]
    Dv, kernel = config["linear_value_head_dim"], config["linear_conv_kernel_dim"]
    C = 2 * Hk * config["linear_key_head_dim"] + Hv * Dv
    yield "linear_attn.in_proj_qkv.weight", draw.matrix(C, H)
    yield "linear_attn.in_proj_z.weight", draw.matrix(Hv * Dv, H)
    yield "linear_attn.in_proj_b.weight", draw.matrix(Hv, H)
    yield "linear_attn.in_proj_a.weight", draw.matrix(Hv, H)
    yield "linear_attn.conv1d.weight", 0.5 * draw.rng.standard_normal((C, 1, kernel))
    yield "linear_attn.A_log", np.log(draw.between(1, 16, Hv))
    yield "linear_attn.dt_bias", draw.between(-4, 0, Hv)
    yield "linear_attn.norm.weight", draw.norm(Dv)
    yield "linear_attn.out_proj.weight", draw.matrix(H, Hv * Dv)


def _mlp(draw: Random, prefix: str, width: int, inner: int) -> Tensors:
    yield f"{prefix}gate_proj.weight", draw.matrix(inner, width)
    yield f"{prefix}up_proj.weight", draw.matrix(inner, width)
    yield f"{prefix}down_proj.weight", draw.matrix(width, inner)


def _experts(draw: Random, config: Config) -> Tensors:
    H, E, M = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    yield "mlp.gate.weight", draw.matrix(E, H)
    yield "mlp.experts.gate_up_proj", draw.matrix(E, 2 * M, H)
    yield "mlp.experts.down_proj", draw.matrix(E, H, M)
    yield from _mlp(draw, "mlp.shared_expert.", H, config["shared_expert_intermediate_size"])
    yield "mlp.shared_expert_gate.weight", draw.matrix(1, H)


def agreeing(tensors: Tensors) -> Tensors:
    """The same tensors, such that target and head both mostly follow the last token."""
    for name, value in tensors:
        bare = name.removesuffix(".weight")
        if bare == "embed_tokens":
            yield name, value * value.shape[1] ** 0.5
        elif bare.endswith(("o_proj", "out_proj", "down_proj")):
            yield name, MIX * value
        elif bare == "fc":
            yield name, MIX * value + np.eye(*value.shape)
        else:
            yield name, value
