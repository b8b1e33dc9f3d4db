"""Measured figures of the pair on prompts from the held-out modules."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import torch
from demo_training.corpus import held_out_prompts, load_tokenizer, token_stream
from demo_training.layers import Linear
from demo_training.rounds import figures_of
from demo_training.settings import SEED
from torch import Tensor

from .model import Drafter, Target
from .sample import generate
from .settings import Work
from .train_drafter import load_drafter, observe, unroll
from .train_target import held_out_loss, load_target

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 64, 192
DRAFTS = (1, 2, 3, 4, 5, 7, 9)  # a block wide: L - 1


@torch.no_grad()
def matches(target: Target, drafter: Drafter, rows: Tensor, drafts: int) -> Tensor:
    """Whether draft j at an anchor equals the text, bool [B, Q, drafts].

    The unrolled steps are fed the text itself. While all earlier drafts were right that is what a real
    round feeds, and afterwards the round is over, so the leading matches are those of a real round.
    """
    found = []
    for j, logits in enumerate(unroll(target, drafter, rows, observe(target, rows), drafts), start=1):
        wanted = rows[:, j + 1 : j + 1 + logits.shape[1]]
        found.append(logits[:, : wanted.shape[1]].argmax(-1) == wanted)
    count = min(f.shape[1] for f in found)
    return torch.stack([f[:, :count] for f in found], dim=-1)


@torch.no_grad()
def sampled_figures(target: Target, drafter: Drafter, rows: Tensor, given: int, temperature: float) -> dict[str, Any]:
    """Chance that exact rejection keeps a draft sampled at each position, averaged over sampled text."""
    kept, seen = [], observe(target, rows)
    for j, logits in enumerate(unroll(target, drafter, rows, seen, 3), start=1):
        wanted = seen.wanted[:, j : j + logits.shape[1]]
        p, q = torch.softmax(wanted / temperature, -1), torch.softmax(logits.float() / temperature, -1)
        kept.append(round(float(torch.minimum(p, q).sum(-1)[:, given - 1 :].mean()), 4))
    return {"temperature": temperature, "expected_acceptance_on_text": kept}


def continuations(target: Target, prompts: Tensor, new: int, temperature: float) -> Tensor:
    """Prompts and `new` tokens more, [B, P + new]."""
    torch.manual_seed(SEED)
    return generate(target, prompts, prompts.shape[1] + new, torch.full((len(prompts),), temperature))


def evaluate(work: Work) -> dict[str, Any]:
    """All figures of the bfloat16-rounded weights, computed in float32; printed, saved and returned."""
    Linear.compute = torch.float32
    tokenizer = load_tokenizer(work.tokenizer)
    target, drafter = load_target(work.target), load_drafter(work)
    held = token_stream(tokenizer, held_out=True)
    loss = held_out_loss(target, held)
    prompts = torch.tensor(held_out_prompts(tokenizer, PROMPTS, PROMPT_TOKENS))
    greedy = continuations(target, prompts, NEW_TOKENS, 0.0)
    warm = continuations(target, prompts, NEW_TOKENS, 0.7)
    kept = {n: matches(target, drafter, greedy, n) for n in DRAFTS}
    figures = {
        "held_out_tokens": len(held),
        "held_out_loss": round(loss, 4),
        "held_out_perplexity": round(math.exp(loss), 3),
        "prompts": PROMPTS,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "distinct_tokens_per_row": round(float(np.mean([len(set(r[PROMPT_TOKENS:].tolist())) for r in greedy])), 1),
        "greedy": {f"L={n + 1}": figures_of(found, PROMPT_TOKENS - 1) for n, found in kept.items()},
        "sampled": sampled_figures(target, drafter, warm, PROMPT_TOKENS, 0.7),
    }
    (work.root / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1))
    show(tokenizer, greedy)
    return figures


def show(tokenizer: Any, rows: Tensor, count: int = 4) -> None:
    """Print a few continuations."""
    for row in rows[:count].tolist():
        print("=" * 60)
        print(tokenizer.decode(row[:PROMPT_TOKENS]), end="<|>")
        print(tokenizer.decode(row[PROMPT_TOKENS:], skip_special_tokens=False))
