"""Measured figures of the pair on prompts from the held-out modules."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_training.corpus import held_out_prompts, load_tokenizer, token_stream
from demo_training.layers import Linear
from demo_training.rounds import figures_of
from demo_training.settings import SEED
from torch import Tensor

from .model import Target
from .mtp import Head, unroll
from .sample import generate
from .settings import Work
from .train_head import load_head
from .train_target import held_out_loss, load_target

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 64, 192


@torch.no_grad()
def matches(target: Target, head: Head, rows: Tensor, drafts: int) -> Tensor:
    """Whether draft j at an anchor equals the text, bool [B, Q, drafts]; `unroll` says why it is fed."""
    found = []
    for j, logits in enumerate(unroll(target, head, rows, target(rows)[0], drafts), start=1):
        found.append(logits[:, :-1].argmax(-1) == rows[:, j + 1 :])
    count = min(f.shape[1] for f in found)
    return torch.stack([f[:, :count] for f in found], dim=-1)


@torch.no_grad()
def sampled_figures(target: Target, head: Head, rows: Tensor, given: int, temperature: float) -> dict[str, Any]:
    """Chance that exact rejection keeps a draft sampled at each position, averaged over sampled text."""
    hidden, _ = target(rows)
    wanted, kept = target.logits(hidden), []
    for j, logits in enumerate(unroll(target, head, rows, hidden, 4), start=1):
        p = torch.softmax(wanted[:, j : j + logits.shape[1]] / temperature, -1)
        q = torch.softmax(logits / temperature, -1)
        kept.append(round(float(torch.minimum(p, q).sum(-1)[:, given - 1 :].mean()), 4))
    return {"temperature": temperature, "expected_acceptance_on_text": kept}


def continuations(target: Target, prompts: Tensor, new: int, temperature: float) -> Tensor:
    """Prompts and `new` tokens more, [B, P + new]."""
    torch.manual_seed(SEED)
    return generate(target, prompts, prompts.shape[1] + new, torch.full((len(prompts),), temperature))


def evaluate(work: Work, gemma: Path) -> dict[str, Any]:
    """All figures of the weights as published, computed in float32; printed, saved and returned."""
    Linear.compute = torch.float32
    tokenizer = load_tokenizer(gemma)
    target, head = load_target(work.target), load_head(work)
    held = token_stream(tokenizer, held_out=True)
    loss = held_out_loss(target, held)
    prompts = torch.tensor(held_out_prompts(tokenizer, PROMPTS, PROMPT_TOKENS))
    greedy = continuations(target, prompts, NEW_TOKENS, 0.0)
    warm = continuations(target, prompts, NEW_TOKENS, 0.7)
    kept = {n: matches(target, head, greedy, n) for n in (1, 2, 3, 4, 5)}
    figures = {
        "parameters": [sum(p.numel() for p in m.parameters()) for m in (target, head)],
        "held_out_tokens": len(held),
        "held_out_loss": round(loss, 4),
        "held_out_perplexity": round(math.exp(loss), 3),
        "prompts": PROMPTS,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "distinct_tokens_per_row": round(float(np.mean([len(set(r[PROMPT_TOKENS:].tolist())) for r in greedy])), 1),
        "greedy": {f"depth {n}": figures_of(found, PROMPT_TOKENS - 1) for n, found in kept.items()},
        "sampled": sampled_figures(target, head, warm, PROMPT_TOKENS, 0.7),
    }
    (work.root / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1))
    for row in greedy[:4].tolist():
        print("=" * 60)
        print(tokenizer.decode(row[:PROMPT_TOKENS]), end="<|>")
        print(tokenizer.decode(row[PROMPT_TOKENS:], skip_special_tokens=False))
    return figures
