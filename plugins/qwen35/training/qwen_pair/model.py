"""Qwen 3.5 text stack in plain torch, with the names and norm deltas of published raw checkpoints.

Only what the demonstration uses: no experts, no media, tied embeddings.
B rows, L positions of this call, T positions seen so far, H width, D head width, Hk/Hv key/value heads of the
gated-delta layers, Dk/Dv their widths, C channels of their convolution.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from demo_training.layers import Linear, Rope, normed, rotate
from torch import Tensor, nn

from .settings import LINEAR

KV = tuple[Tensor, Tensor]
CHUNK = 64


class DeltaNorm(nn.Module):
    """RMS norm whose stored weight is the distance from one, as raw checkpoints keep it."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, 1.0 + self.weight, self.eps)


class GatedNorm(nn.Module):
    """RMS norm over a value head times the SiLU of its gate; this weight is stored as it multiplies."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return normed(x, self.weight, self.eps) * F.silu(gate.float())


class Mlp(nn.Module):
    """Gated unit with SiLU."""

    def __init__(self, width: int, inner: int, damped: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(width, inner), Linear(width, inner)
        self.down_proj = damp(Linear(inner, width), damped)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def damp(linear: Linear, factor: float) -> Linear:
    """Shrink the initial weights of a matrix that writes to the residual stream."""
    with torch.no_grad():
        linear.weight.mul_(factor)
    return linear


def rope_table(config: dict[str, Any], positions: Tensor) -> Rope:
    """cos and sin of positions [...], each [..., R/2] with R the rotated part of a head."""
    rope = config["rope_parameters"]
    turned = int(config["head_dim"] * rope["partial_rotary_factor"])
    rates = rope["rope_theta"] ** (-torch.arange(0, turned, 2, dtype=torch.float32) / turned)
    angles = positions[..., None].float() * rates
    return angles.cos(), angles.sin()


def partly_rotated(x: Tensor, rope: Rope) -> Tensor:
    """Turn the first dimensions of every head of x [B, heads, L, D] and leave the rest."""
    turned = 2 * rope[0].shape[-1]
    return torch.cat([rotate(x[..., :turned], rope), x[..., turned:].float()], dim=-1)


class Attention(nn.Module):
    """Full attention with normed queries and keys and a sigmoid gate on its output."""

    def __init__(self, config: dict[str, Any], damped: float) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.D = config["head_dim"]
        self.q_proj = Linear(width, 2 * self.heads * self.D)  # per head: query, then gate
        self.k_proj, self.v_proj = Linear(width, self.kv_heads * self.D), Linear(width, self.kv_heads * self.D)
        self.o_proj = damp(Linear(self.heads * self.D, width), damped)
        self.q_norm, self.k_norm = DeltaNorm(self.D, eps), DeltaNorm(self.D, eps)

    def queries(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """x [B, L, H] -> queries [B, heads, L, D] and gates [B, L, heads * D]."""
        q, gate = self.q_proj(x).view(*x.shape[:2], self.heads, 2 * self.D).chunk(2, dim=-1)
        return partly_rotated(self.q_norm(q).transpose(1, 2), rope).to(Linear.compute), gate.flatten(2)

    def keys_values(self, x: Tensor, rope: Rope) -> KV:
        """K and V of x [B, L, H] for every query head, each [B, heads, L, D]."""
        shape, group = (*x.shape[:2], self.kv_heads, self.D), self.heads // self.kv_heads
        k = partly_rotated(self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2), rope)
        pair = k.to(Linear.compute), self.v_proj(x).view(shape).transpose(1, 2)
        return pair[0].repeat_interleave(group, dim=1), pair[1].repeat_interleave(group, dim=1)

    def finish(self, out: Tensor, gate: Tensor) -> Tensor:
        """Attended values [B, heads, L, D] -> [B, L, H]."""
        return self.o_proj(out.transpose(1, 2).flatten(2) * torch.sigmoid(gate))

    def forward(self, x: Tensor, rope: Rope, past: KV | None = None) -> tuple[Tensor, KV]:
        """x [B, L, H] after the positions of `past` -> output and all keys and values."""
        q, gate = self.queries(x, rope)
        k, v = self.keys_values(x, rope)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        alone = x.shape[1] == 1  # a single query sees everything
        if not alone and past is not None:
            raise ValueError("several positions after a past are not needed here")
        out = F.scaled_dot_product_attention(q, k, v, is_causal=not alone)
        return self.finish(out, gate), (k, v)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, log_g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule, chunk by chunk.

    q, k [B, h, L, Dk], v [B, h, L, Dv], log_g and beta [B, h, L], S [B, h, Dv, Dk], all float32.
    With c_t the sum of log_g up to t inside a chunk, S_t = e^c_t S_0 + sum_i<=t e^(c_t - c_i) delta_i k_i^T, so
    the innovations solve a unit lower triangular system. Returns y [B, h, L, Dv] and the last S.
    """
    out = []
    for start in range(0, q.shape[2], CHUNK):
        part = slice(start, start + CHUNK)
        qc, kc, vc, b = q[:, :, part], k[:, :, part], v[:, :, part], beta[:, :, part, None]
        c = log_g[:, :, part].cumsum(-1)
        below = torch.ones(c.shape[-1], c.shape[-1], dtype=torch.bool).tril()
        decay = (c[..., :, None] - c[..., None, :]).masked_fill(~below, -torch.inf).exp()
        grown = c.exp()[..., None]
        system = (b * decay * (kc @ kc.transpose(-1, -2))).tril(-1)
        wanted = b * (vc - grown * (kc @ S.transpose(-1, -2)))
        delta = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        out.append(grown * (qc @ S.transpose(-1, -2)) + (decay * (qc @ kc.transpose(-1, -2))) @ delta)
        left = (c[..., -1:] - c).exp()[..., None]
        S = grown[:, :, -1:] * S + (left * delta).transpose(-1, -2) @ kc
    return torch.cat(out, dim=2), S


