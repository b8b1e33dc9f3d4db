"""The fields of config.json this family reads, checked by type.

Checked against mlx-lm 0.32.2 `models/qwen3_5.py` (names and defaults) and transformers 5.24
`configuration_qwen3_5.py`, `configuration_qwen3_5_moe.py`. Keys not listed here are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mlx_spec.errors import LoadError
from mlx_spec.intake import refuse_placeholders

FULL, LINEAR = "full_attention", "linear_attention"
MEDIA_KEYS: Mapping[str, tuple[str, int]] = {
    "image": ("image_token_id", 248056),
    "video": ("video_token_id", 248057),
}
"""Kind of input -> key of its placeholder id, and the id of checkpoints that leave the key out."""
M = TypeVar("M", bound=BaseModel)


class Rope(BaseModel):
    """Rotation of the full-attention layers; further keys of scaled rope types are kept as they are.

    Text positions are equal on all three axes of `mrope_section`, which makes the rotation a plain one.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    rope_type: str = "default"
    rope_theta: float = Field(default=100000.0, gt=0)
    partial_rotary_factor: float = Field(default=0.25, gt=0, le=1)
    mrope_section: list[int] = [11, 11, 10]
    mrope_interleaved: Literal[True] = True

    @model_validator(mode="before")
    @classmethod
    def _one_spelling(cls, values: Any) -> Any:
        if isinstance(values, dict) and "type" in values:
            values = {"rope_type": values["type"], **values}
            del values["type"]
        return values


class TextConfig(BaseModel):
    """A Qwen 3.5 text stack. Attribute names are those of config.json."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model_type: str = "qwen3_5_text"
    hidden_size: int = Field(default=4096, gt=0)
    intermediate_size: int = Field(default=14336, gt=0)
    num_hidden_layers: int = Field(default=32, gt=0)
    num_attention_heads: int = Field(default=32, gt=0)
    num_key_value_heads: int = Field(default=8, gt=0)
    head_dim: int = Field(gt=0)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    vocab_size: int = Field(default=151936, gt=0)
    linear_num_value_heads: int = Field(default=64, gt=0)
    linear_num_key_heads: int = Field(default=16, gt=0)
    linear_key_head_dim: int = Field(default=192, gt=0)
    linear_value_head_dim: int = Field(default=128, gt=0)
    linear_conv_kernel_dim: int = Field(default=4, gt=1)
    full_attention_interval: int = Field(default=4, gt=0)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attn_output_gate: Literal[True] = True
    output_gate_type: Literal["silu", "swish"] = "silu"
    hidden_act: Literal["silu"] = "silu"
    num_experts: int = Field(default=0, ge=0)
    num_experts_per_tok: int = Field(default=0, ge=0)
    moe_intermediate_size: int = Field(default=0, ge=0)
    shared_expert_intermediate_size: int = Field(default=0, ge=0)
    norm_topk_prob: bool = True
    decoder_sparse_step: Literal[1] = 1
    rope_parameters: Rope = Rope()
    mtp_num_hidden_layers: int = Field(default=0, ge=0)
    mtp_use_dedicated_embeddings: bool = False
    max_position_embeddings: int = Field(default=131072, gt=0)

    @property
    def layer_types(self) -> tuple[str, ...]:
        """One of FULL and LINEAR per layer."""
        every = self.full_attention_interval
        return tuple(LINEAR if (i + 1) % every else FULL for i in range(self.num_hidden_layers))

    @property
    def key_dim(self) -> int:
        """Channels of the keys of a linear layer, Hk * Dk."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Channels of the values of a linear layer, Hv * Dv."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels C of the convolution: queries, keys, values."""
        return 2 * self.key_dim + self.value_dim

    @property
    def rotary_dims(self) -> int:
        """Dimensions of a head that are rotated, from the front."""
        return int(self.head_dim * self.rope_parameters.partial_rotary_factor)

    def mlx_lm_args(self) -> dict[str, Any]:
        """The spelling mlx-lm's TextModelArgs reads."""
        values = self.model_dump()
        rope = values["rope_parameters"]
        rope["type"] = rope.pop("rope_type")
        return values


# -- reading -------------------------------------------------------------------------------------------


def target_config(config: Mapping[str, Any], path: Path) -> TextConfig:
    """The text stack of a target's config.json, flat or in text_config. LoadError names key and values."""
    wrapped = config.get("text_config") is not None
    section = _object(config["text_config"], path, "text_config") if wrapped else dict(config)
    prefix = "text_config." if wrapped else ""
    if wrapped:
        # Wrappers of some converters hold these at the top only; the text stack's own value wins.
        for key in ("vocab_size", "tie_word_embeddings"):
            if section.get(key) is None and config.get(key) is not None:
                section[key] = config[key]
    values = {key: value for key, value in section.items() if value is not None}
    _fold_rope(values, path, prefix)
    _fold_layer_types(values, path, prefix)
    if "head_dim" not in values:
        hidden, heads = values.get("hidden_size", 4096), values.get("num_attention_heads", 32)
        if type(hidden) is int and type(heads) is int and heads > 0:
            values["head_dim"] = hidden // heads
    text = _validated(TextConfig, values, path, prefix)
    _check(text, path, prefix)
    return text


