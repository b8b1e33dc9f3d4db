"""config.json of a DFlash drafter: what marks one, its fields, and what no pairing could mend.

Checked against mlx-vlm 0.7.10 `drafters/qwen3_dflash/config.py` and `drafters/dflash2/config.py` (names and
defaults) and z-lab's `dflash/model_mlx.py`. `dflash_config` wins over keys of the same name beside it;
`model_type` names the backbone's layout and says nothing. Keys not listed here are ignored; so is
`partial_rotary_factor`, since every source rotates whole heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mlx_spec.errors import LoadError
from mlx_spec.types import DrafterCard, ModelRef

KIND = "dflash"
FULL, SLIDING = "full_attention", "sliding_attention"
FIRST, SECOND = "DFlashDraftModel", "DFlash2DraftModel"
"""Architectures: plain blocks, and blocks with convolutions and a candidate selector."""
SECOND_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
SECOND_CAP = 5
"""Width past which a DFlash2 drafter is not run unless its file says so (mlx-vlm 0.7.10)."""
COMPLETE = "Use a complete DFlash checkpoint whose config.json belongs to its weights"


class Problem(NamedTuple):
    """One thing wrong with a drafter's files."""

    code: str
    subject: str
    found: str
    expected: str


class DFlashConfig(BaseModel):
    """A DFlash drafter. Attribute names are those of config.json and of its `dflash_config`."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(default=128, gt=1)
    vocab_size: int = Field(gt=0)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    max_position_embeddings: int = Field(default=262144, gt=0)
    rope_theta: float = Field(default=1e7, gt=0)
    rope_scaling: dict[str, Any] | None = None
    rope_is_neox_style: bool = True
    attention_bias: Literal[False] = False
    attention_sink_bias: Literal[False] = False
    hidden_act: Literal["silu"] = "silu"
    block_size: int = 16
    runtime_block_size: int | None = None
    mask_token_id: int
    target_layer_ids: list[int] = Field(min_length=1)
    num_target_layers: int | None = Field(default=None, gt=0)
    layer_types: list[str]
    sliding_window: int | None = Field(default=None, gt=1)
    draft_window_size: int | None = Field(default=None, ge=0)
    causal: bool | None = None
    final_logit_softcapping: float | None = Field(default=None, ge=0)
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    second: bool = False
    conv_kernel_size: int = Field(default=0, ge=0)
    conv_group_size: int = Field(default=0, ge=0)
    selector_rank: int = Field(default=0, ge=0)
    selector_top_k: int = Field(default=0, ge=0)
    quantization: dict[str, Any] | None = None

    @field_validator("rope_scaling")
    @classmethod
    def _scaled_at_all(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        kind = None if value is None else value.get("rope_type", value.get("type"))
        return None if kind in (None, "default") else value

    @property
    def cap(self) -> int | None:
        """Widest block L it may be run at, None when its file names none."""
        if self.runtime_block_size is not None or not self.second:
            return self.runtime_block_size
        return min(SECOND_CAP, self.block_size)

    def window(self, layer: int) -> int | None:
        """Positions a query of `layer` looks back over, its own included; None for all of them."""
        if self.layer_types[layer] == SLIDING:
            return self.sliding_window
        return self.draft_window_size or None

    def is_causal(self, layer: int) -> bool:
        """Whether rows of a block see only earlier rows of it: as the file says, else in sliding layers."""
        return self.layer_types[layer] == SLIDING if self.causal is None else self.causal

    @property
    def softcap(self) -> float | None:
        """Cap of the logits, None for none; dividing by 0 would give NaN."""
        return self.final_logit_softcapping or None


# -- what marks one ------------------------------------------------------------------------------------


def section(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`dflash_config`; {} for an architecture that says DFlash without one, None for other directories."""
    own = config.get("dflash_config")
    if isinstance(own, Mapping):
        return own
    return {} if {FIRST, SECOND} & set(_architectures(config)) else None


def is_dspark(config: Mapping[str, Any]) -> bool:
    """Whether the block is refined by a Markov head: DSpark, another family under the same key."""
    own = section(config) or {}
    rank = own.get("markov_rank")
    return own.get("projector_type") == "dspark" or (isinstance(rank, int) and rank > 0)


def is_second(config: Mapping[str, Any]) -> bool:
    """Whether it is a DFlash2 drafter, by its architecture or by its keys."""
    own = section(config) or {}
    return SECOND in _architectures(config) or any(own.get(key) for key in SECOND_KEYS)


def dflash_card(ref: ModelRef) -> DrafterCard | None:
    """The card of a DFlash directory, None for other ones; lenient, `validate` says what is wrong with it."""
    if section(ref.config) is None or is_dspark(ref.config):
        return None
    values = _flat(ref.config)
    block, runtime, vocab = (_whole(values.get(key)) for key in ("block_size", "runtime_block_size", "vocab_size"))
    block = 16 if "block_size" not in values else block
    if runtime is None and block is not None and values["second"]:
        runtime = min(SECOND_CAP, block)
    layout = "dflash2" if values["second"] else "dflash"
    return DrafterCard(KIND, ref.model_type, block, vocab, runtime, {"layout": layout})


def _architectures(config: Mapping[str, Any]) -> list[str]:
    value = config.get("architectures")
    return [name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str)]


def _whole(value: object) -> int | None:
    return value if type(value) is int and value > 1 else None


