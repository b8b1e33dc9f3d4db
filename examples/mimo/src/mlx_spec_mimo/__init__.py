"""MiMo-7B for mlx-spec: mlx-lm's targets, drafting with the MTP layer of their own checkpoint."""

__version__ = "0.1.0"
