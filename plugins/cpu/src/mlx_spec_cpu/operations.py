"""The operations themselves: what is built, and the same in plain mlx."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .native import library

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

    from .recipe import Recipe


def linear_reference(
    x: mx.array,
    weight: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    bias: mx.array | None = None,
    mode: str = "dense",
    group_size: int = 0,
    bits: int = 0,
) -> mx.array:
    """x (..., K) times weight (N, K) transposed, plus bias (N,): (..., N), by mlx's own operations."""
    import mlx.core as mx

    if mode == "dense":
        y = x @ weight.T
    else:
        y = mx.quantized_matmul(x, weight, scales, biases, group_size=group_size, bits=bits, mode=mode)
    return y if bias is None else y + bias


def gathered_reference(
    x: mx.array,
    weight: mx.array,
    indices: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    mode: str = "dense",
    group_size: int = 0,
    bits: int = 0,
) -> mx.array:
    """x (..., M, K) times weight[indices] (..., N, K) transposed: (..., M, N), by mlx's own operations."""
    import mlx.core as mx

    if mode == "dense":
        return mx.gather_mm(x, weight.swapaxes(-1, -2), rhs_indices=indices)
    return mx.gather_qmm(
        x, weight, scales, biases, rhs_indices=indices, transpose=True, group_size=group_size, bits=bits, mode=mode
    )


def rms_norm_reference(x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
    """x (..., D) over its root mean square, times weight (D,), by mlx's own operation."""
    import mlx.core as mx

    return mx.fast.rms_norm(x, weight, eps)


def attention_reference(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | None = None,
    causal: bool = False,
) -> mx.array:
    """queries (B, H, L, D) over keys and values (B, Hkv, T, D): (B, H, L, Dv), by mlx's own operation."""
    import mlx.core as mx

    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask="causal" if causal else mask)


def packed_attention_reference(
    queries: mx.array,
    keys: tuple[mx.array, mx.array, mx.array],
    values: tuple[mx.array, mx.array, mx.array],
    scale: float,
    group_size: int,
    bits: int,
    mask: mx.array | None = None,
    causal: bool = False,
) -> mx.array:
    """As `attention_reference` over packed keys and values (words, scales, biases), unpacked first."""
    import mlx.core as mx

    k, v = (mx.dequantize(*part, group_size=group_size, bits=bits).astype(queries.dtype) for part in (keys, values))
    return attention_reference(queries, k, v, scale, mask, causal)


def rope_reference(
    x: mx.array,
    dims: int,
    neighbours: bool,
    scale: float,
    inverse: mx.array,
    offset: int | mx.array = 0,
) -> mx.array:
    """x (B, ..., L, D), row l turned by (offset + l) * scale * inverse (dims / 2,), by mlx's own."""
    import mlx.core as mx

    return mx.fast.rope(x, dims, traditional=neighbours, base=None, scale=scale, offset=offset, freqs=1 / inverse)


def rows_reference(
    indices: mx.array,
    weight: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    mode: str = "dense",
    group_size: int = 0,
    bits: int = 0,
) -> mx.array:
    """Rows `indices` (...) of a table (V, D): (..., D), by mlx's own operations."""
    import mlx.core as mx

    if scales is None:
        return weight[indices]
    chosen = None if biases is None else biases[indices]
    return mx.dequantize(weight[indices], scales[indices], chosen, group_size=group_size, bits=bits, mode=mode)


def activation_reference(gate: mx.array, x: mx.array | None = None, act: str = "silu") -> mx.array:
    """act(gate) * x, act "silu" or "gelu-tanh", by mlx's own operations."""
    import mlx.nn as nn

    y = nn.silu(gate) if act == "silu" else nn.gelu_approx(gate)
    return y if x is None else y * x


def short_convolution_reference(x: mx.array, weight: mx.array, bias: mx.array | None = None) -> mx.array:
    """x (B, T, C) with taps (K, C), channel by channel: (B, T - K + 1, C), by mlx's own operation."""
    import mlx.core as mx

    y = mx.conv1d(x, weight.T[..., None], groups=weight.shape[1])
    return y if bias is None else y + bias


