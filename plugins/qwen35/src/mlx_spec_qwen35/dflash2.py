"""What DFlash2 adds: convolutions around both halves of a layer, and a selector of tokens.

    dyn      = kernel_projection(x), one pair of kernels per row and group of channels, both made from x
    conv_i   : out[t] = sum over o < Kd of (base_kernel[i, o] + dyn[t, i, o]) * x[t - o], nothing before the block
    layer    : h = h + conv_1(attention(conv_0(x))), the same around the MLP
    logits   = softcap(target.head(n) * output_multiplier);  the block's embeddings times input_embedding_scale
    selector : of the T likeliest tokens of row j, score(c) = logits[j, c] + sum over r of
               predecessor[previous, r] * hidden_projection(n[j])[r] * successor[c, r]; all others are impossible

The tokens of a block depend on each other through the selector alone: the law of token j, given the one really
chosen at j - 1, is a softmax over T scores. Source: mlx-vlm 0.7.10 `drafters/dflash2/dflash2.py`.
"""

# mypy: disable-error-code="misc, no-any-return"
# mlx.nn is untyped to mypy: its classes and calls are Any.

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .dflash_config import DFlashConfig
from .dflash_net import DFlashLayer, DFlashNet, Sublayer


class BlockConv(nn.Module):
    """Two causal convolutions over a block, before and after a sublayer, with kernels made per row."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        h, self.size, self.group = config.hidden_size, config.conv_kernel_size, config.conv_group_size
        self.base_kernel = mx.zeros((2, self.size, h))
        self.kernel_projection = nn.Linear(h, 2 * self.size * (h // self.group), bias=False)

    def __call__(self, inner: Sublayer, x: mx.array) -> mx.array:
        """x (B, L, h) -> conv_1(inner(conv_0(x))) (B, L, h)."""
        dynamic = self.kernel_projection(x).reshape(*x.shape[:2], 2, self.size, -1, 1)
        return self._convolve(inner(self._convolve(x, dynamic[:, :, 0], 0)), dynamic[:, :, 1], 1)

    def _convolve(self, x: mx.array, dynamic: mx.array, which: int) -> mx.array:
        """x (B, L, h), dynamic (B, L, Kd, groups, 1) -> (B, L, h)."""
        B, L, h = x.shape
        blocks = x.reshape(B, L, h // self.group, self.group)
        base = self.base_kernel[which].reshape(self.size, h // self.group, self.group)
        padded = mx.pad(blocks, [(0, 0), (self.size - 1, 0), (0, 0), (0, 0)])
        out = mx.zeros_like(blocks)
        for o in range(self.size):
            first = self.size - 1 - o
            out = out + (base[o] + dynamic[:, :, o]) * padded[:, first : first + L]
        return out.reshape(B, L, h)


class DFlash2Layer(DFlashLayer):
    """A DFlash layer with a convolution on either side of its attention and of its MLP."""

    def __init__(self, config: DFlashConfig, layer: int):
        super().__init__(config, layer)
        self.attention_conv = BlockConv(config)
        self.mlp_conv = BlockConv(config)

    def _around(self, name: str, inner: Sublayer, x: mx.array) -> mx.array:
        return self[name](inner, x)


class CandidateSelector(nn.Module):
    """Scores the likeliest tokens of a row by how well they follow the token before."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Embedding(config.vocab_size, config.selector_rank)
        self.successor_codebook = nn.Embedding(config.vocab_size, config.selector_rank)
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def __call__(self, hidden: mx.array, logits: mx.array, previous: mx.array) -> mx.array:
        """One row of the block: hidden (B, h), logits (B, V), previous (B,) -> scores (B, V), -inf for others."""
        ids = mx.argpartition(logits, kth=-self.top_k, axis=-1)[:, -self.top_k :]
        link = self.predecessor_codebook(previous) * self.hidden_projection(hidden)
        follows = (self.successor_codebook(ids) * link[:, None]).sum(axis=-1)
        scores = mx.take_along_axis(logits, ids, axis=-1) + follows
        return mx.put_along_axis(mx.full(logits.shape, -mx.inf, scores.dtype), ids, scores, axis=-1)


class DFlash2Net(DFlashNet):
    """The whole DFlash2 drafter."""

    def __init__(self, config: DFlashConfig):
        super().__init__(config, DFlash2Layer)
        self.candidate_selector = CandidateSelector(config)
