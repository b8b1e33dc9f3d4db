"""Error and finding codes of the Qwen plugin, in the shape of `mlx_spec.codes`.

QW01-19 target and configuration, QW20-39 MTP heads, QW40-59 DFlash drafters, QW60-79 conversion.
"""

from __future__ import annotations

from mlx_spec.codes import Code

CODES = (
    Code("QW01", "A key of a Qwen 3.5 config.json that cannot be used", "files", ("config",)),
    Code("QW02", "A prompt with placeholders for images or video", "request", ("target",)),
    Code("QW03", "Weights of a Qwen 3.5 target in a layout that cannot be read", "files", ("weights",)),
    Code("QW04", "A tiny checkpoint of an unknown variant or drafter", "request", ("tiny",)),
)
