"""StateGroup: layers that move as one, files, building from mlx-lm's caches; KVView and its masks."""

from __future__ import annotations

import json
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_caches

from mlx_spec.errors import LoadError, PluginError, RequestError, UsageError
from mlx_spec.state import (
    KVState,
    KVView,
    Mark,
    QuantisedKVState,
    QuantisedWindowState,
    State,
    StateGroup,
    WindowState,
    from_mlx_lm,
    narrow,
    register_state,
    visible_mask,
)

H, D = 2, 32


def kinds():
    return [KVState(), WindowState(16), QuantisedKVState(8, 32), QuantisedWindowState(16, 4, 32)]


def feed(group, count, seed=0, lengths=None):
    """Append `count` rows of noise to every layer; the arrays attention would read."""
    out = []
    for i, state in enumerate(group):
        shape = (len(state.lengths), H, count, D)
        keys, values = (mx.random.normal(shape, key=mx.random.key(1000 * seed + 10 * i + j)) for j in (0, 1))
        out.append(state.update_and_fetch(keys, values))
    return out


def flat(parts):
    """Bytes of nested arrays."""
    if isinstance(parts, mx.array):
        return np.array(parts.astype(mx.float32)).tobytes()
    return b"".join(flat(p) for p in parts)


def started(count=20, seed=0):
    group = StateGroup(kinds())
    feed(group, count, seed)
    return group


def test_a_group_is_the_list_that_mlx_lm_pads():
    group = StateGroup(kinds())
    padded = group + [None] * 2
    assert type(padded) is list
    assert padded[4:] == [None, None]
    assert all(group)  # mlx-lm asks `if cache and ...` before it takes a mask from one


def test_a_group_marks_and_rewinds_every_layer():
    group = started(30)
    mark = group.mark()
    assert mark == Mark((30,))
    feed(group, 5)
    group.rewind(mark, [2])
    assert [s.lengths for s in group] == [(32,)] * 4
    assert group.lengths == (32,)


def test_a_rewind_that_one_layer_cannot_do_changes_no_layer():
    group = StateGroup([KVState(), WindowState(16, max_width=4)])
    feed(group, 30)
    mark = group.mark()
    feed(group, 5)
    with pytest.raises(ValueError, match="max_width 4"):
        group.rewind(mark, [1])
    assert [s.lengths for s in group] == [(35,), (35,)]


class Stuck(KVState):
    """Says yes to a rewind and does nothing."""

    def rewind(self, mark, keep):
        pass


def test_a_layer_that_did_not_go_back_is_noticed():
    group = StateGroup([KVState(), Stuck()])
    feed(group, 6)
    mark = group.mark()
    feed(group, 4)
    with pytest.raises(RequestError, match=r"found \(10,\) in layer 1 \(Stuck\), expected \(7,\)"):
        group.rewind(mark, [1])


def test_layers_out_of_step_are_noticed_before_a_mark():
    group = started(3)
    feed(group[:1], 1)
    with pytest.raises(RequestError, match="expected"):
        group.mark()


def test_rows_move_between_groups():
    a, b = started(20, 1), started(7, 2)
    both = StateGroup.merge([a, b])
    assert both.lengths == (20, 7)
    assert both.select([1, 0]).lengths == (7, 20)
    back = both.extract(1)
    assert flat(feed(back, 3, 5)) == flat(feed(b, 3, 5))
    assert both.nbytes == sum(s.nbytes for s in both) > 0
    with pytest.raises(ValueError, match="one number of layers"):
        StateGroup.merge([a, StateGroup(a[:2])])
    empty = StateGroup.merge([StateGroup(kinds()), a])
    assert empty.lengths == (0, 20)


def test_save_and_load_in_mid_sequence(tmp_path):
    group = StateGroup.merge([started(40, 1), StateGroup(kinds()), started(230, 2)])
    mark = group.mark()
    feed(group, 4)
    group.rewind(mark, [1, 4, 0])
    path = tmp_path / "state.safetensors"
    group.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["state.safetensors"]
    back = StateGroup.load(path)
    path.unlink()  # what was loaded no longer needs the file
    assert back.lengths == group.lengths == (41, 4, 230)
    assert [type(s) for s in back] == [type(s) for s in group]
    assert [visible(s) for s in back] == [visible(s) for s in group]
    assert [s.offset.tolist() for s in back] == [[41, 4, 230]] * 4
    back.rewind(mark, [0, 2, 0])
    assert back.lengths == (40, 2, 230)


