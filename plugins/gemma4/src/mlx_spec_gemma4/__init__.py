"""Gemma 4 for mlx-spec: every text target mlx-lm loads, and the assistants trained to draft for them."""

__version__ = "0.1.0"
