"""Qwen 3.5, 3.6 and 3.8 for mlx-spec: hybrid gated-delta targets, MTP heads and DFlash drafters."""

__version__ = "0.1.0"
