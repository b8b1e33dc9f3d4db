"""A pair with traced drafter graphs, loaded in one thread and used in others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import mlx_spec

PROMPT = [(5 * i + 3) % 60 for i in range(12)]


def test_a_pair_loaded_in_one_thread_drafts_in_others(pair_dirs):
    target, drafter = map(str, pair_dirs("E"))

    def load() -> mlx_spec.Pair:
        return mlx_spec.load(target, drafter=drafter, probe=False)

    def reply(pair: mlx_spec.Pair, i: int = 0, **how: bool) -> mlx_spec.Result:
        return mlx_spec.generate(pair, PROMPT[i:], None, 12, ignore_eos=True, adaptive=False, **how)

    here = load()
    want = [reply(here, i, speculative=False).token_ids for i in range(4)]
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(4) as others:
        pair = first.submit(load).result(60)
        for owner in (pair, here):
            got = list(others.map(lambda i, pair=owner: reply(pair, i), range(4)))
            assert [out.token_ids for out in got] == want
            assert all(out.timings.draft_rounds > 2 for out in got)
    assert [reply(pair, i).token_ids for i in range(4)] == want
