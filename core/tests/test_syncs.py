"""A greedy round waits for the device once, whatever the width: counted, not believed."""

from __future__ import annotations

import importlib
import inspect

import mlx.core as mx
import pytest
from pairs import make_pair, tiny_target

from mlx_spec import accept
from mlx_spec.api import generate
from mlx_spec.full_model import FullModelDrafter
from mlx_spec.state import steps
from mlx_spec.types import DrafterCard


@pytest.mark.parametrize("in_turn", [False, True], ids=["gpu", "cpu"])
@pytest.mark.parametrize("block", [2, 4, 8])
def test_one_wait_per_round(block, in_turn, monkeypatch):
    """Drafts of a model wait for one another on the CPU, where they would copy their K/V otherwise."""
    monkeypatch.setattr(steps, "COPIED", 0 if in_turn else 1 << 60)
    target = tiny_target("llama")
    drafter = FullModelDrafter(target, DrafterCard("full-model", "llama", vocab_size=target.vocab_size))
    pair = make_pair(target, drafter, block)
    generate(pair, [3, 4, 5], None, 4, adaptive=False)  # whatever is done once is done now
    waits: list[str] = []
    evals: list[int] = []
    for kind in (accept.AcceptResult, accept.GreedyStep, accept.GreedyBlock):
        monkeypatch.setattr(kind, "read", lambda self, real=kind.read: (waits.append("read"), real(self))[1])
    starts: list[int] = []
    for name, call, calls in (("eval", mx.eval, evals), ("async_eval", mx.async_eval, starts)):
        monkeypatch.setattr(mx, name, lambda *a, _real=call, _calls=calls: (_calls.append(1), _real(*a))[1])
    out = generate(pair, [3, 4, 5], None, 24, adaptive=False)
    monkeypatch.undo()
    rounds = out.timings.draft_rounds
    assert rounds >= 3
    assert len([w for w in waits if w == "read"]) == rounds + out.timings.plain_steps
    drafts = out.timings.draft_n
    # the prefill of target and drafter, and those waits
    assert len(evals) <= 2 + rounds + out.timings.plain_steps + (drafts - rounds if in_turn else 0)
    # the prompt of the drafter; of a round the drafts and, in all but the first, the verify; plain steps
    assert len(starts) == 1 + rounds + (rounds - 1) + out.timings.plain_steps + (drafts if in_turn else 0)


@pytest.mark.parametrize("module", ["advance", "defaults", "drawing", "lane", "laws", "rounds", "shaping", "plain"])
def test_nothing_else_in_a_round_waits(module):
    """mlx arrays cannot be patched, so the modules of a round are read for calls that wait."""
    source = inspect.getsource(importlib.import_module(f"mlx_spec.{module}"))
    assert [name for name in (".tolist(", ".item(", "numpy") if name in source] == []
