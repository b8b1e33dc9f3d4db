"""The network of an MTP head: from a hidden state and the next token to a guess at the token after it.

    row p:   e = pre_fc_norm_embedding(embed(token[p + 1])),  u = pre_fc_norm_hidden(h[p])
             x = fc([e, u])                                    embedding first
             x = layers(x)                                     gated full attention, at position p, own K/V
             logits = target's output head(norm(x)) guess token[p + 2]

h[p] is the target's hidden state after its final norm; further drafts of a block get the head's own normed output in
its place. Sources: mlx-vlm 0.7.10 `qwen3_5_mtp.py` (order, norms, one position per row); the layers are mlx-lm's
`qwen3_5.DecoderLayer`, with experts where the target has them; several layers are stacked in one pass. A head of
another make may have the halves the other way round, or read the state before the norm: `Reading`.
"""

# mypy: disable-error-code="misc, no-any-return"
# mlx.nn is untyped to mypy: its classes and calls are Any.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.qwen3_5 import DecoderLayer, TextModelArgs

from .config import TextConfig

Hidden = Literal["post", "pre"]
Concat = Literal["embedding-first", "hidden-first"]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a head takes in.

    Attributes:
        hidden: the state after ("post") or before ("pre") the final norm, the target's and the head's own alike.
        concat: which half of fc's input comes first.
    """

    hidden: Hidden = "post"
    concat: Concat = "embedding-first"


class MtpHead(nn.Module):
    """One head; parameter names are those of the published checkpoints, without `mtp.`."""

    def __init__(self, text: TextConfig, depth: int):
        super().__init__()
        H, eps = text.hidden_size, text.rms_norm_eps
        args = TextModelArgs.from_dict({**text.mlx_lm_args(), "full_attention_interval": 1})
        self.fc = nn.Linear(2 * H, H, bias=False)
        self.pre_fc_norm_embedding = nn.RMSNorm(H, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(H, eps=eps)
        self.layers = [DecoderLayer(args, i) for i in range(depth)]
        self.norm = nn.RMSNorm(H, eps=eps)

    def __call__(
        self, embedded: mx.array, hidden: mx.array, caches: Sequence[Any], reading: Reading
    ) -> tuple[mx.array, mx.array]:
        """embedded, hidden (B, S, D), appended to `caches`, one per layer.

        Returns (B, S, D) twice: what the output head reads, and the hidden state for the next step.
        """
        parts = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        if reading.concat == "hidden-first":
            parts.reverse()
        x = self.fc(mx.concatenate(parts, axis=-1))
        mask = create_attention_mask(x, caches[0])
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, mask, cache)
        normed = self.norm(x)
        return normed, normed if reading.hidden == "post" else x
