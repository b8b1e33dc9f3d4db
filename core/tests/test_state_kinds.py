"""Every kind of attention state against attention over exactly the visible rows, byte for byte."""

from __future__ import annotations

import random
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import scaled_dot_product_attention

from mlx_spec.state import KVState, QuantisedKVState, QuantisedWindowState, WindowState
from mlx_spec.state.masks import uniform_mask

HQ, HK, DK, DV = 4, 2, 32, 24
WINDOW, WIDTH, POSITIONS = 16, 8, 380
KINDS = {
    "kv": lambda: KVState(),
    "window": lambda: WindowState(WINDOW, max_width=WIDTH),
    "window-align-4": lambda: WindowState(WINDOW, max_width=WIDTH, align=4),
    "window-odd": lambda: WindowState(13, max_width=WIDTH, align=1),
    "kv-8bit": lambda: QuantisedKVState(8, 32),
    "kv-4bit": lambda: QuantisedKVState(4, 32),
    "window-4bit": lambda: QuantisedWindowState(WINDOW, 4, 32, max_width=WIDTH),
}
WINDOWED = [name for name in KINDS if name.startswith("window")]
AROUND_THE_WINDOW = [*range(19), 31, 32, 33, 47, 48, 49]
SEQUENCES = 4


def sequence(seed: int, size: int = POSITIONS) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys, values (1, H, size, D): what some request holds at each position."""
    keys = mx.random.split(mx.random.key(seed), 3)
    shapes = ((1, HQ, size, DK), (1, HK, size, DK), (1, HK, size, DK))
    out = tuple(mx.random.normal(shape, key=key) for shape, key in zip(shapes, keys, strict=True))
    mx.eval(out)
    return out


TEXTS = [sequence(seed) for seed in range(SEQUENCES)]
WRONG = sequence(99)


@cache
def oracle(kind: str, seed: int = 0) -> np.ndarray:
    """Attention at every position (POSITIONS, HQ, DV) from nothing but slices: no state, no mask, no batch."""
    state = KINDS[kind]()
    queries, keys, values = TEXTS[seed]
    values = _as_stored(state, values)
    window = getattr(state, "window", POSITIONS)
    if hasattr(state, "bits"):
        keys, values = (mx.quantize(a, group_size=state.group_size, bits=state.bits) for a in (keys, values))
    outs = []
    for p in range(POSITIONS):
        lo = max(0, p - window + 1)
        k, v = (_cut(a, lo, p + 1) for a in (keys, values))
        outs.append(scaled_dot_product_attention(queries[:, :, p : p + 1], k, v, state, scale=0.3, mask=None))
    return np.array(mx.concatenate(outs, axis=2))[0].transpose(1, 0, 2)


def _as_stored(state, values: mx.array) -> mx.array:
    """Values narrower than keys, save where mlx-lm's quantised attention wants one width."""
    return values if hasattr(state, "bits") else values[..., :DV]


def _cut(part, lo, hi):
    return part[:, :, lo:hi] if isinstance(part, mx.array) else tuple(a[:, :, lo:hi] for a in part)


