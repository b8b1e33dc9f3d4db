"""Gemma 4 text stack and its assistant in plain torch, with the parameter names of published checkpoints.

Only what the demonstration pair uses: no experts, no media, separate K and V, tied embeddings.
B rows, L query positions, T key positions, H target width, h drafter width, D head width, P per-layer width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from demo_training.layers import Linear, Rope, normed, rotate
from torch import Tensor, nn

from .settings import FULL, SLIDING

KV = tuple[Tensor, Tensor]


def rope_tables(config: dict[str, Any], kind: str, positions: Tensor) -> Rope:
    """cos and sin of one layer type for positions [L], each [L, D/2]."""
    D = config["global_head_dim"] if kind == FULL else config["head_dim"]
    rope = config["rope_parameters"][kind]
    pairs = torch.arange(D // 2, dtype=torch.float32)
    rates = rope["rope_theta"] ** (-2.0 * pairs / D)
    if rope["rope_type"] == "proportional":
        turning = int(D * rope["partial_rotary_factor"]) // 2
        rates = torch.where(pairs < turning, rates, torch.zeros_like(rates))
    angles = positions[..., None].float() * rates
    return angles.cos(), angles.sin()


class Norm(nn.Module):
    """RMS norm with a weight."""

    def __init__(self, width: int, eps: float, initial: float = 1.0) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.full((width,), initial)), eps

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self.weight, self.eps)


class Attention(nn.Module):
    """Attention with normed Q, K, V and scale 1; without `owns_kv` it reads another layer's K/V."""

    def __init__(self, config: dict[str, Any], kind: str, owns_kv: bool) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.D, self.eps = config["global_head_dim" if kind == FULL else "head_dim"], eps
        self.q_proj = Linear(width, self.heads * self.D)
        self.o_proj = Linear(self.heads * self.D, width)
        self.q_norm = Norm(self.D, eps, 1.2 * self.D**-0.25)
        self.owns_kv = owns_kv
        if owns_kv:
            self.k_proj = Linear(width, self.kv_heads * self.D)
            self.v_proj = Linear(width, self.kv_heads * self.D)
            self.k_norm = Norm(self.D, eps, 1.2 * self.D**-0.25)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, self.D)

    def keys_values(self, x: Tensor, rope: Rope) -> KV:
        """K and V of positions x [B, L, width], each [B, kv heads, L, D], as a cache stores them."""
        k = self.k_norm(self._split(self.k_proj(x), self.kv_heads)).transpose(1, 2)
        v = normed(self._split(self.v_proj(x), self.kv_heads), None, self.eps).transpose(1, 2)
        return rotate(k, rope).to(Linear.compute), v.to(Linear.compute)

    def forward(self, x: Tensor, rope: Rope, mask: Tensor, kv: KV) -> Tensor:
        """x [B, L, width], mask broadcastable to [B, 1, L, T] (True is visible)."""
        q = self.q_norm(self._split(self.q_proj(x), self.heads)).transpose(1, 2)
        q = rotate(q, rope).to(Linear.compute)
        k, v = kv
        if x.shape[1] == 1:  # the query heads of one K/V head act as query rows: nothing to repeat
            q = q.view(x.shape[0], self.kv_heads, -1, self.D)
        else:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in kv)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        out = out.reshape(x.shape[0], self.heads, x.shape[1], self.D)
        return self.o_proj(out.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))


