"""What drafting may hold in memory: the drafter's weights and caches, and nothing that piles up."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

import mlx.core as mx
import pytest
from pairs import make_pair, tiny_target
from tinymodels import GEMMA3, SMALL_LLAMA, write_model

from mlx_spec.api import generate
from mlx_spec.checkpoint import tensor_index
from mlx_spec.engine import Engine
from mlx_spec.full_model import FullModelDrafter
from mlx_spec.models import Drafter
from mlx_spec.pair import load
from mlx_spec.request import Request
from mlx_spec.sampling import Sampling
from mlx_spec.testing.drafters import ScriptedDrafter

LONG = 240  # of the 256 positions of the tiny gemma3
IDS = 256  # bytes of what a round that has begun drafts and finds


@pytest.fixture(autouse=True)
def exact_sizes() -> Iterator[None]:
    """A buffer that is used again may be larger than what is put into it: none is."""
    limit = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(limit)


def wrong() -> Drafter:
    return ScriptedDrafter(lambda tokens, k: [1] * k)


@pytest.mark.parametrize("drafts", (1, 2, 4, 5, 7))
def test_freed_buffers_are_released_as_often_at_every_width(drafts, monkeypatch):
    """Blocks step over any count: the release is due once in 256 tokens, not at multiples of 256."""
    released = []
    monkeypatch.setattr(mx, "clear_cache", lambda: released.append(1))
    script = {"done": 0}

    def turns(tokens: list[int], k: int) -> list[int]:  # full, partial and no acceptance in turn
        script["done"] += 1
        right = script["done"] % (k + 1)
        return [t if i < right else (t + 1) % 97 for i, t in enumerate(truth[len(tokens) - 1 :][:k])]

    target = tiny_target("small-llama")
    truth = generate(make_pair(target, None), [3], None, 300, ignore_eos=True).token_ids
    assert len(truth) == 300 and len(released) == 1
    out = generate(make_pair(target, ScriptedDrafter(turns), drafts + 1), [3], None, 300, True, adaptive=False)
    assert out.token_ids == truth and 0 < out.timings.draft_n_accepted < out.timings.draft_n
    assert len(released) == 2


def begun(engine: Engine) -> int:
    """Bytes of drafts and verdicts of a round that has begun, which its step reads and drops."""
    lane = engine._advancer.lane
    if lane is None or lane.flight is None or lane.flight.pending is None:
        return 0
    block = lane.flight.pending
    arrays = {id(array): array for array in (lane.flight.draft.tokens, block.ids, block.check, block.drafts)}
    assert sum(array.nbytes for array in arrays.values()) <= IDS
    return sum(array.nbytes for array in arrays.values())


def held(
    drafter: Drafter | None,
    requests: int,
    tokens: int,
    rows: int = 1,
    down_to: float | None = None,
    wait: float = 5,
    apart: bool = False,
) -> int:
    """Most bytes held between the steps of these requests; nothing may be left when they are gone.

    down_to: what is held once the device has let go of what a begun step worked on: looked at again until it is this
    little, for up to `wait` seconds.
    apart: without what a begun round has drafted and found (`begun`).
    """
    pair = make_pair(tiny_target("gemma3"), drafter, 6)
    mx.synchronize()
    gc.collect()
    before, most = mx.get_active_memory(), 0
    engine = Engine(pair, rows)
    handles = [
        engine.submit(Request([3, 4, 5 + i], Sampling(), tokens, ignore_eos=True, adaptive=False))
        for i in range(requests)
    ]

    def now() -> int:
        return mx.get_active_memory() - before - (begun(engine) if apart else 0)

    while engine.step():
        if down_to is not None:
            mx.synchronize()
            end = time.monotonic() + wait
            while now() > max(most, down_to) and time.monotonic() < end:
                time.sleep(0.001)
        most = max(most, now())
    assert all(len(handle.result().token_ids) == tokens for handle in handles)
    assert mx.get_active_memory() - before <= 256
    return most


@pytest.mark.parametrize(
    ("make", "factor"),
    [(wrong, 1.0), (lambda: FullModelDrafter(tiny_target("gemma3")), 2.0)],
    ids=["without a cache of its own", "with a cache like the target's"],
)
def test_drafted_replies_hold_what_plain_ones_hold_and_the_drafters_caches(
    make: Callable[[], Drafter], factor: float
) -> None:
    plain, still = held(None, 1, LONG), held(None, 1, LONG, down_to=0, wait=0.02)
    long = min(factor * plain * 1.05, factor * still + IDS)
    assert held(make(), 1, LONG, down_to=long) <= long
    # a plain step finds one id, a round up to six: what replies leave behind is held against them without
    assert held(make(), 24, 6, down_to=factor * plain, apart=True) <= factor * plain
    assert held(make(), 8, 6, rows=4, down_to=4 * factor * plain) <= 4 * factor * plain


def test_a_drafter_adds_its_weights_and_no_more(tmp_path):
    target = write_model(tmp_path / "target", GEMMA3 | {"vocab_size": 97}, seed=4)
    drafter = write_model(tmp_path / "drafter", SMALL_LLAMA, seed=5)
    weights = sum(info.nbytes for info in tensor_index(drafter).values())

    def active() -> int:
        gc.collect()
        return mx.get_active_memory()

    start = active()
    alone = load(str(target))
    one = active()
    pair = load(str(target), str(drafter), "full-model")  # with a probe, which must leave nothing either
    both = active()
    assert pair.plan.active and alone.drafter is None
    assert weights <= both - one - (one - start) <= 1.1 * weights
