"""How much memory a model needs, weights, K/V and state, from config.json and headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tensorfiles import TensorInfo

_LAYERS, _LARGEST = 10_000, 1 << 32  # beyond these a config.json is damaged, and tells nothing
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SCALE_BYTES = 4  # one scale and one bias of 2 bytes per quantised group


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes for one row.

    Attributes:
        weights_bytes: all tensors of the checkpoint, as stored.
        kv_bytes_per_1k_tokens: K/V growth per 1000 positions while no window is full.
        kv_bytes: K/V at `context` positions, windows full.
        kv_layers: layers that keep K/V; 0 when none does, or config.json does not tell.
        state_bytes: recurrences and convolution windows, the same at every length. A block that is being verified
            keeps the state before it too.
        state_layers: layers that keep such a state.
    """

    weights_bytes: int
    kv_bytes_per_1k_tokens: int
    kv_bytes: int
    context: int
    kv_layers: int
    state_bytes: int = 0
    state_layers: int = 0

    @property
    def total_bytes(self) -> int:
        """Weights, K/V at `context`, recurrent state."""
        return self.weights_bytes + self.kv_bytes + self.state_bytes


def memory_needed(
    config: Mapping[str, Any],
    index: Mapping[str, TensorInfo],
    context: int,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
) -> MemoryNeed:
    """Weights, K/V at `context` positions, and the state of recurrent layers, which does not grow."""
    weights = sum(info.nbytes for info in index.values())
    element = _element_bytes(index)
    per_token = at_context = 0.0
    rows = kv_rows(config)
    for elements, window in rows:
        # Windows stay dense under quantised K/V: their size is bounded.
        dense = kv_bits is None or window is not None
        size = elements * element if dense else elements * (kv_bits or 0) / 8 + elements / kv_group_size * _SCALE_BYTES
        per_token += size
        at_context += size * (context if window is None else min(context, window))
    held = [floats * 4 + rest * element for floats, rest in state_rows(config)]
    return MemoryNeed(weights, round(per_token * 1000), round(at_context), context, len(rows), sum(held), len(held))


def state_rows(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(float32 elements, elements as activations are) of each gated-delta layer's state of a row."""
    merged, layers = _merged(config)
    if not layers:
        return []
    keys = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    Hk, Hv, Dk, Dv, K = (_at(merged.get(f"linear_{key}"), 0, 0) for key in keys)
    row = (Hv * Dv * Dk, max(K - 1, 0) * (2 * Hk * Dk + Hv * Dv))
    return [row for kind in _layer_kinds(merged, layers) if kind == "linear_attention" and all(row)]


def _merged(config: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Settings of the text stack, and its number of layers, 0 where that makes no sense."""
    text = config.get("text_config")
    merged = {**config, **text} if isinstance(text, dict) else dict(config)
    layers = merged.get("num_hidden_layers")
    return merged, layers if type(layers) is int and 0 < layers <= _LAYERS else 0


def head_settings(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Settings of a drafter head of so many layers, out of a config.json that describes its trunk.

    Heads attend to everything, whatever the layers of their trunk do.
    """
    merged, declared = _merged(config)
    merged.pop("text_config", None)  # merged in
    if layers != declared:
        merged |= {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers, "num_kv_shared_layers": 0}
    return merged


def kv_rows(config: Mapping[str, Any]) -> list[tuple[int, int | None]]:
    """(K and V elements per position, window or None) of each layer that keeps K/V."""
    merged, layers = _merged(config)
    if not layers or not any(merged.get(key) for key in ("num_attention_heads", "kv_lora_rank")):
        return []  # no attention, no K/V
    kinds = _layer_kinds(merged, layers)
    shared = merged.get("num_kv_shared_layers")
    kept = kinds[: layers - shared] if type(shared) is int and 0 < shared <= layers else kinds
    window = merged.get("sliding_window")
    rows: list[tuple[int, int | None]] = []
    for i, kind in enumerate(kept):
        if kind in ("full_attention", "sliding_attention"):
            sliding = kind == "sliding_attention" and type(window) is int
            rows.append((_row_elements(merged, kind, i), window if sliding else None))
    return rows


def _layer_kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """Kind of each layer, from layer_types or the spacing keys; all full without any."""
    declared = config.get("layer_types")
    if isinstance(declared, list) and len(declared) >= layers:
        return [str(kind) for kind in declared[:layers]]
    for key, other in (
        ("full_attention_interval", "linear_attention"),
        ("sliding_window_pattern", "sliding_attention"),
    ):
        step = config.get(key)
        if type(step) is int and step > 0:
            return ["full_attention" if (i + 1) % step == 0 else other for i in range(layers)]
    return ["full_attention"] * layers


def _row_elements(config: Mapping[str, Any], kind: str, layer: int) -> int:
    """K and V elements one position adds to one layer."""
    rank, rope = config.get("kv_lora_rank"), config.get("qk_rope_head_dim")
    if type(rank) is int and type(rope) is int and rank > 0:
        return rank + rope  # latent attention keeps one latent row and the shared rope key
    heads = _at(config.get("num_attention_heads"), layer, 1)
    kv_heads = _at(config.get("num_key_value_heads"), layer, heads)
    width = _at(config.get("head_dim"), layer, _at(config.get("hidden_size"), layer, 0) // max(heads, 1))
    if kind == "full_attention":
        width = _at(config.get("global_head_dim"), layer, width)
        if config.get("attention_k_eq_v"):
            kv_heads = _at(config.get("num_global_key_value_heads"), layer, kv_heads)
    return 2 * kv_heads * width


def _at(value: Any, layer: int, default: int) -> int:
    """An integer, or the entry of a per-layer list."""
    if isinstance(value, list) and layer < len(value):
        value = value[layer]
    return value if type(value) is int and 0 <= value <= _LARGEST else default


def _element_bytes(index: Mapping[str, TensorInfo]) -> int:
    """Bytes of one activation: 4 when the checkpoint's floats are float32, else 2."""
    floats: dict[str, int] = {}
    for info in index.values():
        if info.dtype in ("F32", "BF16", "F16"):
            floats[info.dtype] = floats.get(info.dtype, 0) + info.nbytes
    return 4 if floats and max(floats, key=lambda d: floats[d]) == "F32" else 2


def size(nbytes: int) -> str:
    """Bytes in the largest unit that leaves at least 1."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.2f} {UNITS[unit]}" if unit else f"{nbytes} B"