class Mlp(nn.Module):
    """Gated unit with the tanh form of GELU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(width, inner), Linear(width, inner)
        self.down_proj = Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Layer(nn.Module):
    """One block: attention, gated unit, per-layer input when there is one, then the layer scalar."""

    def __init__(self, config: dict[str, Any], kind: str, owns_kv: bool) -> None:
        super().__init__()
        width, eps, P = config["hidden_size"], config["rms_norm_eps"], config["hidden_size_per_layer_input"]
        damped = config["num_hidden_layers"] ** -0.5
        self.self_attn = Attention(config, kind, owns_kv)
        self.mlp = Mlp(width, config["intermediate_size"])
        self.input_layernorm = Norm(width, eps)
        self.post_attention_layernorm = Norm(width, eps, damped)
        self.pre_feedforward_layernorm = Norm(width, eps)
        self.post_feedforward_layernorm = Norm(width, eps, damped)
        self.layer_scalar = nn.Parameter(torch.ones(1))
        if P:
            self.per_layer_input_gate = Linear(width, P)
            self.per_layer_projection = Linear(P, width)
            self.post_per_layer_input_norm = Norm(width, eps, damped)

    def forward(self, x: Tensor, rope: Rope, mask: Tensor, kv: KV, ple: Tensor | None) -> Tensor:
        """x [B, L, width] and ple [B, L, P] or None -> [B, L, width], float32."""
        attended = self.self_attn(self.input_layernorm(x), rope, mask, kv)
        x = x + self.post_attention_layernorm(attended)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        if ple is not None:
            gated = F.gelu(self.per_layer_input_gate(x), approximate="tanh") * ple
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar


class Stack(nn.Module):
    """Embedding tables, layers and final norm: what sits under `model.` in a checkpoint."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        H, N, P = config["hidden_size"], config["num_hidden_layers"], config["hidden_size_per_layer_input"]
        first = N - config["num_kv_shared_layers"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], H)
        nn.init.normal_(self.embed_tokens.weight, std=H**-0.5)
        kinds = config["layer_types"]
        self.layers = nn.ModuleList(Layer(config, kind, i < first) for i, kind in enumerate(kinds))
        self.norm = Norm(H, config["rms_norm_eps"])
        if P:
            self.embed_tokens_per_layer = nn.Embedding(config["vocab_size_per_layer_input"], N * P)
            nn.init.normal_(self.embed_tokens_per_layer.weight, std=P**-0.5)
            self.per_layer_model_projection = Linear(H, N * P)
            self.per_layer_projection_norm = Norm(P, config["rms_norm_eps"])

    def per_layer_inputs(self, ids: Tensor, x: Tensor) -> Tensor:
        """Token part and context part of every layer's input, [B, L, N, P]."""
        N, P = self.config["num_hidden_layers"], self.config["hidden_size_per_layer_input"]
        token = self.embed_tokens_per_layer(ids).unflatten(-1, (N, P)) * P**0.5
        context = self.per_layer_model_projection(x).float() * self.config["hidden_size"] ** -0.5
        return (token + self.per_layer_projection_norm(context.unflatten(-1, (N, P)))) * 0.5**0.5

    def tables(self, positions: Tensor) -> dict[str, Rope]:
        """Rotation of every layer type in use."""
        return {kind: rope_tables(self.config, kind, positions) for kind in set(self.config["layer_types"])}


class Target(nn.Module):
    """The text model."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.model = Stack(config)

    def forward(
        self, ids: Tensor, rope: dict[str, Rope], masks: dict[str, Tensor], cache: Any = None
    ) -> tuple[Tensor, dict[str, KV]]:
        """ids [B, L] -> hidden after the final norm [B, L, H] and the shared K/V of each layer type.

        `cache.update(layer, k, v)` returns all keys and values so far; without a cache those of `ids`.
        """
        stack, config = self.model, self.model.config
        x = stack.embed_tokens(ids) * config["hidden_size"] ** 0.5
        ple = stack.per_layer_inputs(ids, x)
        shared: dict[str, KV] = {}
        for i, (layer, kind) in enumerate(zip(stack.layers, config["layer_types"], strict=True)):
            if layer.self_attn.owns_kv:
                kv = layer.self_attn.keys_values(layer.input_layernorm(x), rope[kind])
                shared[kind] = kv if cache is None else cache.update(i, *kv)
            x = layer(x, rope[kind], masks[kind], shared[kind], ple[:, :, i])
        return stack.norm(x), shared

    def logits(self, hidden: Tensor) -> Tensor:
        """Capped logits [..., V] of normed hidden states."""
        cap = self.model.config["final_logit_softcapping"]
        raw = F.linear(hidden.to(Linear.compute), self.model.embed_tokens.weight.to(Linear.compute)).float()
        return cap * torch.tanh(raw / cap)


class Drafter(nn.Module):
    """The assistant: no K/V of its own, reads the target's table, hidden state and shared K/V."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.backbone, text = config["backbone_hidden_size"], config["text_config"]
        self.model = Stack(text)
        self.pre_projection = Linear(2 * self.backbone, text["hidden_size"])
        self.post_projection = Linear(text["hidden_size"], self.backbone)

    def forward(
        self,
        embedded: Tensor,
        carry: Tensor,
        rope: dict[str, Rope],
        masks: dict[str, Tensor],
        shared: dict[str, KV],
    ) -> tuple[Tensor, Tensor]:
        """One draft step at L positions: embedded and carry [B, L, H] -> logits [B, L, V], next carry."""
        x = self.pre_projection(torch.cat([embedded.float(), carry.float()], dim=-1)).float()
        for layer, kind in zip(self.model.layers, self.model.config["layer_types"], strict=True):
            x = layer(x, rope[kind], masks[kind], shared[kind], None)
        x = self.model.norm(x)
        table = self.model.embed_tokens.weight.to(Linear.compute)
        return F.linear(x.to(Linear.compute), table), self.post_projection(x).float()


def causal_masks(config: dict[str, Any], length: int) -> dict[str, Tensor]:
    """Visibility of each layer type for a whole sequence, bool [1, 1, L, L]."""
    behind = torch.arange(length)[:, None] - torch.arange(length)[None]
    near = (behind >= 0) & (behind < config["sliding_window"])
    return {FULL: (behind >= 0)[None, None], SLIDING: near[None, None]}


def embed(target: Target, ids: Tensor) -> Tensor:
    """Rows of the target's table times the square root of its width: a drafter's first input."""
    return target.model.embed_tokens(ids).detach() * target.model.config["hidden_size"] ** 0.5
