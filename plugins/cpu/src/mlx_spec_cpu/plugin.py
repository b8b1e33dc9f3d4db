"""The hooks of the CPU plugin: it brings kernels. Nothing heavy is imported before one is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_spec.hookspecs import hookimpl

if TYPE_CHECKING:
    from mlx_spec.registry import Register


@hookimpl
def spec_register(register: Register) -> None:
    """Bring the kernels; whether their library can be used is asked when a model loads."""
    from mlx_spec.registry import Kernel

    from . import operations as op
    from .native import ready

    cpu = ("cpu",)
    register.kernel(Kernel("linear", cpu, "1e-5", op.build_linear, op.linear_reference, op.swap_linear, ready))
    register.kernel(Kernel("experts", cpu, "1e-5", op.build_gathered, op.gathered_reference, op.swap_experts, ready))
    register.kernel(Kernel("embedding", cpu, "bitwise", op.build_rows, op.rows_reference, ready=ready))
    register.kernel(Kernel("rope", cpu, "1e-5", op.build_rope, op.rope_reference, op.swap_rope, ready))
    register.kernel(Kernel("rms-norm", cpu, "1e-5", op.build_rms_norm, op.rms_norm_reference, op.swap_norm, ready))
    register.kernel(
        Kernel("attention", cpu, "1e-5", op.build_attention, op.attention_reference, op.swap_attention, ready)
    )
    packed = ("packed-attention", cpu, "1e-5", op.build_packed_attention, op.packed_attention_reference)
    register.kernel(Kernel(*packed, ready=ready))
    delta = ("gated-delta", cpu, "1e-5", op.build_gated_delta, op.gated_delta_reference, op.swap_gated_delta, ready)
    register.kernel(Kernel(*delta))
    register.kernel(
        Kernel("replay-delta", cpu, "bitwise", op.build_replay_delta, op.replay_delta_reference, ready=ready)
    )
    register.kernel(
        Kernel("activation", cpu, "1e-5", op.build_activation, op.activation_reference, op.swap_activation, ready)
    )
    short = ("short-convolution", cpu, "1e-5", op.build_short_convolution, op.short_convolution_reference)
    register.kernel(Kernel(*short, op.swap_convolution, ready))
    register.kernel(Kernel("greedy", cpu, "bitwise", op.build_greedy, op.greedy_reference, op.swap_choice, ready))
    register.kernel(Kernel("soft-cap", cpu, "1e-5", op.build_soft_cap, op.soft_cap_reference, op.swap_cap, ready))
    register.kernel(Kernel("layers", cpu, "1e-5", op.build_layer, op.layer_reference, op.swap_layers, ready))
