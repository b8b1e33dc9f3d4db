"""The target against an independent float64 implementation and against stored answers of others."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from qwen35_oracles.cases import CASES, LENGTHS, Case, prompt
from qwen35_oracles.ours import Ours
from qwen35_oracles.reference import Target
from qwen35_oracles.summary import differences, summary

GOLDENS = Path(__file__).parents[1] / "oracles" / "goldens"
CLOSE = {"logits": 2e-3, "hidden": 2e-3, "residual": 1e-2}
"""float32 against float64 through a whole stack of random weights."""


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], tuple[Path, Ours]]:
    """A case's directory and the plugin on it; written and loaded once."""
    folder, named = tmp_path_factory.mktemp("cases"), {case.name: case for case in CASES}

    @cache
    def make(name: str) -> tuple[Path, Ours]:
        path = named[name].write(folder)
        return path, Ours(path)

    return lambda case: make(case.name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_the_float64_reference(ours: Callable[[Case], tuple[Path, Ours]], case: Case) -> None:
    path, own = ours(case)
    ids = prompt(case, LENGTHS[-1])
    found, expected = own.run(ids), Target(path).run(ids)
    for name, limit in CLOSE.items():
        assert np.abs(found[name] - expected[name]).max() < limit, name
    assert (found["logits"].argmax(axis=-1) == expected["logits"].argmax(axis=-1)).all()


@pytest.mark.parametrize("name", ["mlx_vlm", "transformers"])
def test_agrees_with_stored_answers(ours: Callable[[Case], tuple[Path, Ours]], name: str) -> None:
    golden = json.loads((GOLDENS / f"{name}.json").read_text())
    cases = {case.name: case for case in CASES if name in case.oracles}
    assert {key.split("/")[0] for key in golden["answers"]} == set(cases)
    for key, answer in golden["answers"].items():
        case, length = key.split("/")
        own = ours(cases[case])[1].run(prompt(cases[case], int(length)))
        assert differences(summary(own), answer) == [], f"{key}, {golden['versions']}"