def visible(state):
    """Bytes of the rows each batch row can see of itself, wherever they sit in the buffer."""
    out = []
    for row in range(len(state.lengths)):
        view = state.extract(row).view()
        out.append(flat(narrow(view, [view.lengths[0]], getattr(state, "window", None)).keys))
    return out


def test_saved_bytes_follow_what_is_held_not_what_is_reserved():
    state = QuantisedKVState(8, 32)
    part = mx.ones((1, H, 240, D))
    state.update_and_fetch(part, part)
    full = sum(t.nbytes for t in state.to_tensors()[0].values())
    state.rewind(Mark((0,)), [20])
    assert state.offset == 20
    assert sum(t.nbytes for t in state.to_tensors()[0].values()) == full * 20 // 240


def test_tensor_names_carry_the_layer():
    tensors, meta = started(5).to_tensors()
    assert {"0.keys", "1.values", "2.keys.packed", "3.values.biases"} <= set(tensors)
    assert [entry["type"] for entry in meta["layers"]] == ["kv", "window", "kv-quantised", "window-quantised"]
    json.dumps(meta)


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "text", "other"])
def test_unusable_files_are_refused_by_name(tmp_path, damage):
    path = tmp_path / "s.safetensors"
    started(5).save(path)
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "other":
        mx.save_safetensors(str(path), {"x": mx.ones((2,))})
    else:
        path.write_bytes({"empty": b"", "cut": whole[:-1], "text": b"not a state, though long enough"}[damage])
    with pytest.raises(LoadError, match=r"s\.safetensors"):
        StateGroup.load(path)


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "s.safetensors"
    started(5).save(path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        started(9).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["s.safetensors"]


def test_kinds_of_plugins_can_be_registered_once():
    @register_state("test-stuck")
    class Mine(Stuck):
        pass

    group = StateGroup([Mine()])
    assert type(StateGroup.from_tensors(*group.to_tensors())[0]) is Mine
    with pytest.raises(PluginError, match="two claims"):
        register_state("test-stuck")(Stuck)
    with pytest.raises(PluginError, match="no registered name"):
        StateGroup([Stuck()]).to_tensors()
    with pytest.raises(LoadError, match="found a layer of kind 'nobody'"):
        StateGroup.from_tensors({}, {"layers": [{"type": "nobody", "meta": {}}]})


# -- from mlx-lm -----------------------------------------------------------------------------------------


def model(*caches):
    return SimpleNamespace(make_cache=lambda: list(caches))


def test_states_for_the_caches_of_a_model():
    caches = (mlx_caches.KVCache(), mlx_caches.RotatingKVCache(24, keep=0))
    dense = from_mlx_lm(model(*caches))
    assert isinstance(dense, StateGroup)
    assert [type(s) for s in dense] == [KVState, WindowState]
    assert dense[1].window == 24
    packed = from_mlx_lm(model(*caches), kv_bits=4, kv_group_size=32)
    assert [type(s) for s in packed] == [QuantisedKVState, WindowState]
    assert (packed[0].bits, packed[0].group_size) == (4, 32)


@pytest.mark.parametrize(
    ("cache", "name"),
    [
        (mlx_caches.RotatingKVCache(24, keep=4), r"RotatingKVCache with keep=4"),
        (mlx_caches.ArraysCache(2), "ArraysCache"),
        (mlx_caches.ConcatenateKVCache(), "ConcatenateKVCache"),
    ],
)
def test_caches_that_cannot_roll_back_are_refused_by_kind(cache, name):
    with pytest.raises(LoadError, match=f"{name}, which cannot roll back"):
        from_mlx_lm(model(mlx_caches.KVCache(), cache))


def test_unusable_quantisation_is_refused():
    with pytest.raises(UsageError, match="found 3, expected 4 or 8"):
        from_mlx_lm(model(mlx_caches.KVCache()), kv_bits=3)
    with pytest.raises(LoadError, match="found 64 with a head of 32"):
        QuantisedKVState(8, 64).update_and_fetch(mx.ones((1, H, 1, D)), mx.ones((1, H, 1, D)))


# -- views -------------------------------------------------------------------------------------------------


def seen(view, positions, window=None):
    """Positions that each row's query sees, by the mask."""
    mask = visible_mask(view, positions, window)
    if mask is None:
        return [list(range(o, o + view.size)) for o in view.origin]
    assert mask.shape == (len(positions), 1, 1, view.size)
    return [[o + int(j) for j in np.flatnonzero(np.array(m).ravel())] for o, m in zip(view.origin, mask, strict=True)]


def test_a_view_of_one_row_needs_no_mask():
    state = started(20)[0]
    view = state.view()
    assert view.keys.shape == (1, H, 20, D)
    assert (view.origin, view.lengths, view.bits) == ((0,), (20,), None)
    assert visible_mask(view, [20]) is None
    assert visible_mask(view, [19]) is None
    assert seen(view, [3]) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("n", [5, 16, 17, 40, 47, 48, 49, 300])
@pytest.mark.parametrize("ahead", [-1, 0, 1, 4])
def test_a_view_of_a_window_can_be_cut_to_what_is_visible(n, ahead):
    state, text = WindowState(16), mx.random.normal((1, H, n, D))
    state.update_and_fetch(text, text)
    wanted = list(range(max(0, n + ahead - 15), n))
    view = state.view()
    assert seen(view, [n + ahead], 16) == [wanted]
    cut = narrow(view, [n + ahead], 16)
    assert visible_mask(cut, [n + ahead], 16) is None
    assert seen(cut, [n + ahead], 16) == [wanted]
    assert flat(cut.keys) == flat(text[:, :, wanted[0] : n])


def test_a_view_after_a_rewind_does_not_show_rows_taken_back():
    group = started(40)
    mark = group.mark()
    feed(group, 6)
    group.rewind(mark, [2])
    for state in group:
        view = state.view()
        assert view.lengths == (42,)
        assert view.origin[0] + view.size == 42


def test_views_of_ragged_rows_are_masked_by_position():
    for first in (lambda: KVState(), lambda: WindowState(16)):
        parts = []
        for n in (3, 60, 17):
            parts.append(first())
            feed([parts[-1]], n)
        state = type(parts[0]).merge(parts)
        window = getattr(state, "window", None)
        wanted = [list(range(max(0, n - 15) if window else 0, n)) for n in (3, 60, 17)]
        assert seen(state.view(), [3, 60, 17], window) == wanted
        assert seen(narrow(state.view(), [3, 60, 17], window), [3, 60, 17], window) == wanted


def test_a_quantised_view_says_how_to_read_it():
    view = started(20)[2].view()
    assert (view.bits, view.group_size, view.size) == (8, 32, 20)
    assert [p.shape[2] for p in (*view.keys, *view.values)] == [20] * 6
    assert isinstance(narrow(view, [20], 4), KVView)
    assert narrow(view, [20], 4).size == 3


def test_every_kind_is_a_state():
    assert all(isinstance(s, State) for s in kinds())


@pytest.mark.parametrize("size", [0, 16, 48, 256])
def test_a_group_size_mlx_does_not_have_is_refused(size):
    from mlx_spec.errors import UsageError
    from mlx_spec.state import QuantisedKVState

    with pytest.raises(UsageError, match=f"found {size}, expected 32 or 64 or 128"):
        QuantisedKVState(8, size)


@pytest.mark.parametrize("append", ["update", "fill"])
@pytest.mark.parametrize("count, starts", [(1, 0), (2, 1), (16, 1), (17, 0)])
def test_one_layer_starts_a_block_while_the_rest_is_built(append, count, starts, monkeypatch):
    """Single rows are built ahead and prompts compute for long: both do without."""
    group = StateGroup([KVState(), WindowState(64), QuantisedKVState(8, 32), *(KVState() for _ in range(6))])
    feed(group, 8)
    begun: list[int] = []
    real = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: (begun.append(len(arrays)), real(*arrays))[1])
    for state in group:
        room = state.room(count) if append == "fill" else None
        if room is None:
            feed([state], count, 1)
        else:
            state.fill(room.keys, room.values, count)
    assert len(begun) == starts and [state.starts for state in group] == [i == 1 for i in range(9)]
    assert group.lengths == (8 + count,)
    assert [s.starts for s in group.select([0])] == [s.starts for s in group]
    assert not any(s.starts for s in StateGroup(KVState() for _ in range(3)))
