"""The exact tensors of a head, and how stored ones become them; from headers alone, no mlx here.

Experts come in three layouts: one tensor per expert (`experts.3.up_proj.weight`), fused (`experts.gate_up_proj`, gate
in the first half of each expert's rows) and stacked for MLX (`switch_mlp.up_proj.weight`). A `Part` says which
stored tensors make one tensor of the network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .config import TextConfig
from .mtp_config import HeadConfig

if TYPE_CHECKING:
    from mlx_spec.checkpoint import TensorInfo

Shape = tuple[int, ...]
How = Literal["whole", "first half", "second half", "stack"]
BITS = (2, 3, 4, 5, 6, 8)
COMPANIONS = ("scales", "biases")
_FUSED = re.compile(r"(.+\.mlp\.)experts\.(gate_up|down)_proj(?:\.(?=weight|scales|biases)|_(?=scales|biases)|$)(\w*)")
_NUMBERED = re.compile(r"(.+\.mlp\.)experts\.(\d+)\.((?:gate|up|down)_proj\.\w+)")


@dataclass(frozen=True, slots=True)
class Part:
    """How one tensor of the network is stored.

    Attributes:
        names: bare names of the stored tensors; several only for "stack".
        how: what is done with them.
        shape, dtype: of the result; dtype as safetensors spells it.
    """

    names: tuple[str, ...]
    how: How
    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class Packed:
    """How a quantised module is stored."""

    bits: int
    group_size: int
    mode: str = "affine"

    def as_dict(self) -> dict[str, Any]:
        """Keyword arguments of mlx's `to_quantized`."""
        return {"bits": self.bits, "group_size": self.group_size, "mode": self.mode}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a set of tensors."""

    kind: Literal["tensors", "shape", "fc", "quantisation", "depth"]
    subject: str
    found: str
    expected: str


# -- what there should be ------------------------------------------------------------------------------


def head_shapes(text: TextConfig, depth: int) -> dict[str, Shape]:
    """Tensor name -> shape of an unquantised head of `depth` layers."""
    H = text.hidden_size
    shapes: dict[str, Shape] = {"fc.weight": (H, 2 * H)}
    shapes |= {f"{name}.weight": (H,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    for i in range(depth):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer(text)}
    return shapes


def _layer(text: TextConfig) -> Iterator[tuple[str, Shape]]:
    H, D = text.hidden_size, text.head_dim
    Q, KV = text.num_attention_heads * D, text.num_key_value_heads * D
    yield "input_layernorm.weight", (H,)
    yield "post_attention_layernorm.weight", (H,)
    for name, shape in (("q", (2 * Q, H)), ("k", (KV, H)), ("v", (KV, H)), ("o", (H, Q))):
        yield f"self_attn.{name}_proj.weight", shape
        if text.attention_bias:
            yield f"self_attn.{name}_proj.bias", shape[:1]
    yield "self_attn.q_norm.weight", (D,)
    yield "self_attn.k_norm.weight", (D,)
    if not text.num_experts:
        yield from _mlp("mlp", (), H, text.intermediate_size)
        return
    yield "mlp.gate.weight", (text.num_experts, H)
    yield from _mlp("mlp.switch_mlp", (text.num_experts,), H, text.moe_intermediate_size)
    yield from _mlp("mlp.shared_expert", (), H, text.shared_expert_intermediate_size)
    yield "mlp.shared_expert_gate.weight", (1, H)


def _mlp(name: str, experts: Shape, width: int, inner: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.gate_proj.weight", (*experts, inner, width)
    yield f"{name}.up_proj.weight", (*experts, inner, width)
    yield f"{name}.down_proj.weight", (*experts, width, inner)


# -- what there is -------------------------------------------------------------------------------------


def parts_of(index: Mapping[str, TensorInfo]) -> tuple[dict[str, Part], list[Problem]]:
    """Name in the network -> how it is stored, for every tensor of `index`; and experts with a gap."""
    parts: dict[str, Part] = {}
    stacks: dict[str, dict[int, str]] = {}
    for name, info in index.items():
        one, fused = _NUMBERED.fullmatch(name), _FUSED.fullmatch(name)
        if one is not None:
            stacks.setdefault(f"{one[1]}switch_mlp.{one[3]}", {})[int(one[2])] = name
        elif fused is None:
            parts[name] = Part((name,), "whole", info.shape, info.dtype)
        elif fused[2] == "down":
            parts[f"{fused[1]}switch_mlp.down_proj.{fused[3] or 'weight'}"] = Part(
                (name,), "whole", info.shape, info.dtype
            )
        else:
            for half, which in (("gate", "first half"), ("up", "second half")):
                place = f"{fused[1]}switch_mlp.{half}_proj.{fused[3] or 'weight'}"
                parts[place] = Part((name,), which, _halved(info.shape), info.dtype)  # type: ignore[arg-type]
    problems = []
    for place, names in stacks.items():
        missing = next((i for i in range(max(names) + 1) if i not in names), None)
        if missing is not None:
            problems.append(Problem("tensors", place, f"no expert {missing}", f"experts 0 to {max(names)}"))
            continue
        ordered = tuple(names[i] for i in range(len(names)))
        first = index[ordered[0]]
        odd = next((name for name in ordered if index[name].shape != first.shape), None)
        if odd is not None:
            problems.append(Problem("shape", odd, str(index[odd].shape), f"{first.shape}, as expert 0"))
        parts[place] = Part(ordered, "stack", (len(ordered), *first.shape), first.dtype)
    return parts, problems


def _halved(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-2] // 2, shape[-1]) if len(shape) >= 2 else shape


def packed_modules(config: HeadConfig, depth: int, parts: Mapping[str, Part]) -> dict[str, Packed]:
    """Module path -> how it is packed, for every module with scales whose sizes are readable."""
    found = {}
    for name, shape in head_shapes(config.text, depth).items():
        path = name.removesuffix(".weight")
        how = _packing(config, path, shape, parts)
        if how is not None:
            found[path] = how
    return found


def _packing(config: HeadConfig, path: str, shape: Shape, parts: Mapping[str, Part]) -> Packed | None:
    words, scales = parts.get(f"{path}.weight"), parts.get(f"{path}.scales")
    if words is None or scales is None or len(shape) < 2:
        return None
    if len(words.shape) != len(shape) or len(scales.shape) != len(shape) or not scales.shape[-1]:
        return None
    bits, group = words.shape[-1] * 32 / shape[-1], shape[-1] / scales.shape[-1]
    if bits not in BITS or group != int(group):
        return None
    mode = "affine" if f"{path}.biases" in parts else str(declared(config, path).get("mode", "affine"))
    return Packed(int(bits), int(group), mode)


def declared(config: HeadConfig, path: str) -> dict[str, Any]:
    """bits, group_size and mode that config.json gives for a module; {} when it gives none."""
    table = config.quantisation
    for prefix in ("", "mtp.", "model.mtp.", "language_model.mtp."):
        own = table.get(prefix + path)
        if isinstance(own, Mapping):
            return {**_general(table), **own}
    return _general(table)


def _general(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: table[key] for key in ("bits", "group_size", "mode") if key in table}


# -- the difference ------------------------------------------------------------------------------------


def check_inventory(config: HeadConfig, index: Mapping[str, TensorInfo], depth: int) -> list[Problem]:
    """Everything missing, unexpected, of another shape or unreadable; empty for a sound head.

    depth: layers that the tensors make.
    """
    block = next((name for name, info in index.items() if name.endswith("_scale_inv") or info.dtype == "F8_E4M3"), None)
    if block is not None:
        found = f"{block}: FP8 with a scale per block"
        return [Problem("quantisation", "tensors", found, "float weights, or weights quantised for MLX")]
    parts, problems = parts_of(index)
    if depth != config.depth:
        said = f"{config.depth} (mtp_num_hidden_layers)"
        problems.append(Problem("depth", "layers", f"{depth} in the tensors", f"{said}, as config.json says"))
    packed = packed_modules(config, depth, parts)
    expected: dict[str, Shape] = {}
    for name, shape in head_shapes(config.text, depth).items():
        path = name.removesuffix(".weight")
        expected |= _stored_shapes(path, shape, packed[path]) if path in packed else {name: shape}
    for path, how in packed.items():
        if how.mode == "affine" and f"{path}.biases" not in parts:
            del expected[f"{path}.biases"]
            said = "biases beside affine scales, or the mode in config.json"
            problems.append(Problem("quantisation", f"module {path}", "scales without biases", said))
    return [*problems, *_differences(parts, expected)]


def _differences(parts: Mapping[str, Part], expected: Mapping[str, Shape]) -> Iterator[Problem]:
    missing = sorted(expected.keys() - parts.keys())
    extra = sorted(parts.keys() - expected.keys())
    if missing:
        yield Problem("tensors", "tensors", f"no {_listed(missing)}", f"the {len(expected)} tensors of a head")
    if extra:
        yield Problem("tensors", "tensors", f"unexpected {_listed(extra)}", "only the tensors of a head")
    for name, shape in expected.items():
        if name in parts and parts[name].shape != shape:
            kind: Literal["fc", "shape"] = "fc" if name == "fc.weight" else "shape"
            yield Problem(kind, f"tensor {name}", str(list(parts[name].shape)), str(list(shape)))


def _stored_shapes(path: str, shape: Shape, how: Packed) -> dict[str, Shape]:
    groups = (*shape[:-1], shape[-1] // how.group_size)
    shapes: dict[str, Shape] = {f"{path}.weight": (*shape[:-1], shape[-1] * how.bits // 32), f"{path}.scales": groups}
    if how.mode == "affine":
        shapes[f"{path}.biases"] = groups
    return shapes


def _listed(names: list[str], limit: int = 4) -> str:
    rest = f" (and {len(names) - limit} more)" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
