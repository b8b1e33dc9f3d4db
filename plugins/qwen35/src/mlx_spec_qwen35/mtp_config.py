"""What config.json says about an MTP head, in a drafter directory or inside a target's own checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_spec.types import DrafterCard, ModelRef

from .config import TextConfig, refuse, target_config
from .mtp_files import EXTERNAL, find_head, norm_form

KIND = "mtp"
MOST_LAYERS = 8
EXTRA_WIDTH = 2
"""L of a head that declares none is its depth and this, as its published conversions declare: two drafts at depth 1."""
QUANTISATION_KEYS = ("mtplx_mtp_quantization", "quantization", "quantization_config")


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A head's configuration.

    Attributes:
        text: the text stack it was trained on; its layers have the geometry of that stack's full-attention ones.
        section: the same as written in config.json.
        depth: layers, as declared (1 when it says nothing).
        block_size: L declared, None when it declares none.
        quantisation: how packed matrices are said to be stored, {} when nothing is said.
    """

    text: TextConfig
    section: Mapping[str, Any]
    depth: int
    block_size: int | None
    quantisation: Mapping[str, Any]


def head_config(config: Mapping[str, Any], path: Path) -> HeadConfig:
    """Read config.json of a head or of the checkpoint it is in. LoadError names key, found and expected."""
    external = config.get("model_type") == EXTERNAL
    if external and not isinstance(config.get("text_config"), Mapping):
        refuse(path, "text_config", repr(config.get("text_config")), "an object: the text_config of its target")
    text = target_config(config, path)
    inner = config.get("text_config")
    section: Mapping[str, Any] = inner if isinstance(inner, Mapping) else config
    width = config.get("block_size")
    if external and width is not None and (type(width) is not int or width < 2):
        refuse(path, "block_size", repr(width), "a whole number of at least 2 (L, anchor counted)")
    packed: Mapping[str, Any] = next(
        (config[key] for key in QUANTISATION_KEYS if isinstance(config.get(key), Mapping)), {}
    )
    depth = section.get("mtp_num_hidden_layers")
    return HeadConfig(text, section, 1 if depth is None else int(depth), width if external else None, packed)


def head_card(ref: ModelRef) -> DrafterCard | None:
    """The card of the head in a directory, None when it has none; says how its norms are stored and why."""
    files = find_head(ref)
    if files is None:
        return None
    config = head_config(ref.config, ref.path)
    norms = norm_form(files)
    extra: dict[str, object] = {
        "place": files.place,
        "layers": files.depth,
        "norms": f"{norms.form}: {norms.reason}",
    }
    width = config.block_size or max(config.depth, files.depth) + EXTRA_WIDTH
    return DrafterCard(KIND, ref.model_type, block_size=width, vocab_size=config.text.vocab_size, extra=extra)
