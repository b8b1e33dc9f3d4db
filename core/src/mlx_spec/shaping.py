"""Logits to the distribution a token is drawn from: filters, then temperature, in mlx-lm's order.

Shared by plain decoding, by the verify and by drafters, so p and q are always shaped by one rule.
Letters: B rows, L verify rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from .sampling import Sampling

_NEVER = -math.inf


def logprobs_of(logits: mx.array) -> mx.array:
    """Normalised float32 log-probabilities (..., V); anything not finite is removed (-inf)."""
    x = logits.astype(mx.float32)
    return normalise(mx.where(mx.isfinite(x), x, _NEVER))


def normalise(scores: mx.array) -> mx.array:
    """scores (..., V) minus their logsumexp; a row without mass stays at -inf instead of becoming NaN."""
    total = mx.logsumexp(scores, axis=-1, keepdims=True)
    return scores - mx.where(mx.isfinite(total), total, 0.0)


def shape_logprobs(logits: mx.array, settings: Sampling) -> mx.array:
    """Processed logits (..., V) -> log-probabilities (..., V) float32 of the draw; removed ids are -inf.

    Filters run on log-probabilities before temperature: top_p, then min_p, then top_k. At least the best
    finite token always stays.
    """
    logprobs = logprobs_of(logits)
    if settings.top_p < 1.0:
        logprobs = keep_top_p(logprobs, settings.top_p)
    if settings.min_p > 0.0:
        logprobs = keep_min_p(logprobs, settings.min_p)
    if 0 < settings.top_k < logprobs.shape[-1]:
        logprobs = keep_top_k(logprobs, settings.top_k)
    return normalise(logprobs * (1.0 / settings.temperature))


def keep_top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """Smallest set of best tokens whose mass reaches top_p; ties with its last member stay."""
    ascending = mx.sort(logprobs, axis=-1)
    probs = mx.exp(ascending)
    above = mx.cumsum(probs, axis=-1, reverse=True, inclusive=False)
    total = above[..., :1] + probs[..., :1]
    dropped = (above >= top_p * total).sum(axis=-1, keepdims=True)
    last = mx.minimum(dropped, logprobs.shape[-1] - 1)
    threshold = mx.take_along_axis(ascending, last, axis=-1)
    return mx.where(logprobs < threshold, _NEVER, logprobs)


def keep_min_p(logprobs: mx.array, min_p: float) -> mx.array:
    """Tokens at least min_p times as likely as the best one."""
    floor = mx.max(logprobs, axis=-1, keepdims=True) + math.log(min_p)
    return mx.where(logprobs < floor, _NEVER, logprobs)


def keep_top_k(logprobs: mx.array, top_k: int) -> mx.array:
    """Exactly the top_k best tokens."""
    others = mx.argpartition(-logprobs, kth=top_k - 1, axis=-1)[..., top_k:]
    return mx.put_along_axis(logprobs, others, mx.array(_NEVER), axis=-1)


def shape_rows(logits: mx.array, settings: Sequence[Sampling]) -> mx.array:
    """Shape (B, ..., V) with one Sampling per row; rows with equal settings go together."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for b, row in enumerate(settings):
        groups.setdefault(row.shape_key, []).append(b)
    if len(groups) == 1:
        return shape_logprobs(logits, settings[0])
    return assemble([(rows, shape_logprobs(logits[mx.array(rows)], settings[rows[0]])) for rows in groups.values()])


def assemble(parts: Sequence[tuple[Sequence[int], mx.array]]) -> mx.array:
    """Put row groups back in lane order: parts of (row indices, array (len(rows), ...)) covering 0..B-1."""
    order = [b for rows, _ in parts for b in rows]
    joined = parts[0][1] if len(parts) == 1 else mx.concatenate([value for _, value in parts])
    if order == list(range(len(order))):
        return joined
    back = sorted(range(len(order)), key=order.__getitem__)
    return joined[mx.array(back)]


def greedy_ids(logits: mx.array, limit: int | None = None) -> mx.array:
    """Argmax (...,) int32 over the first `limit` ids, as mlx-lm's greedy takes it.

    mlx-lm takes the argmax of logits - logsumexp in the model's dtype. In half precision that subtraction
    can round two different logits to one value, and then the lower id wins; float32 logits need no subtraction.
    """
    if logits.dtype != mx.float32:
        logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if limit is not None and limit < logits.shape[-1]:
        logits = logits[..., :limit]
    return mx.argmax(logits, axis=-1).astype(mx.int32)
