"""The greedy choice, as a module, so that a plugin's kernel can take its place."""

# mypy: disable-error-code="misc"
# mlx.nn is untyped to mypy.

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .shaping import greedy_ids


class GreedyChoice(nn.Module):
    """The token of every row in plain MLX operations. Everything that decodes greedily goes through it."""

    def __call__(self, logits: mx.array, limit: int | None = None) -> tuple[mx.array, mx.array]:
        """The best of the first `limit` ids, by the rules of `greedy_ids`, and whether it means something.

        Args:
            logits: (..., V) raw.
            limit: ids from here on are never chosen; None for V.

        Returns:
            ids (...) int32, and check (...) in a floating dtype, finite where the row's logits are.
        """
        vocab = logits.shape[-1]
        limit = vocab if limit is None else min(limit, vocab)
        if limit == vocab and logits.dtype != mx.float32:
            total = mx.logsumexp(logits, axis=-1, keepdims=True)  # NaN or infinite as the largest logit would be
            return mx.argmax(logits - total, axis=-1).view(mx.int32), total.squeeze(-1)
        return greedy_ids(logits, limit), mx.max(logits[..., :limit], axis=-1)


PLAIN = GreedyChoice()

__all__ = ["PLAIN", "GreedyChoice"]
