"""Bool masks by absolute position, for rows that share one physical slice."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


def uniform_mask(first_key: int, first_query: int, N: int, T: int, window: int | None) -> mx.array:
    """(N, T) bool for keys first_key.. and queries first_query..: 0 <= query - key (< window)."""
    keys = mx.arange(first_key, first_key + T)[None]
    queries = mx.arange(first_query, first_query + N)[:, None]
    return _visible(queries, keys, window)


def ragged_mask(
    first_keys: Sequence[int], first_queries: Sequence[int], N: int, T: int, window: int | None
) -> mx.array:
    """(B, 1, N, T) bool, the same rule with a first key and a first query per row."""
    keys = mx.array(list(first_keys))[:, None, None, None] + mx.arange(T)
    queries = mx.array(list(first_queries))[:, None, None, None] + mx.arange(N)[:, None]
    return _visible(queries, keys, window)


def _visible(queries: mx.array, keys: mx.array, window: int | None) -> mx.array:
    mask = queries >= keys
    return mask if window is None else mask & (queries < keys + window)
