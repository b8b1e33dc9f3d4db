"""Cheaper output heads for drafting; the law drawn from is the one reported."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from qwen35_oracles.mtp_ours import Ours

import mlx_spec
from mlx_spec import Sampling
from mlx_spec.errors import LoadError
from mlx_spec_qwen35 import mtp_output
from mlx_spec_qwen35.mtp import output_matrix
from mlx_spec_qwen35.mtp_output import draft_output, read_ranking, requantised

MakePair = Callable[..., tuple[Path, Path]]
PROMPT = [20, 31, 45, 20, 31, 99, 7]


@pytest.fixture(scope="module")
def pair(mtp_dirs: MakePair) -> Ours:
    return Ours(*mtp_dirs(drafter="mtp", agree=True))


def rows(pair: Ours) -> np.ndarray:
    return np.array(output_matrix(pair.target).weight)


@pytest.mark.parametrize("chunk", [8192, 100])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_copy_is_that_of_mlx_whatever_the_pieces(
    pair: Ours, monkeypatch: pytest.MonkeyPatch, bits: int, chunk: int
) -> None:
    monkeypatch.setattr(mtp_output, "CHUNK", chunk)
    matrix = output_matrix(pair.target)
    made = requantised(matrix, bits)
    assert made is not None
    for mine, theirs in zip((made.weight, made.scales, made.biases), mx.quantize(matrix.weight, 64, bits), strict=True):
        assert mx.array_equal(mine, theirs)


def test_a_packed_target_is_packed_again_from_its_unpacked_rows(mtp_dirs: MakePair) -> None:
    matrix = output_matrix(Ours(*mtp_dirs(drafter="mtp", bits=8)).target)
    made = requantised(matrix, 4)
    assert made is not None
    dense = mx.dequantize(matrix.weight, matrix.scales, matrix.biases, matrix.group_size, matrix.bits)
    assert mx.array_equal(made.weight, mx.quantize(dense, 64, 4)[0])


def test_packing_that_leaves_zeros_falls_back_and_says_so(
    pair: Ours, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    matrix = output_matrix(pair.target)

    def zeros(piece: mx.array, **how: int) -> list[mx.array]:
        return [mx.zeros_like(part) for part in mx.quantize(piece, **how)]

    assert requantised(matrix, 4, quantise=zeros) is None
    monkeypatch.setattr(mtp_output, "CHUNK", 100)
    made = itertools.count()
    assert requantised(matrix, 4, quantise=lambda *a, **k: (mx.quantize, zeros)[next(made) == 2](*a, **k)) is None
    monkeypatch.setattr(mtp_output, "requantised", lambda *args: None)
    output, said = draft_output(matrix, 320, {"draft_head_bits": 4}, ())
    assert output is None
    assert said == "the target's rows (packing them gave zeros)"
    assert "found a piece of only zeros after packing" in caplog.text
    output, said = draft_output(matrix, 320, {"draft_head_bits": 4, "draft_vocab_size": 9}, ())
    assert output is not None and output.ids.size == 9
    assert said.endswith("(packing them gave zeros), 9 of 320 ids")


@pytest.mark.parametrize("layout", [{}, {"bits": 4}, {"variant": "tied"}], ids=str)
def test_a_reduced_vocabulary_scores_its_rows_alone(mtp_dirs: MakePair, tmp_path: Path, layout: dict[str, Any]) -> None:
    ids = [300, 4, 17, 255, 90, 3]
    (tmp_path / "ids").write_text(json.dumps(ids))
    pair = Ours(*mtp_dirs(drafter="mtp", **layout))
    output, said = draft_output(output_matrix(pair.target), 320, {"draft_vocab": str(tmp_path / "ids")}, ())
    assert output is not None and said == "the target's rows, 6 of 320 ids"
    hidden = mx.random.normal((3, 64), key=mx.random.key(0))
    whole, reduced = np.array(pair.target.head(hidden)), np.array(output(hidden))
    assert reduced.shape == whole.shape
    assert np.abs(reduced[:, ids] - whole[:, ids]).max() < 1e-5
    assert (np.isfinite(reduced).sum(axis=1) == 6).all()


def test_which_ids_are_chosen(pair: Ours, tmp_path: Path) -> None:
    matrix = output_matrix(pair.target)
    lowest, _ = draft_output(matrix, 320, {"draft_vocab_size": 5}, {1, 300, 999})
    assert lowest.ids.tolist() == [0, 1, 2, 3, 4, 300]  # what ends a reply stays possible
    file = tmp_path / "ids.txt"
    file.write_text("9\n4\n7\n2\n")
    first, _ = draft_output(matrix, 320, {"draft_vocab_size": 3, "draft_vocab": str(file)}, {1})
    assert first.ids.tolist() == [9, 4, 7]
    everything, said = draft_output(matrix, 320, {"draft_vocab_size": 1000}, ())
    assert everything.ids.size == 320 and said == "the target's rows, 320 of 320 ids"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[1, 2, 320]", "found 320, expected ids from 0 to 319"),
        ("[1, true]", "found True"),
        ("1 2 two", "invalid literal"),
        ("[]", "found no ids"),
        ("[3, 3]", "found ids that repeat"),
        ("[1", "expected a JSON list"),
    ],
)
def test_a_ranking_that_is_none_is_refused(tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "ids").write_text(text)
    with pytest.raises(LoadError, match=found):
        read_ranking(tmp_path / "ids", 320)
    with pytest.raises(LoadError, match="No such file"):
        read_ranking(tmp_path / "absent", 320)


def test_a_width_that_cannot_be_packed_is_refused() -> None:
    from mlx import nn

    with pytest.raises(LoadError, match="found a hidden size of 40, expected a multiple of 32"):
        requantised(nn.Linear(40, 8, bias=False), 4)


OPTIONS = [{"draft_head_bits": 4}, {"draft_vocab_size": 150}, {"draft_head_bits": 8, "draft_vocab_size": 200}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_law_reported_is_the_law_drawn_from(mtp_dirs: MakePair, options: dict[str, Any]) -> None:
    """They are 0 outside the chosen ids, sum to 1, and are those of the logits drawn from."""
    from mlx_spec.accept import RowPlan
    from mlx_spec.drawing import Drawer
    from mlx_spec.shaping import shape_logprobs

    pair = Ours(*mtp_dirs(drafter="mtp", agree=True), **options)
    lane, _ = pair.lane(PROMPT)
    settings = Sampling(temperature=1.1, acceptance="rejection")
    plan = [RowPlan(settings=settings, seed=7, position=len(PROMPT), history=list(PROMPT))]
    drawer, seen = Drawer(plan, 320), []
    lane.bind_draw(lambda logits, step: (seen.append(logits), drawer(logits, step))[1])
    draft = pair.drafter.propose(lane, [3])
    assert draft.probs is not None and draft.probs.shape == (1, 3, 320)
    for step, logits in enumerate(seen):
        law = draft.probs[0, step]
        assert abs(law.sum().item() - 1) < 1e-5
        assert mx.allclose(law, mx.exp(shape_logprobs(logits, settings))[0], rtol=0, atol=1e-6)
        ids = pair.drafter.model.output.ids
        if ids is not None:
            outside = np.setdiff1d(np.arange(320), np.array(ids))
            assert mx.max(law[mx.array(outside)]).item() == 0.0
            assert draft.tokens[0, step].item() in ids.tolist()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("settings", [None, Sampling(temperature=0.9, seed=5)], ids=["greedy", "coupled"])
def test_replies_are_the_targets_own(mtp_dirs: MakePair, options: dict[str, Any], settings: Sampling | None) -> None:
    target, drafter = mtp_dirs(drafter="mtp", agree=True)
    pair = mlx_spec.load(str(target), str(drafter), probe=False, options=options)
    plain = mlx_spec.generate(pair, PROMPT, settings, 24, ignore_eos=True, speculative=False)
    out = mlx_spec.generate(pair, PROMPT, settings, 24, ignore_eos=True, adaptive=False)
    assert out.token_ids == plain.token_ids
    assert out.timings.draft_n > 0 and out.speculation.fallbacks == []
    assert pair.drafter.card.extra["output"] != "the target's output head"


def test_a_request_that_wants_only_ids_nobody_drafts_is_served(mtp_dirs: MakePair) -> None:
    """Every likely id lies outside the reduced vocabulary: nothing is accepted, nothing breaks."""
    target, drafter = mtp_dirs(drafter="mtp", agree=True)
    pair = mlx_spec.load(str(target), str(drafter), probe=False, options={"draft_vocab_size": 100})
    bias = dict.fromkeys(range(100), -1000.0)
    settings = Sampling(temperature=1.0, logit_bias=bias, acceptance="rejection")
    out = mlx_spec.generate(pair, PROMPT, settings, 12, ignore_eos=True, adaptive=False)
    assert len(out.token_ids) == 12 and min(out.token_ids) >= 100
    assert out.speculation.fallbacks == []
