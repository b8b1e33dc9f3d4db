"""Tensors of a drafter's files against the shapes it must have, dense or quantised; no mlx here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_spec.checkpoint import TensorInfo

Shape = tuple[int, ...]
BITS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True, slots=True)
class Packed:
    """How one module is stored."""

    bits: int
    group_size: int
    mode: str = "affine"

    def as_dict(self) -> dict[str, Any]:
        """Keyword arguments of mlx's `to_quantized`."""
        return {"bits": self.bits, "group_size": self.group_size, "mode": self.mode}


def declared(table: Mapping[str, Any] | None, module: str) -> dict[str, Any]:
    """bits, group_size and mode that `quantization` gives for a module; {} when it gives none."""
    table = table or {}
    own = table.get(module)
    general = {key: table[key] for key in ("bits", "group_size", "mode") if key in table}
    return {**general, **own} if isinstance(own, dict) else general


def packed_modules(
    shapes: Mapping[str, Shape], index: Mapping[str, TensorInfo], table: Mapping[str, Any] | None
) -> dict[str, Packed]:
    """Module -> how it is stored, for every matrix of `shapes` with scales whose sizes are readable."""
    found = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        stored = _storage(module, shape, index, table)
        if stored is not None:
            found[module] = stored
    return found


def stored_shapes(shapes: Mapping[str, Shape], packed: Mapping[str, Packed]) -> dict[str, Shape]:
    """Tensor name -> shape in the file: dense ones as they are, quantised ones with their companions."""
    out: dict[str, Shape] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        out |= _parts(module, shape, packed[module]) if module in packed else {name: shape}
    return out


def disagreements(packed: Mapping[str, Packed], table: Mapping[str, Any] | None) -> Iterator[tuple[str, str, str]]:
    """(module, found, expected) of modules that config.json describes otherwise, or not at all."""
    for module, how in packed.items():
        said = declared(table, module)
        found = f"{how.bits} bit in groups of {how.group_size}"
        if not said:
            yield module, found, "a quantization entry in config.json"
        elif (said.get("bits"), said.get("group_size")) != (how.bits, how.group_size):
            yield module, found, f"{said.get('bits')} bit in groups of {said.get('group_size')}, as config.json says"


def _storage(
    module: str, shape: Shape, index: Mapping[str, TensorInfo], table: Mapping[str, Any] | None
) -> Packed | None:
    weight, scales = index.get(f"{module}.weight"), index.get(f"{module}.scales")
    if weight is None or scales is None or len(shape) != 2:
        return None
    if len(weight.shape) != 2 or len(scales.shape) != 2 or not scales.shape[1]:
        return None
    bits, group = weight.shape[1] * 32 / shape[1], shape[1] / scales.shape[1]
    if bits not in BITS or group != int(group):
        return None
    return Packed(int(bits), int(group), str(declared(table, module).get("mode", "affine")))


def _parts(module: str, shape: Shape, how: Packed) -> dict[str, Shape]:
    rows, width = shape
    groups = (rows, width // how.group_size)
    parts: dict[str, Shape] = {f"{module}.weight": (rows, width * how.bits // 32), f"{module}.scales": groups}
    if how.mode == "affine":
        parts[f"{module}.biases"] = groups
    return parts