# -- reading -------------------------------------------------------------------------------------------


def dflash_config(config: Mapping[str, Any], path: Path) -> DFlashConfig:
    """The fields of a drafter's config.json. LoadError about the first one that cannot be used."""
    read = parsed(config)
    if isinstance(read, DFlashConfig):
        return read
    raise LoadError(
        f"{read[0].subject} of {path}",
        found=read[0].found,
        expected=read[0].expected,
        next_step=COMPLETE,
        code="QW40",
    )


def parsed(config: Mapping[str, Any]) -> DFlashConfig | list[Problem]:
    """The fields, or everything about their types that is wrong."""
    try:
        return DFlashConfig.model_validate(_flat(config))
    except ValidationError as error:
        own = section(config) or {}
        return [_problem(entry, own) for entry in error.errors()]


def inconsistencies(config: DFlashConfig) -> Iterator[Problem]:
    """What types alone cannot say, and no target could mend."""
    yield from _blocks(config)
    yield from _layers(config)
    if not 0 <= config.mask_token_id < config.vocab_size:
        found, expected = str(config.mask_token_id), f"an id below vocab_size {config.vocab_size}"
        yield Problem("QW46", "dflash_config.mask_token_id", found, expected)
    if config.second:
        yield from _second(config)


def _blocks(config: DFlashConfig) -> Iterator[Problem]:
    L, most = config.block_size, config.runtime_block_size
    if L < 2:
        yield Problem("QW47", "block_size", f"L={L}, anchor counted", "at least 2, to draft one token")
    elif most is not None and not 2 <= most <= L:
        yield Problem("QW47", "runtime_block_size", f"L={most}", f"2 to {L}, the block_size it was trained for")


def _layers(config: DFlashConfig) -> Iterator[Problem]:
    kinds, many = config.layer_types, config.num_hidden_layers
    odd = sorted(set(kinds) - {FULL, SLIDING})
    if odd or len(kinds) != many:
        found = f"{odd[0]!r}" if odd else f"{len(kinds)} entries"
        yield Problem("QW48", "layer_types", found, f"{many} entries, each {FULL} or {SLIDING}")
    if SLIDING in kinds and config.sliding_window is None:
        yield Problem("QW48", "sliding_window", "nothing", f"a number of positions, since layer_types has {SLIDING}")
    if config.num_attention_heads % config.num_key_value_heads:
        expected = f"a multiple of num_key_value_heads ({config.num_key_value_heads})"
        yield Problem("QW49", "num_attention_heads", str(config.num_attention_heads), expected)
    ids, last = config.target_layer_ids, config.num_target_layers
    if ids[0] < 0 or any(a >= b for a, b in pairwise(ids)) or (last is not None and ids[-1] >= last):
        among = "layers of the target" if last is None else f"layers 0 to {last - 1} of the target"
        yield Problem("QW45", "dflash_config.target_layer_ids", str(ids), f"increasing numbers of {among}")


def _second(config: DFlashConfig) -> Iterator[Problem]:
    for key in SECOND_KEYS:
        if getattr(config, key) < 1:
            yield Problem("QW55", f"dflash_config.{key}", "nothing", "a positive number, as DFlash2 has it")
    group = config.conv_group_size
    if group and config.hidden_size % group:
        yield Problem("QW55", "dflash_config.conv_group_size", str(group), f"a divisor of {config.hidden_size}")
    if config.selector_top_k > config.vocab_size:
        expected = f"at most vocab_size {config.vocab_size}"
        yield Problem("QW55", "dflash_config.selector_top_k", str(config.selector_top_k), expected)
    if config.causal:
        yield Problem("QW55", "dflash_config.causal", "true", "false: a DFlash2 block is read in both directions")


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """One level: `dflash_config` over the keys beside it, one spelling of the rotation."""
    own = section(config) or {}
    values = {key: value for key, value in {**config, **own}.items() if value is not None}
    if "causal" not in values and "dflash_query_causal" in values:
        values["causal"] = values["dflash_query_causal"]
    rope = values.get("rope_parameters")
    if isinstance(rope, Mapping):
        values.setdefault("rope_scaling", dict(rope))
        if rope.get("rope_theta") is not None:
            values["rope_theta"] = rope["rope_theta"]
    values["second"] = is_second(config)
    many = values.get("num_hidden_layers")
    if type(many) is int and "layer_types" not in values:
        values["layer_types"] = [FULL] * many
    last = values.get("num_target_layers")
    if type(many) is int and type(last) is int and "target_layer_ids" not in values:
        values["target_layer_ids"] = spread(many, last)
    return values


def spread(count: int, layers: int) -> list[int]:
    """Ids of the target's layers that a drafter of `count` layers reads when its file names none."""
    if count == 1:
        return [layers // 2]
    return [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]


def _problem(entry: Any, own: Mapping[str, Any]) -> Problem:
    """One of pydantic's errors in the words of the file."""
    key = ".".join(str(part) for part in entry["loc"])
    subject = f"dflash_config.{key}" if str(entry["loc"][0]) in own else key
    if entry["type"] == "missing":
        return Problem("QW40", subject, "nothing", "a value")
    text = repr(entry["input"])
    found = f"{type(entry['input']).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
    return Problem("QW40", subject, found, entry["msg"].removeprefix("Input should be "))
