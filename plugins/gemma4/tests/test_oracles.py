"""Target and assistant against an independent float64 implementation and against stored answers of others."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from gemma4_oracles.cases import CASES, LENGTHS, STEPS, Case, prompt
from gemma4_oracles.ours import Ours
from gemma4_oracles.reference import Assistant, Target
from gemma4_oracles.summary import differences, summary

GOLDENS = Path(__file__).parents[1] / "oracles" / "goldens"
CLOSE = 2e-4
"""f32 against float64 over a whole target; a draft step on top of it grows the difference further."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory):
    """Directories of a case, written once."""
    folder = tmp_path_factory.mktemp("cases")
    return cache(lambda case: case.write(folder))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_the_float64_reference(written, case: Case) -> None:
    dirs = written(case)
    ours = Ours(*dirs)
    target = Target(dirs[0])
    assistant = Assistant(dirs[1], target)
    for length in LENGTHS:
        ids = prompt(case, length)
        logits, hidden = target.run(ids[:-1])
        tokens, rows = assistant.draft(ids[-1], hidden[-1], length - 1, STEPS)
        own = ours.run(ids)
        assert np.abs(own["logits"] - logits).max() < CLOSE
        assert np.abs(own["hidden"] - hidden).max() < CLOSE
        assert (own["logits"].argmax(axis=-1) == logits.argmax(axis=-1)).all()
        assert own["draft"] == tokens
        possible = np.isfinite(rows)
        assert np.array_equal(np.isfinite(own["draft_logits"]), possible)
        assert np.abs(own["draft_logits"][possible] - rows[possible]).max() < 10 * CLOSE


@pytest.mark.parametrize("name", ["mlx_vlm", "transformers"])
def test_agrees_with_stored_answers(written, name: str) -> None:
    golden = json.loads((GOLDENS / f"{name}.json").read_text())
    cases = {case.name: case for case in CASES if name in case.oracles}
    assert {key.split("/")[0] for key in golden["answers"]} == set(cases)
    loaded = cache(lambda case: Ours(*written(case)))
    for key, answer in golden["answers"].items():
        case, length = key.split("/")
        own = loaded(cases[case]).run(prompt(cases[case], int(length)))
        assert differences(summary(own), answer) == [], f"{key}, {golden['versions']}"
