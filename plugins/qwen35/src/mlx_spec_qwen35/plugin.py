"""The hooks of the Qwen plugin. Nothing heavy is imported before a hook needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mlx_spec.hookspecs import hookimpl

if TYPE_CHECKING:
    from mlx_spec.models import Target
    from mlx_spec.registry import Register
    from mlx_spec.types import ModelRef

TARGET_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")


@hookimpl
def spec_register(register: Register) -> None:
    """Claim the Qwen 3.5, 3.6 and 3.8 targets: all of them declare one of these model_types."""
    for model_type in TARGET_TYPES:
        register.target(model_type)
    register.tiny("qwen35", "mlx_spec_qwen35.tiny:write_tiny")


@hookimpl
def spec_load_target(ref: ModelRef, config: Mapping[str, object]) -> Target | None:
    """Load a Qwen 3.5 text stack; the vision tower and the heads beside it are dropped."""
    if config.get("model_type") not in TARGET_TYPES:
        return None
    from .target import Qwen35Target

    return Qwen35Target.load(ref, config)
