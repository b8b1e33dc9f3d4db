"""The hooks of the MiMo plugin. Nothing heavy is imported before a hook needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mlx_spec import hookimpl

if TYPE_CHECKING:
    from mlx_spec import Drafter, DrafterCard, Finding, ModelRef, Register, Target

MODEL_TYPE = "mimo"
KIND = "mtp"


def detect(ref: ModelRef) -> DrafterCard | None:
    """The card of the MTP layer in a MiMo directory, None when it has none (converted ones do not)."""
    from .validate import head_card

    return head_card(ref)


@hookimpl
def spec_register(register: Register) -> None:
    """Claim MiMo targets, and the head some of their directories carry."""
    register.target(MODEL_TYPE)
    register.drafter(KIND, model_types=(MODEL_TYPE,), detect=detect)
    register.tiny("mimo", "mlx_spec_mimo.tiny:write_tiny")


@hookimpl
def spec_load_target(ref: ModelRef, config: Mapping[str, object]) -> Target | None:
    """mlx-lm's MiMo, with the tap its head reads."""
    if config.get("model_type") != MODEL_TYPE:
        return None
    from .target import MimoTarget

    return MimoTarget.load(ref, config)


@hookimpl
def spec_load_drafter(ref: ModelRef, card: DrafterCard, target: Target) -> Drafter | None:
    """The MTP layer in `ref`, which may be the target's own directory."""
    if card.model_type != MODEL_TYPE or card.kind != KIND:
        return None
    from .drafter import MimoDrafter

    return MimoDrafter.load(ref, card, target)


@hookimpl
def spec_validate_pair(target: ModelRef, drafter: ModelRef, card: DrafterCard) -> list[Finding] | None:
    """Findings about a head and the target it is to draft for, from config.json and tensor headers."""
    if card.model_type != MODEL_TYPE or card.kind != KIND:
        return None
    from .validate import validate

    return validate(target, drafter)
