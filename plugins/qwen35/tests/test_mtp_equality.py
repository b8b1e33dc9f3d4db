"""Whatever a head drafts, at any width, alone or in company, sampled or not: replies are the target's."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlx_spec
from mlx_spec import Draft, Lane, Pair, Request, Sampling
from mlx_spec.lanefile import load_lane, save_lane
from mlx_spec.shaping import shape_logprobs
from mlx_spec_qwen35.mtp import MtpDrafter

MakePair = Callable[..., tuple[Path, Path]]
KINDS: dict[str, dict[str, Any]] = {
    "external": {"drafter": "mtp"},
    "own": {"drafter": "own", "raw": True, "wrapper": True},
    "own-moe-4bit": {"drafter": "own", "variant": "moe", "bits": 4},
}
SMALL = {"num_hidden_layers": 4, "full_attention_interval": 2, "agree": True}
TOKENS = 14
PROMPTS = [[20, 31, 45, 20, 31, 99, 7], [9], [200, 8, 13, 77, 15, 41, 16, 250, 11, 19, 90], [60, 61, 62]]
SETTINGS = {
    "greedy": Sampling(),
    "coupled": Sampling(temperature=0.8, seed=11),
    "coupled-filtered": Sampling(temperature=1.3, top_p=0.9, top_k=20, min_p=0.02, seed=12),
}


class Steered(MtpDrafter):
    """The head drafts as always; then its tokens become right for `right` steps and wrong after."""

    def steer(self, table: dict[tuple[int, ...], list[int]], right: int) -> None:
        self.table, self.right = table, right

    def propose(self, lane: Lane, budget: Sequence[int]) -> Draft:
        draft = super().propose(lane, budget)
        width, rows = draft.tokens.shape[1], []
        for tokens in lane.tokens:
            prompt = next(p for p in self.table if tuple(tokens[: len(p)]) == p)
            ahead = self.table[prompt][len(tokens) - len(prompt) :][:width]
            ahead += [0] * (width - len(ahead))
            rows.append([t if i < self.right else (t + 1) % 250 for i, t in enumerate(ahead)])
        return Draft(mx.array(rows, dtype=mx.int32).reshape(lane.size, width), draft.counts, None)


@pytest.fixture(scope="module")
def pairs(mtp_dirs: MakePair) -> Callable[[str], Pair]:
    kept: dict[str, Pair] = {}

    def make(kind: str) -> Pair:
        if kind not in kept:
            target, drafter = mtp_dirs(**SMALL, **KINDS[kind])
            kept[kind] = mlx_spec.load(str(target), str(drafter), "mtp", 9, probe=False)
        return kept[kind]

    return make


def steered(pair: Pair) -> tuple[Pair, Steered]:
    own = pair.drafter
    assert isinstance(own, MtpDrafter)
    drafter = Steered(own.card, own.model, own.target, own.reading)
    return replace(pair, drafter=drafter), drafter


def plain(pair: Pair, prompt: list[int], settings: Sampling, count: int = TOKENS) -> list[int]:
    return mlx_spec.generate(pair, prompt, settings, count, ignore_eos=True, speculative=False).token_ids


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_accept_count_at_every_width_equals_plain(pairs: Any, kind: str, settings: str) -> None:
    pair, drafter = steered(pairs(kind))
    law = SETTINGS[settings]
    blocks = range(2, 10) if settings == "greedy" else (2, 4, 9)
    for block in blocks:
        prompt = PROMPTS[block % len(PROMPTS)]
        reply = plain(pair, prompt, law)
        for right in range(block):
            drafter.steer({tuple(prompt): reply}, right)
            out = mlx_spec.generate(pair, prompt, law, TOKENS, ignore_eos=True, adaptive=False, block_size=block)
            assert out.token_ids == reply, (block, right)
            assert out.speculation.fallbacks == []
            full = [r.accepted for r in out.rounds if len(r.draft_ids) == block - 1]
            assert full and set(full) == {right}, (block, right)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adaptive", [False, True], ids=["fixed", "adaptive"])
def test_rows_in_changing_company_equal_their_solo_runs(pairs: Any, kind: str, adaptive: bool) -> None:
    """Rows accept different counts, join and leave; greedy and coupled ones in one lane."""
    pair, drafter = steered(pairs(kind))
    laws = [SETTINGS[name] for name in ("greedy", "coupled", "greedy", "coupled-filtered")]
    counts = [TOKENS, 6, 2 * TOKENS, 9]
    table = {tuple(p): plain(pair, p, law, 40) for p, law in zip(PROMPTS, laws, strict=True)}
    drafter.steer(table, 2)
    engine = mlx_spec.Engine(pair, max_rows=3)
    requests = [
        Request(p, law, n, ignore_eos=True, adaptive=adaptive, block_size=b)
        for p, law, n, b in zip(PROMPTS, laws, counts, (4, 2, 6, 3), strict=True)
    ]
    handles = [engine.submit(request) for request in requests[:2]]
    for _ in range(4):
        engine.step()
    handles += [engine.submit(request) for request in requests[2:]]
    engine.run()
    for prompt, n, handle in zip(PROMPTS, counts, handles, strict=True):
        result = handle.result()
        assert result.token_ids == table[tuple(prompt)][:n]
        assert result.speculation.fallbacks == []


def test_the_heads_own_drafts_equal_plain_under_every_law(pairs: Any) -> None:
    accepted = 0
    for kind, settings in itertools.product(KINDS, SETTINGS.values()):
        pair = pairs(kind)
        for prompt in PROMPTS:
            out = mlx_spec.generate(pair, prompt, settings, TOKENS, ignore_eos=True, adaptive=False, block_size=5)
            assert out.token_ids == plain(pair, prompt, settings)
            accepted += out.timings.draft_n_accepted
    assert accepted > 50


def test_requests_stepped_in_turn_do_not_see_each_other(pairs: Any) -> None:
    pair = pairs("own")
    alone = [mlx_spec.generate(pair, p, None, TOKENS, ignore_eos=True, adaptive=False, block_size=4) for p in PROMPTS]
    engines = [mlx_spec.Engine(pair, max_rows=1) for _ in PROMPTS]
    handles = [
        engine.submit(Request(p, Sampling(), TOKENS, ignore_eos=True, adaptive=False, block_size=4))
        for engine, p in zip(engines, PROMPTS, strict=True)
    ]
    while any([engine.step() for engine in engines]):  # noqa: C419 - every engine takes its step
        pass
    for handle, expected in zip(handles, alone, strict=True):
        found = handle.result()
        assert found.token_ids == expected.token_ids
        assert [r.draft_ids for r in found.rounds] == [r.draft_ids for r in expected.rounds]


# -- rejection -------------------------------------------------------------------------------------------

DEPTH, ROWS, BATCHES, KEPT = 3, 150, 7, 3


def law_of(pair: Pair, settings: Sampling, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Probability of every reply of DEPTH tokens, by the chain rule over the target's own logits."""
    laws = {(): 1.0}
    for _ in range(DEPTH):
        replies = list(laws)
        tokens = mx.array([[*prompt, *reply] for reply in replies], dtype=mx.int32)
        states = pair.target.make_states()
        states = type(states).merge([states.extract(0) for _ in replies])
        logits = pair.target.forward(tokens, states).logits[:, -1, : pair.token_limit]
        shaped = np.array(mx.exp(shape_logprobs(logits, settings)))
        laws = {
            (*reply, int(token)): laws[reply] * float(row[token])
            for reply, row in zip(replies, shaped, strict=True)
            for token in np.flatnonzero(row)
        }
    return laws


