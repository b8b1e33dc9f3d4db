"""A tiny MiMo directory, written once per set of options, and the pair loaded from it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the reference beside the tests

import mlx_spec
from mlx_spec_mimo.tiny import write_tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """folder(seed=1, **options): a MiMo directory, never to be changed by a test."""

    @cache
    def written(options: tuple[tuple[str, Any], ...]) -> Path:
        return write_tiny(tmp_path_factory.mktemp("mimo"), **dict(options))[0]

    return lambda **options: written(tuple(sorted({"seed": 1, **options}.items())))


@pytest.fixture(scope="session")
def loaded(folder: Callable[..., Path]) -> Callable[..., mlx_spec.Pair]:
    """loaded(**load options): the seed-1 target that drafts with its own head, unproven."""

    @cache
    def load(**options: Any) -> mlx_spec.Pair:
        return mlx_spec.load(str(folder()), kind="mtp", probe=False, **options)

    return load
