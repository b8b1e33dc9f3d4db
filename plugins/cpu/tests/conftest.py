"""The library under test; without one only the tests of its absence run, and the header says so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mlx_spec_cpu.native import ready

AVAILABLE, STATE = ready()
NEEDS_LIBRARY = (
    "test_linear.py",
    "test_columns.py",
    "test_recipe_rows.py",
    "test_inputs.py",
    "test_pool.py",
    "test_norm.py",
    "test_models.py",
    "test_attention.py",
    "test_packed_attention.py",
    "test_gated_delta.py",
    "test_layers.py",
    "test_gemma_layers.py",
    "test_activation.py",
    "test_convolution.py",
    "test_rope.py",
    "test_embedding.py",
)
collect_ignore = [] if AVAILABLE else list(NEEDS_LIBRARY)


def pytest_report_header() -> str:
    return f"mlx-spec-cpu: {STATE}" + ("" if AVAILABLE else "; its kernels are not tested")


@pytest.fixture
def library() -> Iterator[Any]:
    """The library; kernels and threads are set back afterwards."""
    from mlx_spec_cpu.native import library as load

    module = load()
    kernels, threads = module.kernels(), module.threads()
    yield module
    module.use_kernels(kernels)
    module.set_threads(threads)
