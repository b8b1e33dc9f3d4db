"""The MTP head in plain torch: one full-attention layer, unrolled over its own drafts.

Position j holds the token at j + 1 and a hidden state of position j, and predicts the token at j + 2. A block
anchored at j commits positions 0..j with the target's hidden states; its later steps stand at j + 1, j + 2, ...
with the hidden state the step before them made. Every anchor of a sequence is unrolled at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from demo_training.layers import Linear
from torch import Tensor, nn

from .model import KV, DeltaNorm, Layer, Target, rope_table
from .settings import FULL


class Head(nn.Module):
    """What sits under `mtp.` in a checkpoint."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config, (H, eps) = config, (config["hidden_size"], config["rms_norm_eps"])
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = DeltaNorm(H, eps), DeltaNorm(H, eps)
        self.fc = Linear(2 * H, H)
        self.layers = nn.ModuleList([Layer(config, FULL)])
        self.norm = DeltaNorm(H, eps)

    def start_from(self, target: Target) -> None:
        """Initial layer and final norm: the target's last ones; the hidden state passes through `fc`."""
        H = self.config["hidden_size"]
        with torch.no_grad():
            self.layers[0].load_state_dict(target.model.layers[-1].state_dict())
            self.norm.weight.copy_(target.model.norm.weight)
            self.pre_fc_norm_hidden.weight.copy_(target.model.norm.weight)
            self.fc.weight.mul_(0.2)
            self.fc.weight[:, H:] += torch.eye(H)

    def joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The layer's input of tokens and hidden states [B, L, H]."""
        pair = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        return self.fc(torch.cat(pair, dim=-1)).float()

    def step(self, x: Tensor, positions: Tensor, committed: KV | None, own: list[KV]) -> tuple[Tensor, KV]:
        """One step of every anchor's block: x [B, Q, H] -> hidden state [B, Q, H], keys and values written.

        committed: those of the first steps of all anchors, of which anchor j sees 0..j; None in the first step.
        own: those of the later steps of the same anchor, one position each.
        """
        layer = self.layers[0]
        attention, rope = layer.self_attn, rope_table(self.config, positions)
        inner = layer.input_layernorm(x)
        q, gate = attention.queries(inner, rope)
        kv = attention.keys_values(inner, rope)
        if committed is None:
            out = F.scaled_dot_product_attention(q, *kv, is_causal=True)
        else:
            out = attend(q, committed, [*own, kv])
        x = x + attention.finish(out, gate)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x), kv


def attend(q: Tensor, committed: KV, own: list[KV]) -> Tensor:
    """Attention of q [B, heads, Q, D] to committed keys up to the same index and to one own key per step."""
    count = q.shape[2]
    keys, values = (t[:, :, :count] for t in committed)
    hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
    scores = (q @ keys.transpose(-1, -2)).float().masked_fill(hidden, -torch.inf)
    single = [(q * k[:, :, :count]).float().sum(-1, keepdim=True) for k, _ in own]
    weights = (torch.cat([scores, *single], dim=-1) * q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
    out = weights[..., :count] @ values
    for i, (_, v) in enumerate(own):
        out = out + weights[..., count + i, None] * v[:, :, :count]
    return out


def unroll(target: Target, head: Head, rows: Tensor, hidden: Tensor, steps: int) -> Iterator[Tensor]:
    """Logits [B, T - s, V] of steps s = 1..steps at every anchor of rows [B, T].

    hidden [B, T, H] is the target's. Row j of step s is about the token at j + s + 1; it is fed the text itself.
    While all earlier drafts were right that is what a real round feeds, and afterwards the round is over.
    """
    embedded = target.model.embed_tokens(rows).detach()
    committed: KV | None = None
    own: list[KV] = []
    carry = hidden
    for s in range(1, steps + 1):
        count = rows.shape[1] - s
        x = head.joined(embedded[:, s:], carry[:, :count])
        carry, kv = head.step(x, torch.arange(s - 1, s - 1 + count), committed, own)
        if committed is None:
            committed = kv
        else:
            own.append(kv)
        yield target.logits(carry)
