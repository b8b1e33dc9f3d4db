"""The fields of config.json this family reads, checked by type, with both published spellings.

Checked against mlx-lm 0.32.2 `models/gemma4_text.py` (names and defaults) and transformers 5.24
`configuration_gemma4.py` (`per_layer_config`, assistant keys). Keys not listed here are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from mlx_spec.errors import LoadError
from mlx_spec.intake import refuse_placeholders
from mlx_spec.types import DrafterCard, ModelRef

FULL, SLIDING = "full_attention", "sliding_attention"
LayerType = Literal["full_attention", "sliding_attention"]

# What a checkpoint that leaves the whole `rope_parameters` out was trained with.
DEFAULT_ROPE: Mapping[str, Mapping[str, Any]] = {
    FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}
# Where the unified models' defaults differ: they have no per-layer inputs and share no K/V.
UNIFIED_DEFAULTS: Mapping[str, Any] = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 262144,
}
MEDIA_KEYS = {"image": "image_token_id", "audio": "audio_token_id", "video": "video_token_id"}
# As mlx-lm 0.32.2 `models/rope_utils.py` reads them.
SCALING_KEYS = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "short_factor",
    "long_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip
_LAYER_OVERRIDES = ("head_dim", "num_key_value_heads")
M = TypeVar("M", bound=BaseModel)


class Rope(BaseModel):
    """Rotation of one layer type; further keys of other rope types are kept as they are."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    rope_type: str = "default"
    rope_theta: float = Field(gt=0)
    partial_rotary_factor: float = Field(default=1.0, gt=0, le=1)

    @property
    def rotation(self) -> dict[str, Any]:
        """What decides where a position is rotated to; mlx-lm reads the scaling keys of scaled types only."""
        scaled = SCALING_KEYS if self.rope_type != "default" else ()
        keys = ("rope_type", "rope_theta", "partial_rotary_factor", *scaled)
        values = self.model_dump()
        return {key: values[key] for key in keys if values.get(key) is not None and (key, values[key]) != ("factor", 1)}


class TextConfig(BaseModel):
    """A Gemma 4 text stack, target or assistant. Attribute names are those of config.json."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model_type: str = "gemma4_text"
    hidden_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    num_global_key_value_heads: int | None = Field(default=None, gt=0)
    head_dim: int = Field(default=256, gt=0)
    global_head_dim: int = Field(default=512, gt=0)
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = Field(default=20, ge=0)
    use_double_wide_mlp: bool = True
    hidden_size_per_layer_input: int = Field(default=256, ge=0)
    vocab_size: int = Field(default=262144, gt=0)
    vocab_size_per_layer_input: int = Field(default=262144, ge=0)
    sliding_window: int = Field(default=512, gt=0)
    layer_types: list[LayerType]
    rope_parameters: dict[str, Rope]
    rope_traditional: bool = False
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    final_logit_softcapping: float | None = 30.0
    tie_word_embeddings: bool = True
    enable_moe_block: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None
    use_bidirectional_attention: str | None = None
    max_position_embeddings: int = Field(default=131072, gt=0)
    pad_token_id: int = 0
    attention_bias: Literal[False] = False
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"

    @field_validator("final_logit_softcapping")
    @classmethod
    def _no_cap(cls, value: float | None) -> float | None:
        return value or None  # 0 means none; dividing by it would give NaN

    @field_validator("layer_types")
    @classmethod
    def _one_per_layer(cls, value: list[str], info: ValidationInfo) -> list[str]:
        layers = info.data.get("num_hidden_layers")
        if layers is not None and len(value) != layers:
            raise ValueError(f"one entry per layer, {layers} in all (found {len(value)})")
        return value

    @property
    def first_shared(self) -> int:
        """Layers from this one on use the K/V of an earlier layer."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    @property
    def sources(self) -> dict[str, int]:
        """Layer type -> the last layer of that type that owns its K/V."""
        return {kind: i for i, kind in enumerate(self.layer_types[: self.first_shared])}

    def width(self, layer_type: str) -> int:
        """Head width D of a layer type."""
        return self.global_head_dim if layer_type == FULL else self.head_dim

    def kv_heads(self, layer_type: str) -> int:
        """K/V heads of a layer type."""
        if layer_type == FULL and self.attention_k_eq_v and self.num_global_key_value_heads is not None:
            return self.num_global_key_value_heads
        return self.num_key_value_heads

    def mlx_lm_args(self) -> dict[str, Any]:
        """The flat spelling mlx-lm's ModelArgs reads."""
        return self.model_dump()


