"""Pairs built in memory from tiny checkpoints and scripted drafters, and mlx-lm's own greedy reply to compare with."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import tinymodels

from mlx_spec.checkpoint import read_config
from mlx_spec.costs import load_costs
from mlx_spec.generic_target import GenericTarget
from mlx_spec.models import Drafter, Target
from mlx_spec.pair import Pair, Plan
from mlx_spec.types import ModelRef

folder: Path | None = None  # where the checkpoints are written: this session's, set by conftest


@cache
def tiny_target(name: str = "llama", seed: int = 3) -> Target:
    """A tiny random target, written once per session in the real layout and loaded by core."""
    config = tinymodels.CONFIGS[name.removesuffix("_kv32")] | ({"head_dim": 32} if name.endswith("_kv32") else {})
    path = tinymodels.write_model(folder / f"{name}-{seed}", config, seed=seed)
    return GenericTarget.load(ModelRef(name, path, read_config(path)))


def make_pair(
    target: Target, drafter: Drafter | None, block_size: int = 4, kv_bits: int | None = None, prefill_step: int = 2048
) -> Pair:
    """A pair without probe and without files of its own."""
    plan = Plan(
        requested=drafter.kind if drafter else "none",
        active=drafter is not None,
        block_size=block_size,
        block_size_from="test",
        reason="test",
        kv_bits=kv_bits,
        kv_group_size=32,
        prefill_step=prefill_step,
    )
    pair = Pair(target, drafter, None, plan, target.ref)
    pair.costs = load_costs("")
    return pair


def mlx_lm_greedy(target: Target, prompt: list[int], count: int) -> list[int]:
    """The reply of mlx-lm's own generate_step at temperature 0, `count` tokens, no end id."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    steps = generate_step(mx.array(prompt), target.model, max_tokens=count)
    return [int(token) for token, _ in steps]
