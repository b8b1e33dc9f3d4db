"""At B = 1, L = 1 our states give byte for byte what mlx-lm's caches give, and cost no copy per step."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from mlx_spec.state import KVState, Mark, QuantisedKVState, QuantisedWindowState, WindowState

WINDOW = 40
PAIRS = {
    "kv": (KVState, KVCache, None, 48, 40),
    "window": (lambda: WindowState(WINDOW), lambda: RotatingKVCache(WINDOW), WINDOW, 48, 40),
    "kv-8bit": (lambda: QuantisedKVState(8, 32), lambda: QuantizedKVCache(32, 8), None, 96, 96),
    "kv-4bit": (lambda: QuantisedKVState(4, 64), lambda: QuantizedKVCache(64, 4), None, 64, 64),
}


def step(cache, rows, window):
    """One attention layer of mlx-lm over queries, keys, values; also the bytes of what it was handed."""
    queries, keys, values = (r + 0 for r in rows)
    mask = create_attention_mask(mx.zeros((1, keys.shape[2], 8)), cache, window_size=window)
    k, v = cache.update_and_fetch(keys, values)
    return scaled_dot_product_attention(queries, k, v, cache, scale=0.2, mask=mask), mask


def rows(seed, count, dk, dv, dtype):
    keys = mx.random.split(mx.random.key(seed), 3)
    shapes = ((1, 4, count, dk), (1, 2, count, dk), (1, 2, count, dv))
    return [mx.random.normal(s, key=k).astype(dtype) for s, k in zip(shapes, keys, strict=True)]


def raw(array):
    return np.array(array.astype(mx.float32)).tobytes()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", PAIRS)
def test_single_steps_equal_mlx_lm(kind, dtype):
    ours, theirs, window, dk, dv = PAIRS[kind]
    for prompt in (0, 1, 7, 39, 254):
        if window is not None and prompt >= window:
            continue
        a, b = ours(), theirs()
        if prompt:
            (x, _), (y, _) = (
                step(a, rows(1, prompt, dk, dv, dtype), window),
                step(b, rows(1, prompt, dk, dv, dtype), window),
            )
            assert raw(x) == raw(y)
        for i in range(window - prompt if window is not None else 5):
            data = rows(10 + i, 1, dk, dv, dtype)
            (x, mask), (y, _) = step(a, data, window), step(b, data, window)
            assert mask is None and raw(x) == raw(y), (prompt, i)
            assert a.offset == b.offset


def test_a_wrapped_window_stays_near_mlx_lms_ring():
    a, b = WindowState(WINDOW), RotatingKVCache(WINDOW)
    for i in range(3 * WINDOW):
        data = rows(10 + i, 1, 48, 40, mx.float32)
        (x, _), (y, _) = step(a, data, WINDOW), step(b, data, WINDOW)
        assert mx.abs(x - y).max().item() < 1e-5


@pytest.mark.parametrize("n", [0, 1, 30, 300])
def test_masks_of_rows_in_step_are_those_of_mlx_lm(n):
    ours, theirs = KVState(), KVCache()
    for cache in (ours, theirs):
        if n:
            cache.update_and_fetch(*rows(0, n, 48, 40, mx.float32)[1:])
    for N in (1, 2, 7):
        for return_array in (False, True):
            for window in (None, 5, 1000):
                a, b = (c.make_mask(N, return_array=return_array, window_size=window) for c in (ours, theirs))
                alike = a.tolist() == b.tolist() if isinstance(b, mx.array) else a == b
                assert alike, (N, return_array, window)


def test_masks_of_a_window_are_causal_until_it_is_full():
    state = WindowState(16, align=32)
    assert [state.make_mask(1), state.make_mask(16)] == [None, "causal"]
    assert state.make_mask(17).shape == (17, 17)
    assert state.make_mask(3, return_array=True).tolist() == np.tri(3, dtype=bool).tolist()
    state.update_and_fetch(*rows(0, 40, 48, 40, mx.float32)[1:])
    mask = np.array(state.make_mask(2))  # keys from 0, queries 40 and 41
    assert mask.shape == (2, 42)
    assert [np.flatnonzero(r)[[0, -1]].tolist() for r in mask] == [[25, 40], [26, 41]]
    assert np.array(state.make_mask(1, window_size=3)).sum() == 3


def test_a_step_on_cpu_reads_its_window_and_needs_no_mask():
    state = WindowState(16)
    assert state.align == 1
    state.update_and_fetch(*rows(0, 40, 48, 40, mx.float32)[1:])
    assert state.make_mask(1) is None
    keys, values = state.update_and_fetch(*rows(1, 1, 48, 40, mx.float32)[1:])
    assert keys.shape[2] == values.shape[2] == 16
    assert np.array(state.make_mask(1, window_size=3)).sum() == 3


def test_offset_is_an_int_in_step_and_an_array_otherwise():
    solo = KVState()
    solo.update_and_fetch(*rows(0, 3, 48, 40, mx.float32)[1:])
    assert solo.offset == 3
    pair = KVState.merge([solo, solo.extract(0)])
    assert pair.offset == 3
    pair.rewind(Mark((3, 3)), [0, 0])
    pair.rewind(Mark((1, 2)), [0, 1])
    assert pair.offset.tolist() == [1, 3]
    assert pair.offset.dtype == mx.int32


DONATED = {
    "kv": lambda: KVState(),
    "window": lambda: WindowState(4096),
    "kv-8bit": lambda: QuantisedKVState(8, 64),
    "window-4bit": lambda: QuantisedWindowState(4096, 4, 64),
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("kind", DONATED)
def test_a_step_does_not_copy_the_buffer(kind, width, batch):
    one = DONATED[kind]()
    one.update_and_fetch(*rows(0, 3000, 64, 64, mx.float32)[1:])
    state = type(one).merge([one] * batch)
    for _ in range(6):
        mark = state.mark()
        part = mx.zeros((batch, 2, width, 64))
        views = state.update_and_fetch(part, part)
        mx.eval(views)
        del views
        state.rewind(mark, [min(b, width) for b in range(batch)])  # rows fall out of step
        mx.eval(state._buffer.arrays)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(5):
        state.mark()
        views = state.update_and_fetch(part, part)
        mx.eval(views)
        del views
    assert mx.get_peak_memory() - before < state.nbytes // 20


def test_ten_thousand_steps_leave_a_window_as_large_as_it_was():
    state, part, sizes = WindowState(16), mx.ones((1, 2, 1, 8)), set()
    for i in range(10_000):
        mask = state.make_mask(1, window_size=16)
        keys, _ = state.update_and_fetch(part, part)
        if i % 50 == 0:
            mx.eval(keys, *([mask] if mask is not None else []))
            sizes.add(state.nbytes)
        assert keys.shape[2] < 16 + state.align
    assert state.lengths == (10_000,)
    assert sizes == {state.capacity * 2 * 8 * 4 * 2}


@pytest.mark.parametrize(("width", "keep"), [(1, 1), (5, 3), (64, 3), (64, 64)])
def test_a_window_moves_its_rows_rarely(width, keep):
    state, part, moves = WindowState(64, max_width=64), mx.ones((1, 2, width, 8)), 0
    rounds = 1200 // keep
    for _ in range(rounds):
        before = state.origins
        mark = state.mark()
        mx.eval(state.update_and_fetch(part, part))
        state.rewind(mark, [keep])
        moves += state.origins != before
    assert 1 <= moves <= rounds * keep // 64 + 1


@pytest.mark.parametrize("chunk", [9, 200, 2048])
def test_a_long_chunk_leaves_only_its_tail(chunk):
    state = WindowState(16, max_width=8)
    part = mx.ones((1, 2, chunk, 8))
    for _ in range(3):
        mark = state.mark()
        keys, _ = state.update_and_fetch(part, part)
        assert keys.shape[2] <= chunk + 16 + state.align
        with pytest.raises(ValueError, match="max_width 8"):
            state.rewind(mark, [chunk - 1])
        state.rewind(mark, [chunk])  # nothing to take back is always fine
    assert state.nbytes <= state.capacity * 2 * 8 * 4 * 2


def test_appends_after_a_mark_add_up():
    for steps, legal in ((8, True), (9, False)):
        state, part = WindowState(16, max_width=8), mx.ones((1, 2, 1, 8))
        for _ in range(100):
            state.update_and_fetch(part, part)
        mark = state.mark()
        for _ in range(steps):
            state.update_and_fetch(part, part)
        if legal:
            state.rewind(mark, [0])
            assert state.lengths == (100,)
            continue
        with pytest.raises(ValueError, match="cannot go back to 100"):
            state.rewind(mark, [0])


def test_going_back_before_the_last_mark_is_refused_by_windows_only():
    window, full, part = WindowState(16), KVState(), mx.ones((1, 2, 20, 8))
    for state in (window, full):
        state.update_and_fetch(part, part)
        early = state.mark()
        state.update_and_fetch(part, part)
        state.mark()
    full.rewind(early, [1])
    assert full.lengths == (21,)
    with pytest.raises(ValueError, match="last mark"):
        window.rewind(early, [1])
    assert window.lengths == (40,)