class AssistantConfig(BaseModel):
    """An assistant drafter's config.json."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model_type: str
    backbone_hidden_size: int = Field(gt=0)
    use_ordered_embeddings: bool = False
    num_centroids: int = Field(default=2048, gt=0)
    centroid_intermediate_top_k: int = Field(default=32, gt=0)
    tie_word_embeddings: bool = True
    block_size: int | None = Field(default=None, ge=2)
    quantization: dict[str, Any] | None = None
    text: TextConfig


# -- reading -------------------------------------------------------------------------------------------


def target_config(config: Mapping[str, Any], path: Path) -> TextConfig:
    """The text stack of a target's config.json. Raises LoadError naming the key, found and expected."""
    wrapped = "text_config" in config
    if not wrapped and not str(config.get("model_type", "")).endswith("_text"):
        refuse(path, "text_config", "nothing", "an object that describes the text stack")
    section = _object(config["text_config"], path, "text_config") if wrapped else dict(config)
    if wrapped:
        # Wrappers of some converters hold these at the top only; the text stack's own value wins.
        for key in ("vocab_size", "tie_word_embeddings"):
            if section.get(key) is None and config.get(key) is not None:
                section[key] = config[key]
    unified = str(config.get("model_type", "")).startswith("gemma4_unified")
    text = _text(section, path, "text_config." if wrapped else "", UNIFIED_DEFAULTS if unified else {})
    _check_target(text, path)
    return text


def assistant_config(config: Mapping[str, Any], path: Path) -> AssistantConfig:
    """An assistant's config.json. Raises LoadError naming the key, found and expected."""
    section = _object(config.get("text_config"), path, "text_config")
    if section.get("layer_types") is None:
        refuse(path, "text_config.layer_types", "nothing", "one layer type per drafter layer")
    defaults = {
        **UNIFIED_DEFAULTS,
        "sliding_window": 1024 if str(config.get("model_type", "")).startswith("gemma4_unified") else 512,
        "num_kv_shared_layers": section.get("num_hidden_layers"),
        "vocab_size_per_layer_input": 0,
        "final_logit_softcapping": None,
    }
    if not section.get("num_kv_shared_layers"):
        section.pop("num_kv_shared_layers", None)  # 0 or absent: every drafter layer reads shared K/V
    text = _text(section, path, "text_config.", defaults)
    flat = {key: value for key, value in config.items() if value is not None}
    return _validated(AssistantConfig, {**flat, "text": text}, path, "")


def assistant_card(ref: ModelRef) -> DrafterCard:
    """What an assistant directory declares; block_size is None when config.json has none."""
    config = assistant_config(ref.config, ref.path)
    return DrafterCard(
        kind="mtp",
        model_type=config.model_type,
        block_size=config.block_size,
        vocab_size=config.text.vocab_size,
        extra={
            "backbone_hidden_size": config.backbone_hidden_size,
            "use_ordered_embeddings": config.use_ordered_embeddings,
        },
    )


def media_ids(config: Mapping[str, Any]) -> dict[int, str]:
    """Placeholder id -> "image", "audio" or "video", as config.json names them."""
    return {config[key]: name for name, key in MEDIA_KEYS.items() if type(config.get(key)) is int}


def refuse_media(media: Mapping[int, str], tokens: Sequence[int]) -> None:
    """UsageError for a prompt with one of the placeholders in `media` (id -> kind)."""
    refuse_placeholders(media, tokens, code="GM05")


# -- inner ---------------------------------------------------------------------------------------------


def refuse(path: Path, key: str, found: object, expected: str) -> NoReturn:
    """LoadError about one key of config.json."""
    raise LoadError(
        f"{key} in config.json of {path}",
        found=found,
        expected=expected,
        next_step="Correct config.json, or download it again from where the weights came from",
        code="GM01",
    )


