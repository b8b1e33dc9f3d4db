"""The hooks of the Qwen plugin. Nothing heavy is imported before a hook needs it."""

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

DEMO = Path(__file__).parent / "demo" / "model"
"""A small trained checkpoint that carries its own head."""

TARGET_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")

HEAD_OPTIONS = ("mtp_norms", "mtp_hidden", "mtp_concat", "draft_head_bits", "draft_vocab", "draft_vocab_size")
HEAD_TYPES = ("qwen3_5_mtp", *TARGET_TYPES)
"""model_types of directories that may hold an MTP head."""
DFLASH = "dflash"


def detect_head(ref: ModelRef) -> DrafterCard | None:
    """The card of an MTP head: in a directory of its own, or inside a whole checkpoint that kept it."""
    from .mtp_config import head_card

    return head_card(ref) if detect_dflash(ref) is None else None


def detect_dflash(ref: ModelRef) -> DrafterCard | None:
    """The card of a DFlash or DFlash2 directory, whatever its model_type; None for other ones."""
    from .dflash_config import dflash_card

    return dflash_card(ref)


@hookimpl
def spec_register(register: Register) -> None:
    """Claim the Qwen 3.5, 3.6 and 3.8 targets, which declare one of these types, and their drafters."""
    for model_type in TARGET_TYPES:
        register.target(model_type)
    register.drafter("mtp", model_types=HEAD_TYPES, detect=detect_head, options=HEAD_OPTIONS)
    register.drafter(DFLASH, detect=detect_dflash)
    register.demo("qwen35 on Python source", DEMO, DEMO)
    register.tiny("qwen35", "mlx_spec_qwen35.tiny:write_tiny")


@hookimpl
def spec_load_target(ref: ModelRef, config: Mapping[str, object]) -> Target | None:
    """Load a Qwen 3.5 text stack; the vision tower and the heads beside it are dropped."""
    if config.get("model_type") not in TARGET_TYPES:
        return None
    from .target import Qwen35Target

    return Qwen35Target.load(ref, config)


@hookimpl
def spec_model_classes(ref: ModelRef, config: Mapping[str, object]) -> tuple[type, type] | None:
    """What a Qwen 3.5 text stack is built from, flat or wrapped."""
    if config.get("model_type") not in TARGET_TYPES:
        return None
    from .config import target_config
    from .weights import target_classes

    return target_classes(target_config(config, ref.path))(dict(config))


@hookimpl
def spec_check_prompt(ref: ModelRef, config: Mapping[str, object], tokens: Sequence[int]) -> None:
    """Refuse placeholders for images or video."""
    if config.get("model_type") not in TARGET_TYPES:
        return
    from .config import media_ids, refuse_media

    refuse_media(media_ids(config), tokens)


@hookimpl
def spec_load_drafter(ref: ModelRef, card: DrafterCard, target: Target) -> Drafter | None:
    """The drafter in `ref`: an MTP head, maybe in the target's own directory, or a DFlash network."""
    if card.kind == DFLASH:
        from .dflash import DFlashDrafter

        return DFlashDrafter.load(ref, card, target)
    if card.kind != "mtp" or card.model_type not in HEAD_TYPES:
        return None
    from .mtp import MtpDrafter

    return MtpDrafter.load(ref, card, target)


@hookimpl
def spec_inspect_head(target: ModelRef, drafter: ModelRef, card: DrafterCard) -> list[Stage] | None:
    """What `spec inspect` says of an MTP head's shapes, norms and quantisation."""
    if card.kind != "mtp" or card.model_type not in HEAD_TYPES:
        return None
    from .mtp_stages import head_stages

    return head_stages(target, drafter, card)


@hookimpl
def spec_split_drafter(ref: ModelRef, out: Path, options: Mapping[str, object]) -> Path | None:
    """The MTP head of a checkpoint as a directory of its own, in the layout of mlx-vlm's drafters."""
    if ref.model_type not in TARGET_TYPES:
        return None
    from .split import split_head

    return split_head(ref, out, options)


@hookimpl
def spec_validate_pair(target: ModelRef, drafter: ModelRef, card: DrafterCard) -> list[Finding] | None:
    """Findings about one of these drafters and its target, from config.json and tensor headers."""
    if card.kind == "mtp" and card.model_type in HEAD_TYPES:
        from .mtp_validate import validate as validate_head

        return validate_head(target, drafter, card)
    from .dflash_validate import refuse_dspark, validate

    if card.kind == DFLASH and "layout" in card.extra:
        return validate(target, drafter, TARGET_TYPES)
    return refuse_dspark(drafter) if card.kind == "full-model" else None
