"""Tiny Qwen 3.5 checkpoints, written and loaded once per session, and the oracle helpers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "oracles"))

from qwen35_oracles.ours import load

from mlx_spec_qwen35.target import Qwen35Target
from mlx_spec_qwen35.tiny import write_tiny

SMALL = {"num_hidden_layers": 5, "full_attention_interval": 2}  # the last layer is a linear one


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Directory of a small target; written once, so never to be changed by a test."""
    written: dict[str, Path] = {}

    def make(seed: int = 1, **options: Any) -> Path:
        key = json.dumps([seed, options], sort_keys=True)
        if key not in written:
            written[key] = write_tiny(tmp_path_factory.mktemp("qwen35"), seed, **{**SMALL, **options})[0]
        return written[key]

    return make


@pytest.fixture(scope="session")
def loaded(checkpoint: Callable[..., Path]) -> Callable[..., Qwen35Target]:
    """A loaded small target."""
    kept: dict[Path, Qwen35Target] = {}

    def make(seed: int = 1, **options: Any) -> Qwen35Target:
        path = checkpoint(seed, **options)
        if path not in kept:
            kept[path] = load(path)
        return kept[path]

    return make


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint of its own whose config.json was edited: edited({"text_config.head_dim": 8}, **options).

    Keys are dotted paths; a value of `...` removes the key.
    """

    def make(changes: dict[str, Any], **options: Any) -> Path:
        path, _ = write_tiny(tmp_path, 2, **{**SMALL, **options})
        config = json.loads((path / "config.json").read_text())
        for dotted, value in changes.items():
            *parents, key = dotted.split(".")
            section = config
            for parent in parents:
                section = section[parent]
            if value is ...:
                section.pop(key, None)
            else:
                section[key] = value
        (path / "config.json").write_text(json.dumps(config))
        return path

    return make


@pytest.fixture(scope="session")
def mtp_dirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """(target, drafter) directories; written once per set of options, so never to be changed by a test."""
    written: dict[str, tuple[Path, Path]] = {}

    def make(seed: int = 1, **options: Any) -> tuple[Path, Path]:
        key = json.dumps([seed, options], sort_keys=True)
        if key not in written:
            target, drafter = write_tiny(tmp_path_factory.mktemp("qwen35"), seed, **options)
            assert drafter is not None
            written[key] = target, drafter
        return written[key]

    return make
