"""The exact set of tensors an assistant consists of, checked from headers alone; no mlx here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .config import AssistantConfig

if TYPE_CHECKING:
    from mlx_spec.checkpoint import TensorInfo

Shape = tuple[int, ...]

KV_PROJECTIONS = ("self_attn.k_proj", "self_attn.v_proj")
"""An assistant has none of these: it reads the target's K/V."""
ORDERING = "masked_embedding.token_ordering"
BITS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True, slots=True)
class Quantised:
    """How one module is stored."""

    bits: int
    group_size: int
    mode: str = "affine"

    def as_dict(self) -> dict[str, Any]:
        """Keyword arguments of mlx's `to_quantized`."""
        return {"bits": self.bits, "group_size": self.group_size, "mode": self.mode}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a set of tensors."""

    subject: str
    found: str
    expected: str
    kind: str = "tensors"  # or "shape", "quantisation", "not an assistant"


def dense_shapes(config: AssistantConfig) -> dict[str, Shape]:
    """Tensor name -> shape of an unquantised assistant."""
    text, H = config.text, config.backbone_hidden_size
    h, F, V = text.hidden_size, text.intermediate_size, text.vocab_size
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (V, h),
        "model.norm.weight": (h,),
        "pre_projection.weight": (h, 2 * H),
        "post_projection.weight": (H, h),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (V, h)
    if config.use_ordered_embeddings:
        shapes["masked_embedding.centroids.weight"] = (config.num_centroids, h)
        shapes[ORDERING] = (V,)
    for i, kind in enumerate(text.layer_types):
        layer, D = f"model.layers.{i}", text.width(kind)
        Q = text.num_attention_heads * D
        shapes |= {f"{layer}.{name}.weight": (h,) for name in _norms()}
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (Q, h),
            f"{layer}.self_attn.o_proj.weight": (h, Q),
            f"{layer}.self_attn.q_norm.weight": (D,),
            f"{layer}.mlp.gate_proj.weight": (F, h),
            f"{layer}.mlp.up_proj.weight": (F, h),
            f"{layer}.mlp.down_proj.weight": (h, F),
            f"{layer}.layer_scalar": (1,),
        }
    return shapes


def _norms() -> tuple[str, ...]:
    return (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )


def unused(name: str, config: AssistantConfig) -> bool:
    """True for tensors some files carry and no assistant needs: a copy of the tied head."""
    return config.tie_word_embeddings and name.split(".")[0] == "lm_head"


def quantised_modules(config: AssistantConfig, index: Mapping[str, TensorInfo]) -> dict[str, Quantised]:
    """Module path -> how it is stored, for every module with scales whose sizes are readable."""
    found = {}
    for name, shape in dense_shapes(config).items():
        path = name.removesuffix(".weight")
        stored = _storage(config, path, shape, index)
        if stored is not None:
            found[path] = stored
    return found


def _storage(config: AssistantConfig, path: str, shape: Shape, index: Mapping[str, TensorInfo]) -> Quantised | None:
    packed, scales = index.get(f"{path}.weight"), index.get(f"{path}.scales")
    if packed is None or scales is None or len(shape) != 2:
        return None
    if len(packed.shape) != 2 or len(scales.shape) != 2 or not scales.shape[1]:
        return None
    width = shape[1]
    bits, group = packed.shape[1] * 32 / width, width / scales.shape[1]
    if bits not in BITS or group != int(group):
        return None
    return Quantised(int(bits), int(group), str(declared(config, path).get("mode", "affine")))


def declared(config: AssistantConfig, path: str) -> dict[str, Any]:
    """bits, group_size and mode that config.json gives for a module; {} when it gives none."""
    table = config.quantization or {}
    own = table.get(path)
    general: dict[str, Any] = {key: table[key] for key in ("bits", "group_size", "mode") if key in table}
    return {**general, **own} if isinstance(own, dict) else general


def check_inventory(config: AssistantConfig, index: Mapping[str, TensorInfo]) -> list[Problem]:
    """Everything that is missing, unexpected or of another shape; empty for a sound assistant."""
    strangers = [name for name in index if any(part in name for part in KV_PROJECTIONS)]
    if strangers:
        return [
            Problem(
                "tensors", _listed(strangers), "no K/V projections: an assistant reads its target's", "not an assistant"
            )
        ]
    stored = quantised_modules(config, index)
    expected: dict[str, Shape] = {}
    for name, shape in dense_shapes(config).items():
        path = name.removesuffix(".weight")
        expected |= _packed_shapes(path, shape, stored[path]) if path in stored else {name: shape}
    missing = sorted(set(expected) - set(index))
    extra = sorted(name for name in set(index) - set(expected) if not unused(name, config))
    problems = []
    if missing:
        problems.append(Problem("tensors", f"no {_listed(missing)}", f"{len(expected)} tensors of an assistant"))
    if extra:
        problems.append(Problem("tensors", f"unexpected {_listed(extra)}", "only the tensors of an assistant"))
    problems += [
        Problem(f"tensor {name}", str(list(index[name].shape)), str(list(shape)), "shape")
        for name, shape in expected.items()
        if name in index and index[name].shape != shape
    ]
    return problems + list(_disagreements(config, stored))


def _packed_shapes(path: str, shape: Shape, stored: Quantised) -> dict[str, Shape]:
    rows, width = shape
    groups = (rows, width // stored.group_size)
    shapes: dict[str, Shape] = {f"{path}.weight": (rows, width * stored.bits // 32), f"{path}.scales": groups}
    if stored.mode == "affine":
        shapes[f"{path}.biases"] = groups
    return shapes


def _disagreements(config: AssistantConfig, stored: Mapping[str, Quantised]) -> Iterator[Problem]:
    """Quantised modules that config.json describes otherwise, or not at all."""
    for path, how in stored.items():
        said = declared(config, path)
        found = f"{how.bits} bit in groups of {how.group_size}"
        if not said:
            yield Problem(f"module {path}", found, "a quantization entry in config.json", "quantisation")
        elif (said.get("bits"), said.get("group_size")) != (how.bits, how.group_size):
            expected = f"{said.get('bits')} bit in groups of {said.get('group_size')}, as config.json says"
            yield Problem(f"module {path}", found, expected, "quantisation")


def _listed(names: list[str], limit: int = 4) -> str:
    rest = f" (and {len(names) - limit} more)" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
