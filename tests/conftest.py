"""Where things are, for tests that look at the workspace as files."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root() -> Path:
    """The workspace."""
    return Path(__file__).resolve().parent.parent
