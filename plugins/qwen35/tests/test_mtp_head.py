"""The MTP head against an independent float64 implementation, in every layout, round after round."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from qwen35_oracles.mtp_cases import CASES, Case, differences, script, summary
from qwen35_oracles.mtp_ours import Ours, scripted_rounds
from qwen35_oracles.mtp_reference import HeadReference
from qwen35_oracles.reference import Target as TargetReference

import mlx_spec
from mlx_spec import Lane, Request, Sampling, TapBlock
from mlx_spec_qwen35.mtp import MtpDrafter

GOLDEN = Path(__file__).parents[1] / "oracles" / "goldens" / "mtp_mlx_vlm.json"
CLOSE = 1e-4  # float32 against float64, logits up to 5
TIE = 1e-4
LAYOUTS: dict[str, dict[str, Any]] = {
    "mtp": {"drafter": "mtp"},
    "own": {"drafter": "own"},
    "own-published": {"drafter": "own", "raw": True, "wrapper": True},
    "own-published-moe": {"drafter": "own", "variant": "moe", "raw": True},
    "mtp-moe": {"drafter": "mtp", "variant": "moe"},
    "mtp-moe-topk": {"drafter": "mtp", "variant": "moe", "norm_topk_prob": False},
    "mtp-moe-4bit": {"drafter": "mtp", "variant": "moe", "bits": 4},
    "own-4bit": {"drafter": "own", "bits": 4, "wrapper": True},
    "mtp-three-layers": {"drafter": "mtp", "mtp_num_hidden_layers": 3},
    "own-eight-layers": {"drafter": "own", "mtp_num_hidden_layers": 8, "intermediate_size": 32},
    "mtp-three-layers-tied": {"drafter": "mtp", "variant": "tied", "mtp_num_hidden_layers": 3},
}
MakePair = Callable[..., Any]


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(6, 260, length).tolist()


@pytest.fixture(scope="module", autouse=True)
def unpacked():
    """Heads stay as stored here: packing is compared apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_SPEC_QUANTIZE_DRAFTER", "0")
        from mlx_spec.settings import reset_settings

        reset_settings()
        yield
    reset_settings()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_drafts_equal_the_reference(mtp_dirs: MakePair, layout: str) -> None:
    dirs = mtp_dirs(**LAYOUTS[layout])
    pair, reference = Ours(*dirs), HeadReference(dirs[1], LAYOUTS[layout].get("raw", False))
    for length in (3, 20):
        tokens = prompt(length)
        lane, taps = pair.lane(tokens)
        draft, rows = pair.draft(lane, [4])
        expected, logits, gap = pair.expected(reference, tokens, taps["hidden"], 4)
        assert gap > TIE
        assert draft.tokens.tolist() == [expected]
        assert max(np.abs(row[0] - other).max() for row, other in zip(rows, logits, strict=True)) < CLOSE
        assert lane.draft_state.states.lengths == (length - 1,)  # guesses are taken back


