"""Independent answers to the same questions: a float64 implementation, mlx-vlm and transformers."""
