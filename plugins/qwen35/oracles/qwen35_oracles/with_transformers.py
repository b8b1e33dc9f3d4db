"""Tiny cases through transformers' own classes on CPU torch. Needs transformers 5.24.0 and torch 2.13.0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

VERSIONS = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
CLASSES = {"qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"}


class Oracle:
    """One checkpoint, loaded."""

    def __init__(self, path: Path):
        config = json.loads((path / "config.json").read_text())
        cls: Any = getattr(transformers, CLASSES[config["model_type"]])
        model, info = cls.from_pretrained(
            path,
            config=cls.config_class.from_dict(config),
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
        if info["missing_keys"]:
            raise RuntimeError(f"{path}: transformers found no {sorted(info['missing_keys'])[:5]}")
        self.model = model.eval()
        self.after: list[torch.Tensor] = []
        for layer in self.model.model.layers:
            layer.register_forward_hook(self._note)

    def _note(self, module: Any, given: Any, out: Any) -> None:
        self.after.append(out[0] if isinstance(out, tuple) else out)

    @torch.no_grad()
    def run(self, ids: list[int]) -> dict[str, Any]:
        """logits (n, V), hidden (n, H) after the final norm, residual (n, layers, H)."""
        self.after = []
        out = self.model.model(input_ids=torch.tensor([ids]), use_cache=False)
        hidden = out.last_hidden_state
        return {
            "logits": self.model.lm_head(hidden)[0].numpy(),
            "hidden": hidden[0].numpy(),
            "residual": torch.stack(self.after, dim=2)[0].numpy(),
        }