def gated_delta_reference(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """The gated delta rule of core in plain mlx operations: (y, state, delta)."""
    from mlx_spec.gated_delta import GatedDelta

    return GatedDelta()(q, k, v, g, beta, state)  # type: ignore[no-any-return]


def replay_delta_reference(state: mx.array, k: mx.array, g: mx.array, delta: mx.array, keep: mx.array) -> mx.array:
    """The replay of core in plain mlx operations: the state after keep[b] steps of row b."""
    from mlx_spec.gated_delta import GatedDelta

    return GatedDelta().replay(state, k, g, delta, keep)


def layer_reference(recipe: Recipe, *inputs: mx.array, **place: Any) -> list[mx.array]:
    """The outputs of a recipe, by mlx's own operations."""
    from .recipe import by_mlx

    return by_mlx(recipe, *inputs, **place)


def build_linear() -> Callable[..., Any]:
    """The linear kernel."""
    return library().linear  # type: ignore[no-any-return]


def build_gathered() -> Callable[..., Any]:
    """The kernel over experts."""
    return library().gathered  # type: ignore[no-any-return]


def build_rms_norm() -> Callable[..., Any]:
    """The norm."""
    return library().rms_norm  # type: ignore[no-any-return]


def build_attention() -> Callable[..., Any]:
    """The attention."""
    return library().attention  # type: ignore[no-any-return]


def build_packed_attention() -> Callable[..., Any]:
    """The attention over packed keys and values."""
    return library().packed_attention  # type: ignore[no-any-return]


def build_activation() -> Callable[..., Any]:
    """The activations."""
    return library().activation  # type: ignore[no-any-return]


def build_short_convolution() -> Callable[..., Any]:
    """The convolution along each channel."""
    return library().short_convolution  # type: ignore[no-any-return]


def build_greedy() -> Callable[..., Any]:
    """The greedy choice."""
    return library().greedy  # type: ignore[no-any-return]


def greedy_reference(logits: mx.array, limit: int) -> tuple[mx.array, mx.array]:
    """logits (..., V) -> ids and largest (...) over the first `limit` of V, by mlx's own operations."""
    import mlx.core as mx

    from mlx_spec.shaping import greedy_ids

    return greedy_ids(logits, limit), mx.max(logits[..., :limit], axis=-1).astype(mx.float32)


def build_soft_cap() -> Callable[..., Any]:
    """The soft cap."""
    return library().soft_cap  # type: ignore[no-any-return]


def soft_cap_reference(logits: mx.array, cap: float) -> mx.array:
    """Logits (...) -> cap * tanh(logits / cap) (...), by core's module."""
    from mlx_spec.softcap import SoftCap

    return SoftCap(cap)(logits)


def build_gated_delta() -> Callable[..., Any]:
    """The gated delta rule."""
    return library().gated_delta  # type: ignore[no-any-return]


def build_replay_delta() -> Callable[..., Any]:
    """The replay of its steps."""
    return library().replay_delta  # type: ignore[no-any-return]


def build_rope() -> Callable[..., Any]:
    """The rotation."""
    return library().rope  # type: ignore[no-any-return]


def build_rows() -> Callable[..., Any]:
    """The rows of a table."""
    return library().rows  # type: ignore[no-any-return]


def build_layer() -> Callable[..., Any]:
    """function(recipe, *inputs) -> outputs, in one operation."""
    return lambda recipe, *inputs, **place: recipe.build(inputs[0].dtype)(*inputs, **place)


def swap_linear(module: nn.Module) -> nn.Module | None:
    """Linear layers, embeddings as output heads, plain and quantised."""
    from .modules import LINEAR
    from .twins import swapper

    return swapper(LINEAR)(module)


def swap_experts(module: nn.Module) -> nn.Module | None:
    """mlx-lm's switch layers, plain and quantised."""
    from .modules import EXPERTS
    from .twins import swapper

    return swapper(EXPERTS)(module)


def swap_norm(module: nn.Module) -> nn.Module | None:
    """nn.RMSNorm."""
    from .modules import NORM
    from .twins import swapper

    return swapper(NORM)(module)


def swap_rope(module: nn.Module) -> nn.Module | None:
    """Rotary positions of mlx and mlx-lm."""
    from .rope import swap_rope

    return swap_rope(module)


def swap_gated_delta(module: nn.Module) -> nn.Module | None:
    """Core's gated delta rule."""
    from .recurrence import swap_gated_delta

    return swap_gated_delta(module)


def swap_choice(module: nn.Module) -> nn.Module | None:
    """Core's greedy choice, on the kernel."""
    from .choice import swap_choice

    return swap_choice(module)


def swap_cap(module: nn.Module) -> nn.Module | None:
    """Core's soft cap, on the kernel."""
    from .choice import swap_cap

    return swap_cap(module)


def swap_attention(module: nn.Module) -> nn.Module | None:
    """Attention layers of mlx-lm."""
    from .attention import swap_attention

    return swap_attention(module)


def swap_layers(module: nn.Module) -> nn.Module | None:
    """Decoder layers of mlx-lm whose parts run on the kernels, and modules that describe themselves."""
    from .blueprint import swap_described
    from .gemma import swap_gemma
    from .layers import swap_block

    return next((new for swap in (swap_block, swap_gemma, swap_described) if (new := swap(module)) is not None), None)


def swap_activation(module: nn.Module) -> nn.Module | None:
    """Activations, and layers of mlx-lm that call one."""
    from .activation import swap_activation

    return swap_activation(module)


def swap_convolution(module: nn.Module) -> nn.Module | None:
    """nn.Conv1d along each channel."""
    from .convolution import swap_convolution

    return swap_convolution(module)
