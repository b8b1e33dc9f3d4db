"""Tensors of a Qwen 3.5 target: every layout brought to the names and axes of mlx-lm's modules.

What differs between files, and what decides:

- names: with or without `model.`, `language_model.` in front; a name is what is left of them;
- the convolution's axes: (C, 1, K) as published, (C, K, 1) for MLX: the last axis decides;
- norms: published files store w - 1 for the five kinds in `SHIFTED`, converted ones store w. The convolutions
  of the same file decide. An MTP head in it does not: a converted file may keep its head, in either form,
  and older converters that looked at it added 1 twice;
- experts: fused (`experts.gate_up_proj`, gate first), one by one (`experts.3.up_proj`), or stacked for MLX.

`linear_attn.norm` is w in every file. A tensor that is none of this reaches mlx-lm's loader, which names it.
"""

# mypy: disable-error-code="misc, no-any-return"
# mlx.nn is untyped to mypy: its classes and calls are Any.

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5

from mlx_spec.errors import LoadError
from mlx_spec.gated_delta import GatedDelta

from .config import TextConfig

_WRAPPING = re.compile(r"(model\.)?(language_model\.)?(model\.)?")
HEADS = re.compile(r"(^|\.)mtp\.")
"""Tensors of MTP heads, which are a drafter's business."""
TOWERS = ("visual.", "vision_tower.", "vision_model.")
"""What a name begins with, without its wrapping, when it belongs to the vision tower."""
SHIFTED = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm", "norm")
"""Norms that published files store as w - 1: four of every layer, and the trunk's last."""
_SHIFTED = re.compile(r"^(norm|layers\.\d+\.(input_layernorm|post_attention_layernorm|self_attn\.[qk]_norm))\.weight$")
_FUSED = re.compile(r"^(.+\.mlp\.)experts\.(gate_up|down)_proj(?:\.weight|[._](scales|biases))?$")
_NUMBERED = re.compile(r"^(.+\.mlp\.)experts\.(\d+)\.((?:gate|up|down)_proj\.\w+)$")
_CONV = ".linear_attn.conv1d.weight"

Classes = Callable[..., tuple[type, type]]
Weights = dict[str, mx.array]


class Qwen35Model(qwen3_5.Model):
    """mlx-lm's model, filled from any of the layouts; its linear layers hold what kernels may replace."""

    def __init__(self, args: Any):
        super().__init__(args)
        for layer in self.language_model.model.layers:
            if layer.is_linear:
                layer.linear_attn.gated_delta, layer.linear_attn.silu = GatedDelta(), nn.SiLU()

    def sanitize(self, weights: Weights) -> Weights:
        """Tensors as they are in the files -> as this module's parameters."""
        text, self._dropped = split_names(weights, self.language_model.args.tie_word_embeddings)
        return {_module_name(name): value for name, value in converted(text).items()}


def target_classes(text: TextConfig) -> Classes:
    """What mlx-lm's loader asks for: (model class, arguments class), built from the checked configuration."""

    class Arguments:
        @staticmethod
        def from_dict(config: dict[str, Any]) -> Any:
            return qwen3_5.ModelArgs(config["model_type"], text.mlx_lm_args())

    def classes(config: dict[str, Any]) -> tuple[type, type]:
        return Qwen35Model, Arguments

    return classes


def split_names(weights: Mapping[str, mx.array], tied: bool) -> tuple[Weights, tuple[str, ...]]:
    """(name without wrapping -> tensor of the text stack, names that the text path drops)."""
    text: Weights = {}
    dropped = []
    for name, value in weights.items():
        bare = bare_name(name)
        if HEADS.search(name) or bare.startswith(TOWERS) or (tied and bare.startswith("lm_head.")):
            dropped.append(name)
        else:
            text[bare] = value
    return text, tuple(sorted(dropped))


def bare_name(name: str) -> str:
    """A name without what wraps the text stack: "layers.0...", "embed_tokens.weight", "lm_head.weight"."""
    return _WRAPPING.sub("", name, count=1)


def converted(text: Weights) -> Weights:
    """Bare names in any layout -> the same, axes and norms as in MLX. LoadError for what is unreadable."""
    _refuse_unreadable(text)
    raw = published(text)
    out: Weights = {}
    for name, value in _experts(text):
        if name.endswith(_CONV) and value.shape[-1] != 1:
            value = value.moveaxis(2, 1)
        if raw and _SHIFTED.match(name):
            value = value + 1.0
        out[name] = value
    return out


def published(text: Mapping[str, mx.array]) -> bool:
    """Whether these tensors of a text stack are in the published form, judged by its convolutions."""
    forms = {value.shape[-1] != 1 for name, value in text.items() if name.endswith(_CONV)}
    if len(forms) > 1:
        raise _unreadable(
            "convolution weights with their axes in two orders",
            "all (C, 1, K), as published, or all (C, K, 1)",
            "Files of two checkpoints were mixed: download or convert it again",
        )
    return forms == {True}


def _module_name(bare: str) -> str:
    inside = bare.startswith(("layers.", "embed_tokens.", "norm."))
    return f"language_model.model.{bare}" if inside else f"language_model.{bare}"


def _experts(text: Weights) -> Iterator[tuple[str, mx.array]]:
    """All tensors, with those of experts stacked per projection."""
    stacks: dict[str, dict[int, mx.array]] = {}
    for name, value in text.items():
        one = _NUMBERED.match(name)
        if one:
            stacks.setdefault(f"{one[1]}switch_mlp.{one[3]}", {})[int(one[2])] = value
            continue
        fused = _FUSED.match(name)
        if fused is None:
            yield name, value
            continue
        base, part = f"{fused[1]}switch_mlp", fused[3] or "weight"
        if fused[2] == "down":
            yield f"{base}.down_proj.{part}", value
        else:
            gate, up = mx.split(value, 2, axis=-2)
            yield f"{base}.gate_proj.{part}", gate
            yield f"{base}.up_proj.{part}", up
    for name, parts in stacks.items():
        missing = sorted(set(range(max(parts) + 1)) - parts.keys())
        if missing:
            found = f"{len(parts)} experts for {name}, none of number {missing[0]}"
            raise _unreadable(found, f"experts 0 to {max(parts)}", "Download the checkpoint again, complete")
        yield name, mx.stack([parts[i] for i in range(len(parts))])


def _refuse_unreadable(text: Weights) -> None:
    scaled = next((name for name in text if name.endswith("weight_scale_inv")), None)
    if scaled is not None:
        raise _unreadable(
            f"{scaled}: weights in FP8 with a scale per block",
            "float weights, or weights quantised for MLX",
            "Use the bfloat16 release, or one converted for MLX",
        )


def _unreadable(found: str, expected: str, next_step: str) -> LoadError:
    return LoadError("weights of a Qwen 3.5 target", found=found, expected=expected, next_step=next_step, code="QW03")
