"""The hooks of the Gemma 4 plugin. Nothing heavy is imported before a hook needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_spec.hookspecs import hookimpl

if TYPE_CHECKING:
    from mlx_spec.errors import Finding
    from mlx_spec.head_stages import Stage
    from mlx_spec.models import Drafter, Target
    from mlx_spec.registry import Register
    from mlx_spec.types import DrafterCard, ModelRef

TARGET_TYPES = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
ASSISTANT_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
KIND = "mtp"
DEMO = Path(__file__).parent / "demo"


def detect(ref: ModelRef) -> DrafterCard:
    """The card of an assistant directory, from its config.json."""
    from .config import assistant_card

    return assistant_card(ref)


@hookimpl
def spec_register(register: Register) -> None:
    """Claim the Gemma 4 targets and their assistants."""
    for model_type in TARGET_TYPES:
        register.target(model_type)
    register.drafter(KIND, model_types=ASSISTANT_TYPES, detect=detect)
    register.demo("gemma4 on Python source", DEMO / "target", DEMO / "drafter")
    register.tiny("gemma4", "mlx_spec_gemma4.tiny:write_tiny")


@hookimpl
def spec_load_target(ref: ModelRef, config: Mapping[str, object]) -> Target | None:
    """Load a Gemma 4 text stack; towers for other media are dropped."""
    if config.get("model_type") not in TARGET_TYPES:
        return None
    from .target import Gemma4Target

    return Gemma4Target.load(ref, config)


@hookimpl
def spec_model_classes(ref: ModelRef, config: Mapping[str, object]) -> tuple[type, type] | None:
    """What a Gemma 4 text stack is built from, flat or wrapped."""
    if config.get("model_type") not in TARGET_TYPES:
        return None
    from .config import target_config
    from .weights import target_classes

    return target_classes(target_config(config, ref.path), wrapped="text_config" in config)(dict(config))


@hookimpl
def spec_check_prompt(ref: ModelRef, config: Mapping[str, object], tokens: Sequence[int]) -> None:
    """Refuse placeholders for other media."""
    if config.get("model_type") not in TARGET_TYPES:
        return
    from .config import media_ids, refuse_media

    refuse_media(media_ids(config), tokens)


@hookimpl
def spec_load_drafter(ref: ModelRef, card: DrafterCard, target: Target) -> Drafter | None:
    """Load an assistant for `target`."""
    if card.model_type not in ASSISTANT_TYPES:
        return None
    from .drafter import Gemma4Drafter

    return Gemma4Drafter.load(ref, card, target)


@hookimpl
def spec_inspect_head(target: ModelRef, drafter: ModelRef, card: DrafterCard) -> list[Stage] | None:
    """What `spec inspect` says of an assistant's shapes, norms and quantisation."""
    if card.model_type not in ASSISTANT_TYPES:
        return None
    from .assistant_stages import assistant_stages

    return assistant_stages(target, drafter)


@hookimpl
def spec_validate_pair(target: ModelRef, drafter: ModelRef, card: DrafterCard) -> list[Finding] | None:
    """Findings about a pair with an assistant, from config.json and tensor headers."""
    if card.model_type not in ASSISTANT_TYPES:
        return None
    from .validate import validate

    return validate(target, drafter)
