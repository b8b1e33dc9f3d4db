"""What mlx-lm makes of a checkpoint: names and layouts, dtype rule, choice of what to quantise.

mlx-lm does the choosing (`quantize_model` with the model's own `quant_predicate`), lazily; nothing is computed here.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import LoadError, UsageError
from ..types import ModelRef

if TYPE_CHECKING:
    import mlx.core as mx

AFFINE_BITS, AFFINE_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
FIXED = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
"""Modes with one layout each: bits, group size."""
MODES = ("affine", *FIXED)
DEFAULTS = {"affine": (4, 64), **FIXED}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How weights are to be packed."""

    bits: int
    group_size: int
    mode: str = "affine"

    def as_dict(self) -> dict[str, Any]:
        """As config.json has it."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


def read_quantisation(bits: int | None, group_size: int | None, mode: str | None) -> Quantisation | None:
    """The quantisation these options ask for, None without any; UsageError for what MLX does not have."""
    if bits is None and mode is None:
        if group_size is not None:
            raise _refuse("--q-group-size", f"{group_size} without --q-bits", "--q-bits or --q-mode with it")
        return None
    mode = mode or "affine"
    if mode not in MODES:
        raise _refuse("--q-mode", repr(mode), " | ".join(MODES))
    usual_bits, usual_group = DEFAULTS[mode]
    bits, group_size = usual_bits if bits is None else bits, usual_group if group_size is None else group_size
    if bits not in (AFFINE_BITS if mode == "affine" else (usual_bits,)):
        raise _refuse("--q-bits", f"{bits} in mode {mode}", _one_of(AFFINE_BITS if mode == "affine" else (usual_bits,)))
    groups = AFFINE_GROUPS if mode == "affine" else (usual_group,)
    if group_size not in groups:
        raise _refuse("--q-group-size", f"{group_size} in mode {mode}", _one_of(groups))
    return Quantisation(bits, group_size, mode)


def _one_of(values: tuple[int, ...]) -> str:
    return " | ".join(map(str, values))


def _refuse(option: str, found: str, expected: str) -> UsageError:
    return UsageError(option, found=found, expected=expected, next_step="Correct it, or leave it out", code="U67")


@dataclass(slots=True)
class Made:
    """A checkpoint as mlx-lm would save it.

    Attributes:
        arrays: parameter name -> lazy array, in mlx-lm's order.
        config: what mlx-lm would write as config.json.
        dtype: what floats were cast to, "" when they keep theirs.
        vision: whether the model has a vision tower, whose settings config.json then keeps.
    """

    arrays: dict[str, mx.array]
    config: dict[str, Any]
    dtype: str
    vision: bool = False


def make(ref: ModelRef, quantisation: Quantisation | None, dtype: str | None) -> Made:
    """Load lazily, cast and quantise by mlx-lm's rules; LoadError for what cannot be loaded or is packed."""
    from mlx.utils import tree_flatten

    from ..checkpoint import load_mlx_lm

    classes = _classes(ref)
    model, config = load_mlx_lm(ref, lazy=True, get_model_classes=classes and (lambda config: classes))
    if quantisation is not None and ("quantization" in config or "quantization_config" in config):
        raise _quantised_already(ref, config)
    cast = _cast(model, config, dtype)
    if quantisation is not None:
        model, config = _quantise(model, config, quantisation)
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return Made(arrays, config, cast, "vision_tower" in getattr(model, "model", {}))


def _classes(ref: ModelRef) -> tuple[type, type] | None:
    """Classes of the plugin whose model_type mlx-lm does not define, None where mlx-lm's are used.

    What mlx-lm defines is written as mlx-lm converts it. LoadError when the plugin offers none.
    """
    from mlx_lm.utils import _get_classes

    from ..loading import model_classes
    from ..plugins import get_manager

    owner = get_manager().registry.target_owner(ref.model_type)
    if owner is None:
        return None
    try:
        _get_classes(dict(ref.config))
    except ValueError as error:
        own = model_classes(ref)
        if own is not None:
            return own
        raise LoadError(
            f"model {ref.name}",
            found=f"model_type {ref.model_type!r}, for which mlx-lm and plugin {owner} give no classes",
            expected="a model_type that mlx-lm converts, or a plugin with spec_model_classes",
            next_step="Use it as it is, or convert the release of it that mlx-lm knows",
            code="L65",
        ) from error
    return None


def _quantised_already(ref: ModelRef, config: Mapping[str, Any]) -> LoadError:
    settings = config.get("quantization") or config.get("quantization_config") or {}
    shown = (
        ", ".join(f"{k} {v}" for k, v in settings.items() if isinstance(v, str | int | float)) or "set in config.json"
    )
    return LoadError(
        f"model {ref.name}",
        found=f"weights that are quantised already ({shown})",
        expected="floats to quantise",
        next_step="Convert the original checkpoint, or leave out --q-bits and --q-mode",
        code="L61",
    )


def _cast(model: Any, config: Mapping[str, Any], dtype: str | None) -> str:
    """Cast floats as `mlx_lm.convert` does: to `dtype`, else to what config.json says; returns its name."""
    import mlx.core as mx
    from mlx.utils import tree_map_with_path

    text = config.get("text_config")
    name = dtype or config.get("torch_dtype") or (text.get("dtype") if isinstance(text, dict) else None)
    if name not in ("float16", "bfloat16", "float32"):
        return ""
    wanted: mx.Dtype = getattr(mx, name)
    allowed = getattr(model, "cast_predicate", lambda _: True)

    def cast(path: str, value: mx.array) -> mx.array:
        floats = mx.issubdtype(value.dtype, mx.floating)
        return value.astype(wanted) if floats and allowed(path) else value

    model.update(tree_map_with_path(cast, model.parameters()))
    return str(name)


def _quantise(model: Any, config: dict[str, Any], how: Quantisation) -> tuple[Any, dict[str, Any]]:
    """mlx-lm's own pass, without what it prints."""
    from mlx_lm.utils import quantize_model

    with contextlib.redirect_stdout(io.StringIO()):
        model, config = quantize_model(model, config, how.group_size, how.bits, mode=how.mode)
    return model, config