@pytest.mark.parametrize("layout", ["mtp", "own-published-moe"])
def test_target_and_head_together_equal_float64(mtp_dirs: MakePair, layout: str) -> None:
    """From token ids to drafts with nothing of ours in between: the states are the target reference's too."""
    dirs = mtp_dirs(**LAYOUTS[layout])
    pair, reference, tokens = Ours(*dirs), HeadReference(dirs[1], LAYOUTS[layout].get("raw", False)), prompt(12)
    hidden = TargetReference(dirs[0]).run(tokens[:-1])["hidden"]
    lane, _ = pair.lane(tokens)
    draft, rows = pair.draft(lane, [4])
    expected, logits, gap = pair.expected(reference, tokens, hidden, 4)
    assert gap > 2e-3 and draft.tokens.tolist() == [expected]
    assert max(np.abs(row[0] - other).max() for row, other in zip(rows, logits, strict=True)) < 2e-3


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_scripted_rounds_equal_the_answers_of_mlx_vlm(tmp_path: Path, case: Case) -> None:
    golden = json.loads(GOLDEN.read_text())
    pair, keys = Ours(*case.write(tmp_path)), [key for key in golden["answers"] if key.split("/")[0] == case.name]
    assert keys
    for key in keys:
        length = int(key.split("/")[1])
        own = summary(scripted_rounds(pair, script(case, length), length))
        assert differences(own, golden["answers"][key]) == [], f"{key}, {golden['versions']}"


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({"mtp_concat": "hidden-first"}, {"hidden_first": True}),
        ({"mtp_hidden": "pre"}, {"pre": True}),
        ({"mtp_concat": "hidden-first", "mtp_hidden": "pre"}, {"hidden_first": True, "pre": True}),
    ],
    ids=str,
)
def test_other_readings_equal_the_reference(mtp_dirs: MakePair, options: dict[str, str], how: dict[str, bool]) -> None:
    dirs = mtp_dirs(drafter="mtp")
    pair, reference, tokens = Ours(*dirs, **options), HeadReference(dirs[1]), prompt(12)
    lane, taps = pair.lane(tokens)
    _, rows = pair.draft(lane, [3])
    _, logits, _ = pair.expected(reference, tokens, taps[pair.drafter.taps[0]], 3, **how)
    assert max(np.abs(row[0] - other).max() for row, other in zip(rows, logits, strict=True)) < CLOSE
    usual = pair.expected(reference, tokens, taps[pair.drafter.taps[0]], 3)[1]
    assert np.abs(rows[-1][0] - usual[-1]).max() > 0.1


@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_a_prompt_in_chunks_primes_the_same_caches(mtp_dirs: MakePair, chunk: int) -> None:
    pair, tokens = Ours(*mtp_dirs(drafter="mtp")), prompt(23)
    whole, parts = (pair.lane(tokens, step)[0] for step in (None, chunk))
    assert parts.draft_state.states.lengths == (21,)  # row 21 waits for the anchor
    for one, other in zip(whole.draft_state.states, parts.draft_state.states, strict=True):
        assert mx.allclose(one.view().keys, other.view().keys, rtol=0, atol=1e-5)
        assert mx.allclose(one.view().values, other.view().values, rtol=0, atol=1e-5)
    assert pair.draft(whole, [4])[0].tokens.tolist() == pair.draft(parts, [4])[0].tokens.tolist()


# -- round after round -----------------------------------------------------------------------------------


class Recorded(MtpDrafter):
    """Notes what every propose drafted, and after which tokens."""

    seen: list[tuple[tuple[int, ...], tuple[int, ...]]]

    def propose(self, lane: Lane, budget: Sequence[int]) -> mlx_spec.Draft:
        draft = super().propose(lane, budget)
        self.seen += [
            (tuple(tokens), tuple(ids[:count]))
            for tokens, ids, count in zip(lane.tokens, draft.tokens.tolist(), draft.counts or (), strict=True)
        ]
        return draft


def recorded(dirs: Any, **options: Any) -> mlx_spec.Pair:
    pair = mlx_spec.load(str(dirs[0]), str(dirs[1]), kind="mtp", probe=False, **options)
    own = pair.drafter
    assert isinstance(own, MtpDrafter)
    drafter = Recorded(own.card, own.model, own.target, own.reading)
    drafter.seen = []
    return replace(pair, drafter=drafter)


def check_drafts(dirs: Any, pair: mlx_spec.Pair, least: int, deltas: bool = False) -> None:
    """At least `least` tokens were drafted, all of them those of the reference over verified states alone."""
    ours, reference = Ours(*dirs), HeadReference(dirs[1], deltas)
    made = [(tokens, ids) for tokens, ids in pair.drafter.seen if ids]
    states: dict[tuple[int, ...], np.ndarray] = {}  # of the longest history with the same beginning
    compared = 0
    for tokens, ids in made[::-1][::3]:
        whole = next((s for s in states if s[: len(tokens)] == tokens), tokens)
        if whole not in states:
            ids_in = mx.array([whole[:-1]], dtype=mx.int32)
            taps = ours.target.forward(ids_in, ours.target.make_states(), ("hidden",)).taps
            states[whole] = np.array(taps["hidden"][0], dtype=np.float64)
        hidden = states[whole][: len(tokens) - 1]
        expected, _, gap = ours.expected(reference, tokens, hidden, len(ids), pair.token_limit)
        assert list(ids) == expected or gap < 1e-3, (tokens, ids, expected, gap)
        compared += len(ids)
    assert compared >= least


