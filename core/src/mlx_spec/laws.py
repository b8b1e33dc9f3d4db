"""Acceptance laws as pure functions of device arrays: lazy, vectorised over rows, no host sync.

Letters: B rows, K drafted tokens, L = K + 1 verify rows, V vocabulary. `counts[b] <= K` tokens of row b were
really drafted; whatever stands behind them is ignored. Every law returns

    accepted (B,) int32    length of the accepted prefix, a
    tokens (B, L) int32    tokens[b, : a + 1] is what row b emits: a drafts and one token of the target's own

`rejection` is Leviathan et al. 2023 (arXiv 2211.17192, algorithm 1): accept d with probability
min(1, p(d) / q(d)), draw from the normalised (p - q)+ at the first refusal, from p when nothing was refused.
`coupled` takes argmax(log p + g) with noise g shared by position, so its tokens never depend on the draft.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

_MASS_TOLERANCE = 1e-3  # a q whose mass is further from 1 is no distribution


def prefix_length(match: mx.array, counts: Sequence[int]) -> mx.array:
    """match (B, K) bool -> length (B,) int32 of the leading run of True among the first counts[b]."""
    rows, width = match.shape
    if width == 0:
        return mx.zeros((rows,), dtype=mx.int32)
    if min(counts) < width:
        match = match & (mx.arange(width) < mx.array(list(counts))[:, None])
    return mx.cumprod(match.astype(mx.int32), axis=1).sum(axis=1)


def accept_greedy(
    target_ids: mx.array, draft: mx.array, counts: Sequence[int], usable: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Longest drafted prefix equal to the target's own ids.

    Args:
        target_ids: (B, L) int32, the target's token after each verify row.
        draft: (B, K) int32; ids outside the vocabulary equal nothing, so they are never accepted.
        usable: (B, L) bool, False where the target's numbers are broken; nothing is accepted from there on.
    """
    width = draft.shape[1]
    match = target_ids[:, :width] == draft
    if usable is not None and width:
        match = match & usable[:, :width]
    return prefix_length(match, counts), target_ids


def accept_coupled(
    logprobs: mx.array,
    noise: mx.array,
    draft: mx.array,
    counts: Sequence[int],
    usable: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """logprobs, noise (B, L, V): plain sampling under that noise, and how much of the draft it confirms."""
    ids = mx.argmax(logprobs + noise, axis=-1).astype(mx.int32)
    return accept_greedy(ids, draft, counts, usable)


def accept_ratio(p: mx.array, q: mx.array) -> mx.array:
    """min(1, p / q): the probability of accepting a token that was drawn from q.

    0 where p is 0, where q is not positive and where either is NaN.
    """
    fine = (p > 0) & (q > 0)
    return mx.where(fine, mx.minimum(p / mx.where(fine, q, 1.0), 1.0), 0.0)


def residual(p: mx.array, q: mx.array) -> mx.array:
    """(p - q)+ over the last axis, unnormalised; p itself when rounding leaves no mass."""
    rest = mx.maximum(p - q, 0.0)
    return mx.where(rest.sum(axis=-1, keepdims=True) > 0, rest, p)


def sane_q(q: mx.array, draft: mx.array) -> tuple[mx.array, mx.array]:
    """q (B, K, Vq), draft (B, K) -> q(draft) (B, K) and whether it can have been drawn from q (B, K).

    False for ids outside q, for an id q gives no mass to, and for a q that is NaN or does not sum to 1.
    """
    inside = (draft >= 0) & (draft < q.shape[-1])
    chosen = mx.take_along_axis(q, mx.clip(draft, 0, q.shape[-1] - 1)[..., None], axis=-1)[..., 0]
    mass = q.sum(axis=-1)
    return chosen, inside & (chosen > 0) & (mx.abs(mass - 1.0) <= _MASS_TOLERANCE)


def accept_rejection(
    logprobs: mx.array,
    q: mx.array | None,
    draft: mx.array,
    counts: Sequence[int],
    uniforms: mx.array,
    noise: mx.array,
    usable: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Rejection sampling against q, or against a point mass on each draft token when q is None.

    Args:
        logprobs: (B, L, V) float32, shaped and normalised.
        q: (B, K, Vq) float32, what each token was really drawn from; Vq may differ from V.
        draft: (B, K) int32.
        uniforms: (B, K) in (0, 1).
        noise: (B, V) Gumbel, draws the token that is the target's own.
        usable: (B, L) bool, as in accept_greedy.

    Returns:
        accepted, tokens, and faulty (B,) bool: some drafted token cannot have been drawn from its q. Such a token
        is not tested: it counts as not drafted, and the target draws from p in its place, which is exact.
    """
    rows, rows_l, vocab = logprobs.shape
    width = draft.shape[1]
    if width == 0:
        tokens = mx.argmax(logprobs[:, 0] + noise, axis=-1).astype(mx.int32)
        zero = mx.zeros((rows,), dtype=mx.int32)
        return zero, tokens[:, None], zero > 0
    safe = mx.clip(draft, 0, vocab - 1)
    p_draft = mx.exp(mx.take_along_axis(logprobs[:, :width], safe[..., None], axis=-1)[..., 0])
    p_draft = mx.where(safe == draft, p_draft, 0.0)
    if q is None:
        honest = mx.ones(draft.shape, dtype=mx.bool_)
        ratio = p_draft
    else:
        q_draft, honest = sane_q(q, draft)
        ratio = mx.where(honest, accept_ratio(p_draft, q_draft), 0.0)
    passed = uniforms <= ratio
    if usable is not None:
        passed = passed & usable[:, :width]
    accepted = prefix_length(passed, counts)
    own = _own_token(logprobs, q, draft, counts, accepted, honest, noise)
    padded = mx.concatenate([draft, draft[:, :1]], axis=1)
    tokens = mx.where(mx.arange(rows_l) < accepted[:, None], padded, own[:, None])
    drafted = mx.arange(width) < mx.array(list(counts))[:, None]
    return accepted, tokens, mx.any(drafted & ~honest, axis=1)


def _own_token(
    logprobs: mx.array,
    q: mx.array | None,
    draft: mx.array,
    counts: Sequence[int],
    accepted: mx.array,
    honest: mx.array,
    noise: mx.array,
) -> mx.array:
    """The target's own token (B,) int32 of row `accepted`: from the residual after a refusal, else from p."""
    vocab = logprobs.shape[-1]
    at = accepted[:, None]
    p = mx.exp(mx.take_along_axis(logprobs, at[..., None], axis=1)[:, 0])
    column = mx.minimum(at, draft.shape[1] - 1)
    refused = at < mx.array(list(counts))[:, None]
    if q is None:
        taken = refused & (mx.arange(vocab) == mx.take_along_axis(draft, column, axis=1))
        rest = residual(p, mx.where(taken, p, 0.0))
    else:
        refused = refused & mx.take_along_axis(honest, column, axis=1)
        q_row = fit_width(mx.take_along_axis(q, column[..., None], axis=1)[:, 0], vocab, 0.0)
        rest = residual(p, mx.where(refused, q_row, 0.0))
    return mx.argmax(mx.log(rest) + noise, axis=-1).astype(mx.int32)


def fit_width(values: mx.array, width: int, fill: float) -> mx.array:
    """values (..., V) cut or padded with `fill` to (..., width)."""
    have = values.shape[-1]
    if have >= width:
        return values[..., :width] if have > width else values
    gap = mx.full((*values.shape[:-1], width - have), fill, dtype=values.dtype)
    return mx.concatenate([values, gap], axis=-1)