class GatedDeltaNet(nn.Module):
    """Linear attention: a short convolution, then a matrix state updated by the gated delta rule."""

    def __init__(self, config: dict[str, Any], damped: float) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.Hk, self.Hv = config["linear_num_key_heads"], config["linear_num_value_heads"]
        self.Dk, self.Dv = config["linear_key_head_dim"], config["linear_value_head_dim"]
        self.taps = config["linear_conv_kernel_dim"]
        channels = 2 * self.Hk * self.Dk + self.Hv * self.Dv
        self.in_proj_qkv, self.in_proj_z = Linear(width, channels), Linear(width, self.Hv * self.Dv)
        self.in_proj_b, self.in_proj_a = Linear(width, self.Hv), Linear(width, self.Hv)
        self.conv1d = nn.Conv1d(channels, channels, self.taps, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.Hv).uniform_(1, 16).log())
        steps = torch.empty(self.Hv).uniform_(-6.9, -2.3).exp()
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))  # softplus gives `steps` back
        self.norm = GatedNorm(self.Dv, eps)
        self.out_proj = damp(Linear(self.Hv * self.Dv, width), damped)

    def empty(self, rows: int) -> KV:
        """The state before the first position: convolution window [B, taps - 1, C] and S [B, Hv, Dv, Dk]."""
        window = torch.zeros(rows, self.taps - 1, self.conv1d.weight.shape[0], dtype=Linear.compute)
        return window, torch.zeros(rows, self.Hv, self.Dv, self.Dk)

    def forward(self, x: Tensor, state: KV) -> tuple[Tensor, KV]:
        """x [B, L, H] -> output and the state after it."""
        L = x.shape[1]
        rows = torch.cat([state[0], self.in_proj_qkv(x)], dim=1)
        weight = self.conv1d.weight[:, 0]
        mixed = F.silu(sum(rows[:, j : j + L].float() * weight[:, j] for j in range(self.taps)))
        keys = self.Hk * self.Dk
        q, k, v = mixed.split([keys, keys, self.Hv * self.Dv], dim=-1)
        group = self.Hv // self.Hk
        q = unit(q.unflatten(-1, (self.Hk, self.Dk))).transpose(1, 2).repeat_interleave(group, 1) * self.Dk**-0.5
        k = unit(k.unflatten(-1, (self.Hk, self.Dk))).transpose(1, 2).repeat_interleave(group, 1)
        v = v.unflatten(-1, (self.Hv, self.Dv)).transpose(1, 2)
        beta = torch.sigmoid(self.in_proj_b(x).float()).transpose(1, 2)
        log_g = (-self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)).transpose(1, 2)
        y, S = gated_delta(q, k, v, log_g, beta, state[1])
        y = self.norm(y.transpose(1, 2), self.in_proj_z(x).unflatten(-1, (self.Hv, self.Dv)))
        return self.out_proj(y.flatten(2)), (rows[:, L:], S)


def unit(x: Tensor) -> Tensor:
    """Vectors of length one along the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class Layer(nn.Module):
    """One block: a mixer of either kind, then the gated unit."""

    def __init__(self, config: dict[str, Any], kind: str) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        damped = 0.2 * (2 * config["num_hidden_layers"]) ** -0.5
        if kind == LINEAR:
            self.linear_attn = GatedDeltaNet(config, damped)
        else:
            self.self_attn = Attention(config, damped)
        self.mlp = Mlp(width, config["intermediate_size"], damped)
        self.input_layernorm, self.post_attention_layernorm = DeltaNorm(width, eps), DeltaNorm(width, eps)

    def forward(self, x: Tensor, rope: Rope, state: KV | None) -> tuple[Tensor, KV]:
        """x [B, L, H] and the layer's state before it -> both after it."""
        inner = self.input_layernorm(x)
        if hasattr(self, "linear_attn"):
            mixed, state = self.linear_attn(inner, self.linear_attn.empty(len(x)) if state is None else state)
        else:
            mixed, state = self.self_attn(inner, rope, state)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), state


class Stack(nn.Module):
    """Table, layers and final norm: what sits under `model.language_model.` in a checkpoint."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        H = config["hidden_size"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], H)
        nn.init.normal_(self.embed_tokens.weight, std=H**-0.5)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config["layer_types"])
        self.norm = DeltaNorm(H, config["rms_norm_eps"])


class Target(nn.Module):
    """The text model."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, self.model = config, Stack(config)

    def forward(self, ids: Tensor, past: list[KV] | None = None, start: int = 0) -> tuple[Tensor, list[KV]]:
        """ids [B, L] from position `start` on -> hidden after the final norm [B, L, H], the layers' states."""
        rope = rope_table(self.config, torch.arange(start, start + ids.shape[1]))
        x, states = self.model.embed_tokens(ids), []
        for i, layer in enumerate(self.model.layers):
            x, state = layer(x, rope, None if past is None else past[i])
            states.append(state)
        return self.model.norm(x), states

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of normed hidden states."""
        table = self.model.embed_tokens.weight
        return F.linear(hidden.to(Linear.compute), table.to(Linear.compute)).float()
