"""Tiny Qwen 3.5 checkpoints, written once per session, and the oracle helpers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "oracles"))

from mlx_spec_qwen35.tiny import write_tiny


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
