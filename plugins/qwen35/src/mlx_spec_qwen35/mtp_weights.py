"""Loading an MTP head: its own tensors alone, norms as they are used, matrices packed.

Only files that hold a tensor of the head are opened, and of those only its tensors are ever read, so a checkpoint that
drafts for itself has one trunk in memory.
"""

# mypy: disable-error-code="misc, no-any-return"
# mlx.nn is untyped to mypy: its classes and calls are Any.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.checkpoint import check_finite, load_indexed
from mlx_spec.errors import LoadError
from mlx_spec.linear import hold_transposes
from mlx_spec.settings import get_settings
from mlx_spec.types import ModelRef

from .mtp_config import HeadConfig, head_config
from .mtp_files import NORMS, Form, HeadFiles, find_head, norm_form
from .mtp_head import MtpHead
from .mtp_inventory import Part, check_inventory, packed_modules, parts_of

BITS, GROUP = 4, 64
"""How matrices are packed on load where they are not packed yet."""
ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")
ROUTER = {"bits": 8, "group_size": 64}
"""Routers keep 8 bits, as conversions of the targets do: a wrong expert costs more than a rounded weight."""


def load_head(ref: ModelRef, dtype: mx.Dtype, norms: str | None = None) -> tuple[MtpHead, dict[str, str]]:
    """Build and fill the head in `ref`; returns it and what was decided about it, in words.

    Args:
        dtype: of the target's activations; every float of the head is cast to it, since two would mix to float32.
        norms: "weights" or "deltas" where the user decides, None for what the files show.

    Raises LoadError for tensors that are missing, misshapen or not finite.
    """
    config, files = head_config(ref.config, ref.path), find_head(ref)
    problems = check_inventory(config, files.index, files.depth) if files is not None else []
    if files is None or problems:
        raise LoadError(
            f"MTP head of {ref.name}" + (f": {problems[0].subject}" if problems else ""),
            found=problems[0].found if problems else "no head tensors",
            expected=problems[0].expected if problems else "a head",
            next_step="Use a complete head whose config.json belongs to its weights",
            code="QW21",
        )
    shown = norm_form(files)
    form: Form = shown.form if norms is None else "deltas" if norms == "deltas" else "weights"
    reason = shown.reason if norms is None else "the option mtp_norms"
    head = MtpHead(config.text, files.depth)
    packed = packed_modules(config, files.depth, parts_of(files.index)[0])
    nn.quantize(head, class_predicate=lambda name, _: packed[name].as_dict() if name in packed else False)
    weights = {name: _cast(name, value, form, dtype) for name, value in read_arrays(ref, files).items()}
    check_finite(weights, f"MTP head of {ref.name}")
    head.load_weights(list(weights.items()), strict=True)
    stored = _pack(head, config, len(packed))
    mx.eval(head.parameters())
    hold_transposes(head)
    head.eval()
    return head, {"norms": f"{form}: {reason}", "matrices": stored}


def read_arrays(ref: ModelRef, files: HeadFiles) -> dict[str, mx.array]:
    """Name in the network -> array as it is stored, experts stacked; lazy, and only tensors of the head."""
    index = {files.stored[bare]: info for bare, info in files.index.items()}
    loaded = load_indexed(ref.path, list(index), index)
    bare = {name: loaded[stored] for name, stored in files.stored.items()}
    return {name: _made(part, bare) for name, part in parts_of(files.index)[0].items()}


def _made(part: Part, bare: Mapping[str, mx.array]) -> mx.array:
    first = bare[part.names[0]]
    if part.how == "stack":
        return mx.stack([bare[name] for name in part.names])
    if part.how == "whole":
        return first
    return mx.split(first, 2, axis=-2)[part.how == "second half"]


def _cast(name: str, value: mx.array, form: Form, dtype: mx.Dtype) -> mx.array:
    if not mx.issubdtype(value.dtype, mx.floating):
        return value
    if form == "deltas" and NORMS.fullmatch(name):
        value = value.astype(mx.float32) + 1
    return value.astype(dtype)


def _pack(head: MtpHead, config: HeadConfig, already: int) -> str:
    """Pack the matrices that are not packed yet, unless a setting forbids it; says what was done."""
    kept = f"{already} as stored" if already else ""
    if not get_settings().quantize_drafter:
        return kept or "not packed"
    count = 0

    def how(name: str, module: Any) -> Any:
        nonlocal count
        settings = ROUTER if name.endswith(ROUTERS) else {"bits": BITS, "group_size": GROUP}
        fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % settings["group_size"] == 0
        count += fits
        return settings if fits else False

    nn.quantize(head, class_predicate=how)
    packed = f"{count} packed to {BITS} bits in groups of {GROUP}" if count else ""
    return ", ".join(part for part in (kept, packed) if part) or "not packed"
