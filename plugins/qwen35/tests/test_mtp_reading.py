"""Which hidden state a head reads and which half comes first: found out, or decided by the user."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from qwen35_oracles.mtp_ours import Ours

import mlx_spec
from mlx_spec_qwen35 import mtp_reading
from mlx_spec_qwen35.mtp_head import Reading
from mlx_spec_qwen35.mtp_reading import choose

MakePair = Callable[..., tuple[Path, Path]]
USUAL, SWAPPED, PRE = Reading(), Reading("post", "hidden-first"), Reading("pre", "embedding-first")


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({USUAL: 0.0, SWAPPED: 0.0, PRE: 0.0}, USUAL),  # nobody trained it
        ({USUAL: 0.6, SWAPPED: 0.02, PRE: 0.55}, USUAL),
        ({USUAL: 0.55, SWAPPED: 0.02, PRE: 0.65}, USUAL),  # better, but not clearly
        ({USUAL: 0.02, SWAPPED: 0.6, PRE: 0.03}, SWAPPED),
        ({USUAL: 0.3, SWAPPED: 0.02, PRE: 0.62}, PRE),
        ({USUAL: 0.01, SWAPPED: 0.1, PRE: 0.0}, USUAL),  # ten times chance is still chance
        ({}, USUAL),
    ],
)
def test_the_usual_way_stays_unless_another_is_clearly_better(rates: dict[Reading, float], chosen: Reading) -> None:
    assert choose([USUAL, SWAPPED, PRE], rates) == chosen


@pytest.fixture
def swapped(mtp_dirs: MakePair, tmp_path: Path) -> tuple[Path, Path]:
    """A pair whose head was trained with the halves of its input the other way round."""
    target, head = mtp_dirs(drafter="mtp", agree=True)
    path = Path(shutil.copytree(head, tmp_path / "head"))
    weights = dict(mx.load(str(path / "model.safetensors")))
    weights["fc.weight"] = mx.concatenate(mx.split(weights["fc.weight"], 2, axis=1)[::-1], axis=1)
    mx.eval(weights)
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    return target, path


def test_a_head_with_its_halves_swapped_is_found_out_and_drafts_alike(
    mtp_dirs: MakePair, swapped: tuple[Path, Path]
) -> None:
    usual, other = Ours(*mtp_dirs(drafter="mtp", agree=True)), Ours(*swapped)
    assert (usual.drafter.reading, other.drafter.reading) == (USUAL, SWAPPED)
    assert other.drafter.card.extra["concat"].startswith("hidden-first (measured: ")
    tokens = [20, 31, 45, 20, 31, 99, 7]
    drafts = [pair.draft(pair.lane(tokens)[0], [4])[0].tokens.tolist() for pair in (usual, other)]
    assert drafts[0] == drafts[1]


def test_the_users_word_is_final(swapped: tuple[Path, Path]) -> None:
    pair = mlx_spec.load(str(swapped[0]), str(swapped[1]), probe=False, options={"mtp_concat": "embedding-first"})
    assert pair.drafter.reading.concat == "embedding-first"
    assert pair.drafter.card.extra["concat"] == "embedding-first (the option mtp_concat)"


def test_a_measurement_is_remembered(swapped: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    first = Ours(*swapped).drafter
    monkeypatch.setattr(mtp_reading, "measure", lambda *args: pytest.fail("measured again"))
    again = Ours(*swapped).drafter
    assert (again.reading, again.card.extra) == (first.reading, first.card.extra)


def test_without_a_tokenizer_nothing_is_measured(mtp_dirs: MakePair, tmp_path: Path) -> None:
    target, head = mtp_dirs(drafter="mtp")
    bare = Path(shutil.copytree(target, tmp_path / "target"))
    for file in bare.glob("tokenizer*"):
        file.unlink()
    drafter = Ours(bare, head).drafter
    assert drafter.card.extra["hidden"] == "post (the usual one, not measured)"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ('{"mtp_contract": {"base_hidden_variant": "pre_norm"}}', "pre (mtplx_runtime.json says so)"),
        ('{"mtp_contract": {"base_hidden_variant": "post_norm"}}', "post (mtplx_runtime.json says so)"),
        ('{"mtp_contract": {"base_hidden_variant": ["x"]}}', "post (measured: "),
        ('{"mtp_contract": 3}', "post (measured: "),
        ("{", "post (measured: "),
    ],
)
def test_what_a_checkpoint_states_is_taken(mtp_dirs: MakePair, tmp_path: Path, text: str, hidden: str) -> None:
    target, head = mtp_dirs(drafter="mtp")
    path = Path(shutil.copytree(head, tmp_path / "head"))
    (path / "mtplx_runtime.json").write_text(text)
    drafter = Ours(target, path).drafter
    assert drafter.card.extra["hidden"].startswith(hidden)
    assert drafter.taps == (("residual.7",) if hidden.startswith("pre") else ("hidden",))
    assert json.loads((path / "config.json").read_text())["model_type"] == "qwen3_5_mtp"
