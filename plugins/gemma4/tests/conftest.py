"""Tiny Gemma 4 pairs, written and loaded once per session, and the oracle helpers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "oracles"))

from gemma4_oracles.ours import Ours

from mlx_spec_gemma4.tiny import write_tiny

MakePair = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="session")
def pair_dirs(tmp_path_factory: pytest.TempPathFactory) -> MakePair:
    """(target, drafter) directories of a variant; written once, so never to be changed by a test."""
    written: dict[str, tuple[Path, Path]] = {}

    def make(variant: str = "E", seed: int = 1, **options: Any) -> tuple[Path, Path]:
        key = json.dumps([variant, seed, options], sort_keys=True)
        if key not in written:
            written[key] = write_tiny(tmp_path_factory.mktemp(variant), variant, seed, **options)
        return written[key]

    return make


@pytest.fixture(scope="session")
def loaded(pair_dirs: MakePair) -> Callable[..., Ours]:
    """A loaded pair of a variant."""
    kept: dict[str, Ours] = {}

    def make(variant: str = "E", seed: int = 1, **options: Any) -> Ours:
        key = json.dumps([variant, seed, options], sort_keys=True)
        if key not in kept:
            kept[key] = Ours(*pair_dirs(variant, seed, **options))
        return kept[key]

    return make


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """A pair of its own whose config.json can be edited: edited(variant, target={...}, drafter={...}, **options).

    Keys are dotted paths; a value of `...` removes the key.
    """

    def make(
        variant: str = "E",
        *,
        target: dict[str, Any] | None = None,
        drafter: dict[str, Any] | None = None,
        **options: Any,
    ) -> tuple[Path, Path]:
        dirs = write_tiny(tmp_path / variant, variant, seed=2, **options)
        for path, changes in zip(dirs, (target, drafter), strict=True):
            _edit(path / "config.json", changes or {})
        return dirs

    return make


def _edit(file: Path, changes: dict[str, Any]) -> None:
    config = json.loads(file.read_text())
    for dotted, value in changes.items():
        *parents, key = dotted.split(".")
        section = config
        for parent in parents:
            section = section[parent]
        if value is ...:
            section.pop(key, None)
        else:
            section[key] = value
    file.write_text(json.dumps(config))
