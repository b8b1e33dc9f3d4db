"""Tiny cases through transformers' own classes on CPU torch. Needs transformers 5.24.0 and torch 2.13.0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from .cases import STEPS

VERSIONS = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
POSITION_SHIFT = -1
"""Its own generator drafts at the anchor's position (0); the same convention as ours is asked for here."""

FAMILIES = {
    "gemma4": "Gemma4",
    "gemma4_text": "Gemma4",
    "gemma4_unified": "Gemma4Unified",
    "gemma4_unified_text": "Gemma4Unified",
}


class Oracle:
    """One pair, loaded."""

    def __init__(self, target: Path, drafter: Path):
        config = json.loads((target / "config.json").read_text())
        kind = "ForConditionalGeneration" if "text_config" in config else "ForCausalLM"
        family = FAMILIES[config["model_type"]]
        if config.get("vision_config") is not None:
            config = {**config, "vision_config": None}
        self.target = self._load(getattr(transformers, family + kind), target, config)
        head = json.loads((drafter / "config.json").read_text())
        self.drafter = self._load(getattr(transformers, family + "AssistantForCausalLM"), drafter, head)
        self.embed = self.target.get_input_embeddings()

    def _load(self, cls: Any, path: Path, config: dict[str, Any]) -> Any:
        built = cls.config_class.from_dict(config)
        model, info = cls.from_pretrained(
            path, config=built, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if info["missing_keys"]:
            raise RuntimeError(f"{path}: transformers found no {sorted(info['missing_keys'])[:5]}")
        return model.eval()

    @torch.no_grad()
    def run(self, ids: list[int]) -> dict[str, Any]:
        """logits (n, V), hidden (n, H) after the final norm, draft tokens and draft logits (STEPS, V)."""
        n = len(ids) - 1
        out = self.target(
            input_ids=torch.tensor([ids[:-1]]),
            use_cache=False,
            output_hidden_states=True,
            return_shared_kv_states=True,
        )
        hidden = out.hidden_states[-1]
        # Without a cache the sliding K/V are whole, and its mask (distance <= window) would reach one key
        # further than the target's own; cut to what a sliding cache holds, both see the same keys.
        window = self.target.config.get_text_config().sliding_window
        cuts = {"sliding_attention": window, "full_attention": n}
        shared = {kind: tuple(t[:, :, -cuts[kind] :] for t in kv) for kind, kv in out.shared_kv_states.items()}
        tokens, rows = self._draft(ids[-1], hidden[:, -1:], shared, n)
        return {
            "logits": out.logits[0].numpy(),
            "hidden": hidden[0].numpy(),
            "draft": tokens,
            "draft_logits": np.stack(rows),
        }

    def _draft(self, anchor: int, hidden: Any, shared: Any, n: int) -> tuple[list[int], list[np.ndarray]]:
        token, tokens, rows = torch.tensor([[anchor]]), [], []
        for _ in range(STEPS):
            out = self.drafter(
                inputs_embeds=torch.cat([self.embed(token), hidden], dim=-1),
                position_ids=torch.tensor([[n + POSITION_SHIFT]]),
                shared_kv_states=shared,
                use_cache=False,
            )
            token, hidden = out.logits.argmax(dim=-1), out.last_hidden_state
            tokens.append(int(token))
            rows.append(out.logits[0, -1].numpy())
        return tokens, rows
