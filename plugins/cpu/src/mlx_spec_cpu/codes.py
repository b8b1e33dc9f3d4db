"""Error codes of the CPU plugin, in the shape of `mlx_spec.codes`."""

from __future__ import annotations

from mlx_spec.codes import Code

CODES = (
    Code(
        "CP01",
        "A kernel library that is missing, or built for another MLX or version of the package",
        "install",
        ("native",),
    ),
    Code("CP02", "Kernels of an instruction set this processor or build does not have", "request", ("native",)),
)