def media_ids(config: Mapping[str, Any]) -> dict[int, str]:
    """Placeholder id -> "image" or "video"; empty for a checkpoint that never had a tower."""
    found = {}
    for kind, (key, default) in MEDIA_KEYS.items():
        value = config.get(key, default if config.get("vision_config") else None)
        if type(value) is int:
            found[value] = kind
    return found


def refuse_media(media: Mapping[int, str], tokens: Sequence[int]) -> None:
    """UsageError for a prompt with one of the placeholders in `media` (id -> kind)."""
    refuse_placeholders(media, tokens, code="QW02")


def refuse(path: Path, key: str, found: object, expected: str) -> NoReturn:
    """LoadError about one key of config.json."""
    raise LoadError(
        f"{key} in config.json of {path}",
        found=found,
        expected=expected,
        next_step="Correct config.json, or download it again from where the weights came from",
        code="QW01",
    )


# -- inner ---------------------------------------------------------------------------------------------


def _fold_rope(values: dict[str, Any], path: Path, prefix: str) -> None:
    """Older spellings beside `rope_parameters`: rope_theta and partial_rotary_factor at its own level."""
    rope = _object(values.get("rope_parameters", {}), path, f"{prefix}rope_parameters")
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in values and key not in rope:
            rope[key] = values[key]
    values["rope_parameters"] = {key: value for key, value in rope.items() if value is not None}


def _fold_layer_types(values: dict[str, Any], path: Path, prefix: str) -> None:
    """`layer_types` says per layer what full_attention_interval says in one number, all that mlx-lm reads."""
    kinds = values.pop("layer_types", None)
    if kinds is None:
        return
    key = f"{prefix}layer_types"
    if not isinstance(kinds, list) or not all(kind in (FULL, LINEAR) for kind in kinds):
        refuse(path, key, _shown(kinds), f"a list of {FULL} and {LINEAR}")
    first = kinds.index(FULL) + 1 if FULL in kinds else len(kinds) + 1
    interval = values.setdefault("full_attention_interval", first)
    if type(interval) is not int or interval < 1:
        return  # refused by type
    layers = values.get("num_hidden_layers", len(kinds))
    wanted = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers if type(layers) is int else 0)]
    if kinds != wanted:
        where = next(
            (i for i, (a, b) in enumerate(zip(kinds, wanted, strict=False)) if a != b), min(len(kinds), len(wanted))
        )
        found = f"{len(kinds)} entries, {kinds[where] if where < len(kinds) else 'none'} at {where}"
        refuse(path, key, found, f"{layers} entries, {FULL} at every {interval}th (full_attention_interval)")


def _check(text: TextConfig, path: Path, prefix: str) -> None:
    """What types alone cannot say."""
    for many, few in (
        ("linear_num_value_heads", "linear_num_key_heads"),
        ("num_attention_heads", "num_key_value_heads"),
    ):
        if getattr(text, many) % getattr(text, few):
            refuse(path, prefix + many, getattr(text, many), f"a multiple of {few} ({getattr(text, few)})")
    if text.rotary_dims < 2 or text.rotary_dims % 2:
        key = f"{prefix}rope_parameters.partial_rotary_factor"
        refuse(path, key, f"{text.rotary_dims} of {text.head_dim} dimensions", "an even number of rotated dimensions")
    if text.num_experts:
        for key in ("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"):
            if not getattr(text, key):
                refuse(path, prefix + key, "nothing", "a positive integer, since num_experts is set")
        if text.num_experts_per_tok > text.num_experts:
            refuse(path, f"{prefix}num_experts_per_tok", text.num_experts_per_tok, f"at most {text.num_experts}")


def _object(value: object, path: Path, key: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        refuse(path, key, _shown(value), "an object")
    return dict(value)


def _validated(model: type[M], values: Mapping[str, Any], path: Path, prefix: str) -> M:
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        problem = error.errors()[0]
        key = prefix + ".".join(str(part) for part in problem["loc"])
        found = "nothing" if problem["type"] == "missing" else _shown(problem["input"])
        refuse(path, key, found, _expected(problem["msg"]))


def _expected(text: str) -> str:
    """Pydantic's sentence as what was expected."""
    text = text.removeprefix("Input should be ")
    return "a value" if text == "Field required" else text


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