def _object(value: object, path: Path, key: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        refuse(path, key, _shown(value), "an object")
    return dict(value)


def _text(section: dict[str, Any], path: Path, prefix: str, defaults: Mapping[str, Any]) -> TextConfig:
    """One text section: null counts as absent except where null is a value of its own."""
    nullable = ("final_logit_softcapping",)
    values = {k: v for k, v in section.items() if v is not None or k in nullable}
    values = {**{k: v for k, v in defaults.items() if v is not None or k in nullable}, **values}
    _fill_layer_types(values)
    _fold_per_layer(values, path, prefix)
    values.setdefault("rope_parameters", {kind: dict(rope) for kind, rope in DEFAULT_ROPE.items()})
    if not values.get("global_head_dim", 512):
        values["global_head_dim"] = values.get("head_dim", 256)  # as mlx-lm reads null or 0
    text = _validated(TextConfig, values, path, prefix)
    for kind in dict.fromkeys(text.layer_types):
        if kind not in text.rope_parameters:
            refuse(path, f"{prefix}rope_parameters.{kind}", "nothing", "the rotation of every layer type in use")
    return text


def _fill_layer_types(values: dict[str, Any]) -> None:
    layers, pattern = values.get("num_hidden_layers"), values.pop("sliding_window_pattern", 5)
    if "layer_types" not in values and type(layers) is int and type(pattern) is int and pattern > 0:
        cycle = [SLIDING] * (pattern - 1) + [FULL]
        values["layer_types"] = [cycle[i % pattern] for i in range(layers)]


def _fold_per_layer(values: dict[str, Any], path: Path, prefix: str) -> None:
    """Turn `per_layer_config` into the flat keys; refuse what the flat keys cannot say or contradict."""
    raw = values.pop("per_layer_config", None)
    if raw is None:
        return
    key = f"{prefix}per_layer_config"
    kinds = values.get("layer_types")
    overrides = _object(raw, path, key)
    if not isinstance(kinds, list):
        refuse(path, f"{prefix}layer_types", _shown(kinds), "one layer type per layer")
    for kind in (SLIDING, FULL):
        rows = [_overrides(overrides.get(str(i), {}), path, f"{key}.{i}") for i, k in enumerate(kinds) if k == kind]
        merged = _same(rows, path, f"{key} of {kind} layers")
        if kind == FULL:
            _set_full(values, merged, path, prefix)
        elif any(merged[name] != values.get(name) for name in merged):
            refuse(
                path,
                f"{key} of {kind} layers",
                merged,
                f"the values of {prefix or 'the top level: '}{_LAYER_OVERRIDES}",
            )


def _overrides(value: object, path: Path, key: str) -> dict[str, Any]:
    row = _object(value, path, key)
    strange = sorted(set(row) - set(_LAYER_OVERRIDES))
    if strange:
        refuse(path, key, f"the key {strange[0]!r}", " and ".join(_LAYER_OVERRIDES) + " only")
    return row


def _same(rows: Iterable[dict[str, Any]], path: Path, key: str) -> dict[str, Any]:
    rows = list(rows)
    for row in rows:
        if row != rows[0]:
            refuse(path, key, f"{rows[0]} and {row}", "the same values in all of them")
    return rows[0] if rows else {}


def _set_full(values: dict[str, Any], row: dict[str, Any], path: Path, prefix: str) -> None:
    """Full-attention overrides as `global_head_dim` and `num_global_key_value_heads`."""
    width = row.get("head_dim", values.get("head_dim", 256))
    heads = row.get("num_key_value_heads")
    for name, value in (("global_head_dim", width), ("num_global_key_value_heads", heads)):
        flat = values.get(name)
        if flat is not None and value is not None and flat != value:
            refuse(path, f"{prefix}{name}", f"{flat}, while per_layer_config says {value}", "one value")
        if flat is None and value is not None:
            values[name] = value
    if heads is not None and not values.get("attention_k_eq_v") and heads != values.get("num_key_value_heads"):
        refuse(
            path,
            f"{prefix}per_layer_config num_key_value_heads",
            f"{heads} with attention_k_eq_v false",
            f"num_key_value_heads ({values.get('num_key_value_heads')})",
        )


def _check_target(text: TextConfig, path: Path) -> None:
    """What types alone cannot say about a target."""
    if not 0 < text.first_shared <= text.num_hidden_layers:
        refuse(path, "num_kv_shared_layers", text.num_kv_shared_layers, f"0 to {text.num_hidden_layers - 1}")
    orphan = next((k for k in text.layer_types[text.first_shared :] if k not in text.sources), None)
    if orphan:
        refuse(
            path,
            "num_kv_shared_layers",
            f"{text.num_kv_shared_layers}, leaving no {orphan} layer with K/V",
            "a source for every shared layer",
        )
    if text.use_bidirectional_attention == "all":
        refuse(
            path, "use_bidirectional_attention", "'all', an encoder", "null or 'vision': a model that generates text"
        )
    for kind in text.sources:
        if text.num_attention_heads % text.kv_heads(kind):
            refuse(
                path,
                "num_attention_heads",
                text.num_attention_heads,
                f"a multiple of {text.kv_heads(kind)} K/V heads ({kind})",
            )
    if text.enable_moe_block:
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            if not getattr(text, key):
                refuse(path, key, _shown(getattr(text, key)), "a positive integer, since enable_moe_block is true")


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
    for lead in ("Input should be ", "Value error, "):
        text = text.removeprefix(lead)
    return "a value" if text == "Field required" else text


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