@pytest.mark.parametrize("layout", ["mtp", "own-published", "mtp-moe", "mtp-three-layers"])
def test_rounds_of_every_accept_count_draft_as_the_reference(mtp_dirs: MakePair, layout: str) -> None:
    dirs = mtp_dirs(agree=True, **LAYOUTS[layout])
    pair = recorded(dirs, block_size=4)
    counts = set()
    for seed in range(3):
        out = mlx_spec.generate(pair, prompt(9, seed), None, 40, ignore_eos=True, adaptive=False, block_size=4)
        counts |= {r.accepted for r in out.rounds if len(r.draft_ids) == 3}
        assert out.speculation.fallbacks == []
    assert counts == {0, 1, 2, 3}
    check_drafts(dirs, pair, 24, LAYOUTS[layout].get("raw", False))


def test_rows_in_changing_company_draft_as_the_reference(mtp_dirs: MakePair) -> None:
    """Rows join and leave between rounds, at different lengths and widths; one of them never drafts."""
    dirs = mtp_dirs(agree=True, drafter="mtp")
    lengths, counts, blocks, silent = (9, 30, 2, 17, 1), (20, 9, 30, 12, 20), (4, 2, 6, 4, 3), 3
    prompts = [prompt(n, seed=1) for n in lengths]
    pair = recorded(dirs)
    engine = mlx_spec.Engine(pair, max_rows=3)
    handles = [
        engine.submit(
            Request(ids, Sampling(), count, ignore_eos=True, adaptive=False, speculative=n != silent, block_size=block)
        )
        for n, (ids, count, block) in enumerate(zip(prompts, counts, blocks, strict=True))
    ]
    engine.run()
    for ids, count, handle in zip(prompts, counts, handles, strict=True):
        alone = mlx_spec.generate(pair, ids, None, count, ignore_eos=True, speculative=False)
        assert handle.result().token_ids == alone.token_ids
        assert handle.result().speculation.fallbacks == []
    check_drafts(dirs, pair, 20)  # how many rounds it takes depends on last bits
    drafted = {tokens[:1] for tokens, ids in pair.drafter.seen if ids}
    assert drafted == {tuple(ids[:1]) for n, ids in enumerate(prompts) if n != silent}


def test_a_pass_that_fails_leaves_the_caches_as_they_were(mtp_dirs: MakePair) -> None:
    """A layer fails after an earlier one appended: the next propose drafts as if nothing happened."""
    pair, tokens = Ours(*mtp_dirs(**LAYOUTS["mtp-three-layers-tied"])), prompt(9)
    lane, _ = pair.lane(tokens)
    expected = pair.draft(lane, [3])[0].tokens.tolist()
    lane, _ = pair.lane(tokens)
    states = lane.draft_state.states
    second, real = states[1], states[1].update_and_fetch
    second.update_and_fetch = lambda keys, values: (_ for _ in ()).throw(RuntimeError("no room"))
    with pytest.raises(RuntimeError, match="no room"):
        pair.draft(lane, [3])
    second.update_and_fetch = real
    assert states.lengths == (7,)
    assert pair.draft(lane, [3])[0].tokens.tolist() == expected


def test_every_draft_starts_before_the_next_pass_is_built(mtp_dirs: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Ours(*mtp_dirs(drafter="mtp"))
    lane, _ = pair.lane(prompt(9))
    started: list[mx.array] = []
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: started.extend(arrays))
    tokens = pair.draft(lane, [3])[0].tokens
    assert [token.tolist() for token in started] == tokens.T.tolist()


def test_a_request_it_has_not_followed_from_the_start_gets_no_drafts(mtp_dirs: MakePair) -> None:
    pair = Ours(*mtp_dirs(drafter="mtp"))
    lane, _ = pair.lane(prompt(9))
    lane.draft_state = pair.drafter.make_state()
    lane.fresh = [TapBlock({"hidden": mx.ones((1, 3, 64))}, [2])]
    draft, _ = pair.draft(lane, [3])
    assert (draft.tokens.shape, draft.counts) == ((1, 0), [0])
    assert lane.draft_state.states.lengths == (0,)
