"""Experts in half precision on a CPU: a clear error without kernels, a head that loads before it has its own."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from mlx_spec import load
from mlx_spec.api import generate
from mlx_spec.errors import LoadError
from mlx_spec_qwen35 import mtp_reading
from mlx_spec_qwen35.tiny import write_tiny


def written(out: Path, dtype: str) -> tuple[str, str]:
    target, drafter = write_tiny(out, seed=1, variant="moe", drafter="own", dtype=dtype)
    return str(target), str(drafter)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_without_a_kernel_it_is_said_what_to_do(tmp_path: Path, dtype: str) -> None:
    target, _ = written(tmp_path, dtype)
    with pytest.raises(LoadError, match=rf"experts of .*found {dtype} weights on a CPU.*--dtype float32") as raised:
        load(target)
    assert raised.value.code == "L66"
    assert generate(load(target, dtype="float32"), [3, 4, 5], max_tokens=3, ignore_eos=True).token_ids


def test_a_head_that_cannot_run_yet_is_fed_the_usual_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> dict[object, float]:
        raise RuntimeError("[GatherMM::eval] Currently only supports float32.")

    target, drafter = written(tmp_path, "float32")
    monkeypatch.setattr(mtp_reading, "measure", refuse)
    with caplog.at_level(logging.WARNING, "mlx_spec.load"):
        pair = load(target, drafter, "mtp", probe=False)
    assert pair.drafter is not None and "was not measured" in caplog.text
