"""MLX_SPEC_DFLASH_PER_ROW_ACCEPTS=0: the rows of a lane all keep the fewest accepted drafts, and stay exact."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from pairs import make_pair, mlx_lm_greedy, tiny_target
from test_rejection_end_to_end import V, law, tiny

from mlx_spec.api import generate
from mlx_spec.engine import Engine
from mlx_spec.full_model import FullModelDrafter
from mlx_spec.pair import Plan, _choose_width
from mlx_spec.request import Request
from mlx_spec.sampling import Sampling
from mlx_spec.settings import reset_settings
from mlx_spec.testing.drafters import ScriptedDrafter, mixed
from mlx_spec.types import DrafterCard

TOKENS = 14
SEEDED = Sampling(temperature=0.9, seed=21)


def right_for(table: dict[tuple[int, ...], list[int]], right: list[int], vocab_size: int):
    """A script whose rows are right for right[i] tokens, in the order of `table`."""
    scripts = [mixed({prompt: reply}, n, vocab_size) for (prompt, reply), n in zip(table.items(), right, strict=True)]
    return lambda tokens, budget: next((ids for script in scripts if (ids := script(tokens, budget))), [])


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("block", [2, 5])
@pytest.mark.parametrize("rows", [2, 4])
@pytest.mark.parametrize("sampling", [Sampling(), SEEDED], ids=["greedy", "coupled"])
def test_every_row_keeps_the_shortest_prefix_and_its_own_reply(model, block, rows, sampling):
    target = tiny_target(model)
    prompts = [[(5 * i + 3 * n) % target.vocab_size for i in range(n)] for n in (3, 9, 6, 12)[:rows]]
    plain = make_pair(target, None)
    table = {tuple(p): generate(plain, p, sampling, TOKENS).token_ids for p in prompts}
    if sampling is not SEEDED:
        assert list(table.values()) == [mlx_lm_greedy(target, p, TOKENS) for p in prompts]
    for fewest in range(block):
        right = [min(block - 1, fewest + i) for i in range(rows)]
        pair = make_pair(target, ScriptedDrafter(right_for(table, right, target.vocab_size)), block)
        pair.plan.per_row_accepts = False
        engine = Engine(pair, max_rows=rows)
        handles = [engine.submit(Request(p, sampling, TOKENS, ignore_eos=True, adaptive=False)) for p in prompts]
        engine.run()
        results = [handle.result() for handle in handles]
        assert [r.token_ids for r in results] == list(table.values())
        together = [r for result in results for r in result.rounds if len(r.draft_ids) == block - 1]
        assert together and {r.accepted for r in together} == {fewest}
        assert not any(r.speculation.per_row_accepts for r in results)


def test_rejection_keeps_its_law(tmp_path):
    """Two rows a lane: 3,000 replies of three tokens, where many blocks are cut by the neighbour."""
    target, depth, total = tiny(tmp_path / "target", 3), 3, 3000
    settings = Sampling(temperature=1.3, top_p=0.97)
    drafter = FullModelDrafter(tiny(tmp_path / "drafter", 2), DrafterCard("full-model", "llama", vocab_size=V))
    pair = make_pair(target, drafter, 3)
    pair.plan.per_row_accepts = False
    engine = Engine(pair, max_rows=2)
    handles = [engine.submit(Request([3], settings, depth, ignore_eos=True, adaptive=False)) for _ in range(total)]
    engine.run()
    results = [handle.result() for handle in handles]
    kept = Counter(r.rounds[0].accepted for r in results)
    assert all(kept[n] > total // 50 for n in range(3)), "blocks must be cut at every length"
    counts = Counter(tuple(r.token_ids) for r in results)
    expected: Counter[tuple[int, ...]] = Counter()
    for reply, p in law(target, settings, 3).items():
        expected[reply[:depth]] += p
    assert all(expected[reply] > 0 for reply in counts)
    cells = [(counts[r], total * expected[r]) for r in itertools.product(range(V), repeat=depth)]
    large = [(c, e) for c, e in cells if e >= 5]
    large.append((total - sum(c for c, _ in large), total - sum(e for _, e in large) + 1e-9))
    chi2 = sum((c - e) ** 2 / e for c, e in large if e >= 5)
    freedom = len([e for _, e in large if e >= 5]) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom), (chi2, freedom)


@pytest.mark.parametrize(
    ("kind", "value", "alone"), [("dflash", "0", True), ("dflash", "1", False), ("mtp", "0", False)]
)
def test_the_setting_is_for_dflash_and_the_start_line_says_so(monkeypatch, kind, value, alone):
    monkeypatch.setenv("MLX_SPEC_DFLASH_PER_ROW_ACCEPTS", value)
    reset_settings()
    pair = make_pair(tiny_target("llama"), ScriptedDrafter(lambda tokens, budget: [], kind=kind))
    try:
        _choose_width(pair, 4, "test")
    finally:
        reset_settings()
    assert pair.plan.per_row_accepts is not alone
    assert ("accepts=shortest-row" in pair.plan.line()) is alone
    assert "accepts=" not in Plan().line()