@pytest.mark.parametrize("options", [{}, {"draft_vocab_size": 200, "draft_head_bits": 4}], ids=["whole", "reduced"])
def test_draws_under_rejection_follow_the_target(mtp_dirs: MakePair, options: dict[str, Any]) -> None:
    """The distribution of whole replies is enumerated and compared, drafted with the head's own q."""
    target, drafter = mtp_dirs(num_hidden_layers=2, full_attention_interval=2, agree=True, **KINDS["external"])
    pair = mlx_spec.load(str(target), str(drafter), "mtp", 3, probe=False, options=options)
    settings, prompt = Sampling(temperature=2.0, top_k=KEPT), [60, 61, 62]
    expected = law_of(pair, settings, prompt)
    assert math.isclose(sum(expected.values()), 1.0, abs_tol=1e-4)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = drafted = 0
    for _ in range(BATCHES):
        engine = mlx_spec.Engine(pair, max_rows=ROWS)
        request = Request(prompt, settings, DEPTH, ignore_eos=True, adaptive=False)
        handles = [engine.submit(request) for _ in range(ROWS)]
        engine.run()
        for handle in handles:
            out = handle.result()
            counts[tuple(out.token_ids)] += 1
            accepted += out.timings.draft_n_accepted
            drafted += out.timings.draft_n
    assert all(reply in expected for reply in counts), "a reply that the target can not write"
    assert 0.05 * drafted < accepted < 0.95 * drafted, (accepted, drafted)
    total = ROWS * BATCHES
    cells = [(counts[r], total * p) for r, p in expected.items() if total * p >= 5]
    rest = (total - sum(c for c, _ in cells), total - sum(e for _, e in cells))
    cells += [rest] if rest[1] >= 5 else []
    chi2, freedom = sum((c - e) ** 2 / e for c, e in cells), len(cells) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom), (chi2, freedom)