def attend(state, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """What a layer of a model does with its cache."""
    values = _as_stored(state, values)
    mask = state.make_mask(keys.shape[2], return_array=False, window_size=getattr(state, "window", None))
    k, v = state.update_and_fetch(keys, values)
    return scaled_dot_product_attention(queries, k, v, state, scale=0.3, mask=mask)


def block(state, text, true: int, wrong: int = 0) -> mx.array:
    """Append the next `true` rows of the text and `wrong` rows of another one; outputs of the true rows."""
    n = state.lengths[0]
    parts = [mx.concatenate([a[:, :, n : n + true], w[:, :, :wrong]], axis=2) for a, w in zip(text, WRONG, strict=True)]
    return attend(state, *parts)[:, :, :true]


def same(got: mx.array, wanted: np.ndarray) -> bool:
    """Byte equality of outputs (1, HQ, N, DV) with oracle rows (N, HQ, DV)."""
    return np.ascontiguousarray(np.array(got)[0].transpose(1, 0, 2)).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", range(1, WIDTH + 1))
def test_a_rewound_block_equals_single_steps(kind, width):
    for n in AROUND_THE_WINDOW if kind == "window" else (0, 8, 13, 16, 33) if kind in WINDOWED else (0, 250):
        start = KINDS[kind]()
        if n:
            block(start, TEXTS[0], n)
        for keep in range(width + 1):
            state = start.extract(0)
            mark = state.mark()
            outs = [block(state, TEXTS[0], keep, width - keep)]
            state.rewind(mark, [keep])
            assert state.lengths == (n + keep,)
            outs += [block(state, TEXTS[0], 1), block(state, TEXTS[0], 1)]
            assert same(mx.concatenate(outs, axis=2), oracle(kind)[n : n + keep + 2]), (n, keep)


@pytest.mark.parametrize("kind", KINDS)
def test_long_runs_of_random_rounds_equal_single_steps(kind):
    rng = random.Random(5)
    for _ in range(2):
        state, outs = KINDS[kind](), []
        while state.lengths[0] < POSITIONS - WIDTH:
            if rng.random() < 0.1:  # prefill chunk, no mark
                outs.append(block(state, TEXTS[0], min(rng.choice([1, 9, 70]), POSITIONS - state.lengths[0])))
                continue
            width = rng.randint(1, WIDTH)
            keep = rng.randint(0, width)
            mark = state.mark()
            for _ in range(width if rng.random() < 0.3 else 0):  # as single steps first, then taken back
                block(state, TEXTS[0], 0, 1)
            state.rewind(mark, [0])
            outs.append(block(state, TEXTS[0], keep, width - keep))
            state.rewind(mark, [keep])
        got = mx.concatenate(outs, axis=2)
        assert same(got, oracle(kind)[: got.shape[2]])


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_partition_does_not_matter(kind):
    for chunks in ([300], [1, 299], [100, 200], [250, 3, 47], [7] * 42):
        state = KINDS[kind]()
        got = mx.concatenate([block(state, TEXTS[0], c) for c in chunks], axis=2)
        assert same(got, oracle(kind)[: sum(chunks)]), chunks


def batch_block(states, seeds, keep, width):
    """One block over a batch: row b brings its next keep[b] rows, then wrong ones up to `width`."""
    rows = []
    for b, seed in enumerate(seeds):
        n, k = states.lengths[b], keep[b]
        rows.append(
            [
                mx.concatenate([a[:, :, n : n + k], w[:, :, : width - k]], 2)
                for a, w in zip(TEXTS[seed], WRONG, strict=True)
            ]
        )
    mark = states.mark()
    out = attend(states, *(mx.concatenate(column, axis=0) for column in zip(*rows, strict=True)))
    states.rewind(mark, keep)
    return out


def check_batch(kind, state, seeds, rng, rounds):
    """Advance a batch by random rounds and compare every kept row with its solo oracle."""
    for _ in range(rounds):
        width = rng.randint(1, WIDTH)
        keep = [rng.randint(0, width) for _ in seeds]
        before = state.lengths
        out = batch_block(state, seeds, keep, width)
        for b, seed in enumerate(seeds):
            got, wanted = out[b : b + 1, :, : keep[b]], oracle(kind, seed)[before[b] : before[b] + keep[b]]
            assert same(got, wanted), (b, before, keep)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("starts", [(0, 5, 40), (17, 17, 17), (250, 1, 14), (0, 0, 0)])
def test_ragged_rows_equal_their_solo_run(kind, starts):
    rng = random.Random(sum(starts))
    solos = []
    for seed, n in enumerate(starts):
        solos.append(KINDS[kind]())
        if n:
            block(solos[-1], TEXTS[seed], n)
    state = type(solos[0]).merge(solos)
    assert state.lengths == starts
    check_batch(kind, state, range(3), rng, 20)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_join_leave_and_move_in_mid_sequence(kind):
    rng = random.Random(3)
    cls = type(KINDS[kind]())
    state, seeds = cls.merge([KINDS[kind](), KINDS[kind]()]), [0, 1]
    check_batch(kind, state, seeds, rng, 8)
    late = KINDS[kind]()
    block(late, TEXTS[2], 130)
    state, seeds = cls.merge([late, state, KINDS[kind]()]), [2, 0, 1, 3]
    check_batch(kind, state, seeds, rng, 8)
    state, seeds = state.select([3, 0, 2]), [3, 2, 1]
    check_batch(kind, state, seeds, rng, 8)
    alone = state.extract(1)
    check_batch(kind, alone, [2], rng, 8)
    check_batch(kind, state, seeds, rng, 4)  # extracting left the batch as it was
    tensors, meta = state.to_tensors()
    check_batch(kind, cls.from_tensors(tensors, meta), seeds, rng, 12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mark_survives_extract_merge_and_saving(kind):
    cls = type(KINDS[kind]())
    for n in (3, 40, 189):
        state = KINDS[kind]()
        block(state, TEXTS[0], n)
        mark = state.mark()
        block(state, TEXTS[0], 2, 5)
        copies = [state.extract(0), cls.merge([state]), cls.from_tensors(*state.to_tensors())]
        for copy in copies:
            copy.rewind(mark, [2])
            assert same(block(copy, TEXTS[0], 3), oracle(kind)[n + 2 : n + 5])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_equal_length_can_be_swapped_and_doubled(kind):
    solos = [KINDS[kind](), KINDS[kind]()]
    for seed, solo in enumerate(solos):
        block(solo, TEXTS[seed], 40)
    state = type(solos[0]).merge(solos)
    for order in ([0, 1], [1, 0], [1, 1]):
        check_batch(kind, state.select(order), order, random.Random(1), 4)


@pytest.mark.parametrize("kind", WINDOWED)
def test_a_saved_window_still_knows_how_far_back_it_can_go(kind):
    state = KINDS[kind]()
    block(state, TEXTS[0], 60)
    early = state.mark()
    block(state, TEXTS[0], 3)
    state.mark()
    back = type(state).from_tensors(*state.to_tensors())
    with pytest.raises(ValueError, match="cannot go back to 60"):
        back.rewind(early, [0])


@pytest.mark.parametrize("kind", KINDS)
def test_copies_share_nothing_writable(kind):
    state = KINDS[kind]()
    block(state, TEXTS[0], 30)
    copies = [state.extract(0), state.select([0])]
    mark = state.mark()
    block(state, TEXTS[0], 0, 6)
    state.rewind(mark, [0])
    for copy in [*copies, state]:
        assert same(block(copy, TEXTS[0], 6), oracle(kind)[30:36])


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_state_holds_is_written_on_and_a_copy_of_it_is_not(kind):
    """As `State.arrays` says: its objects change with a later step, an array made of one does not."""
    state = KINDS[kind]()
    block(state, TEXTS[0], 5)
    held, copies = state.arrays(), [mx.array(a) for a in state.arrays()]
    block(state, TEXTS[0], 1)
    before = [np.array(copy.view(mx.uint8)).tobytes() for copy in copies]
    mx.eval(held)
    block(state, TEXTS[0], 1)
    assert [np.array(copy.view(mx.uint8)).tobytes() for copy in copies] == before
    assert all(not mx.array_equal(a, b).item() for a, b in zip(held, copies, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_empty_states_go_everywhere(kind):
    cls = type(KINDS[kind]())
    pair = cls.merge([KINDS[kind](), KINDS[kind]()])
    assert (pair.lengths, pair.nbytes, pair.offset) == ((0, 0), 0, 0)
    back = cls.from_tensors(*pair.select([1]).to_tensors())
    back.rewind(back.mark(), [0])
    assert same(block(back, TEXTS[0], 5), oracle(kind)[:5])
    with pytest.raises(ValueError, match="empty"):
        pair.view()


@pytest.mark.parametrize("kind", KINDS)
def test_impossible_rewinds_raise_and_change_nothing(kind):
    state = KINDS[kind]()
    block(state, TEXTS[0], 20)
    mark = state.mark()
    block(state, TEXTS[0], 3)
    for keep in ([-1], [4], [0, 0], []):
        with pytest.raises(ValueError):
            state.rewind(mark, keep)
    assert state.lengths == (23,)
    assert same(block(state, TEXTS[0], 2), oracle(kind)[23:25])


def test_states_of_different_kinds_do_not_merge():
    with pytest.raises(ValueError, match="different kinds"):
        WindowState.merge([WindowState(16), WindowState(32)])
    with pytest.raises(ValueError, match="different kinds"):
        QuantisedKVState.merge([QuantisedKVState(4, 32), QuantisedKVState(8, 32)])
    with pytest.raises(ValueError, match="at least one"):
        KVState.merge([])


def test_a_batch_of_another_size_is_refused():
    with pytest.raises(ValueError, match="state of 1 rows was given keys for 2"):
        KVState().update_and_fetch(mx.zeros((2, HK, 1, DK)), mx.zeros((2, HK, 1, DV)))


def test_rows_of_other_shapes_do_not_merge():
    wide, narrow = KVState(), KVState()
    wide.update_and_fetch(mx.zeros((1, HK, 1, DK)), mx.zeros((1, HK, 1, DV)))
    narrow.update_and_fetch(mx.zeros((1, HK, 1, DV)), mx.zeros((1, HK, 1, DV)))
    with pytest.raises(ValueError, match="cannot join"):
        KVState.merge([wide, narrow])


def test_a_window_keeps_its_mask_while_blocks_ask_for_the_same():
    state, kept = WindowState(window=6, max_width=4, align=1), []
    for _ in range(9):
        for count in (3, 2):
            n, mask = state.lengths[0], state.make_mask(count)
            first = max(0, n - 5)
            expected = uniform_mask(first, n, count, n - first + count, 6)
            assert n + count <= 6 if mask == "causal" else mx.array_equal(mask, expected).item()
        mask = state.make_mask(3)
        kept.append(state.make_mask(3) is mask)
        state.update_and_fetch(mx.zeros((1, 1, 1, 4)), mx.zeros((1, 1, 1, 4)))
    assert kept == [True] * 9 and state.make_mask(5) is not state.make_mask(5)  # wider than any block
