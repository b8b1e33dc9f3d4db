"""float32 values in the dtype a checkpoint is written in, and back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""mlx's names of the dtypes unquantised weights can be written in -> safetensors' names."""


def as_dtype(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.generic]:
    """float32 values in the bytes of a safetensors dtype, rounded to nearest, ties to even."""
    if dtype == "F32":
        return values
    if dtype == "F16":
        with np.errstate(over="ignore"):  # infinities are reported by the caller, with the tensor's name
            return values.astype(np.float16)
    words = values.view(np.uint32)
    return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)


def as_float32(stored: npt.NDArray[np.generic], dtype: str) -> npt.NDArray[np.float32]:
    """What `as_dtype` made, as float32 again."""
    if dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)