# -- one graph, one file -------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 4, 8])
def test_a_propose_waits_for_nothing(pairs: Any, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Drafts are started, and none of them is waited for, at any width."""
    pair = pairs("external")
    engine = mlx_spec.Engine(pair, max_rows=2)
    for prompt in PROMPTS[:2]:
        engine.submit(Request(prompt, Sampling(), 99, ignore_eos=True, adaptive=False))
    for _ in range(6):
        engine.step()
    lane = engine._advancer.lane
    assert lane is not None and lane.size == 2
    waits: list[mx.array] = []
    monkeypatch.setattr(mx, "eval", lambda *arrays: waits.extend(arrays))
    lane.bind_draw(lambda logits, step: (mx.argmax(logits, axis=-1).astype(mx.int32), None))
    draft = pair.drafter.propose(lane, [width, width])
    monkeypatch.undo()
    assert waits == [] and draft.tokens.shape == (2, width)


def test_no_module_of_a_propose_reads_an_array() -> None:
    """mlx arrays cannot be patched, so what a propose runs is read for calls that wait."""
    import inspect

    from mlx_spec_qwen35 import mtp, mtp_head
    from mlx_spec_qwen35.mtp_output import DraftOutput

    for code in (mtp, mtp_head, DraftOutput):
        assert [name for name in (".tolist(", ".item(", "np.", "mx.eval") if name in inspect.getsource(code)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_lane_saved_in_mid_reply_goes_on_as_it_was(pairs: Any, tmp_path: Path, kind: str) -> None:
    """Two rows, both sides, and states the head has not seen: the same drafts and the same verify."""
    pair, drafter = steered(pairs(kind))
    table = {tuple(p): plain(pair, p, Sampling(), 40) for p in PROMPTS[1:3]}
    drafter.steer(table, 2)
    engine = mlx_spec.Engine(pair, max_rows=2)
    for prompt in PROMPTS[1:3]:
        engine.submit(Request(prompt, Sampling(), 30, ignore_eos=True, adaptive=False, block_size=4))
    for _ in range(7):
        engine.step()
    lane = engine._advancer.lane
    assert lane is not None and lane.size == 2 and lane.fresh
    save_lane(lane, tmp_path / "lane")
    again = load_lane(tmp_path / "lane", pair.target, drafter)
    assert again.tokens == lane.tokens and again.lengths == lane.lengths
    seen: list[list[mx.array]] = []
    for one in (lane, again):
        rows: list[mx.array] = []
        one.bind_draw(lambda logits, step, rows=rows: (rows.append(logits), (mx.argmax(logits, axis=-1), None))[1])
        MtpDrafter.propose(drafter, one, [4, 4])
        block = mx.array([[tokens[-1], 5, 6] for tokens in one.tokens], dtype=mx.int32)
        verified = one.target.forward(block, one.states, ("hidden",))
        seen.append([*rows, verified.logits, verified.taps["hidden"]])
    assert len(seen[0]) == 6
    for mine, theirs in zip(*seen, strict=True):
        assert mx.array_equal(mine, theirs)
