"""Scripted drafters: right, wrong, right for m tokens, random, empty, broken."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..draft_state import DraftState
from ..models import Drafter
from ..types import Capabilities, Draft, DrafterCard

if TYPE_CHECKING:
    from ..lane import Lane

Script = Callable[[Sequence[int], int], list[int]]  # (tokens so far, budget) -> draft ids


class ScriptedDrafter(Drafter):
    """Drafts what `script(tokens, budget)` returns for each row; rows may get different lengths.

    Attributes:
        calls: number of proposes so far.
        seen: per call, the budgets it was given.
    """

    capabilities = Capabilities(history="none")

    def __init__(self, script: Script, kind: str = "scripted", taps: Sequence[str] = ()):
        self.card = DrafterCard(kind=kind, model_type="")
        self.script = script
        self.taps = tuple(taps)
        self.calls = 0
        self.seen: list[list[int]] = []

    def make_state(self) -> DraftState:
        """Nothing to remember."""
        return DraftState()

    def propose(self, lane: Lane, budget: Sequence[int]) -> Draft:
        """Ask the script for every row."""
        import mlx.core as mx

        self.calls += 1
        self.seen.append(list(budget))
        rows = [self.script(tokens, k)[:k] if k else [] for tokens, k in zip(lane.tokens, budget, strict=True)]
        width = max(len(r) for r in rows)
        padded = [r + [0] * (width - len(r)) for r in rows]
        return Draft(mx.array(padded, dtype=mx.int32).reshape(len(rows), width), [len(r) for r in rows])


def oracle(replies: dict[tuple[int, ...], list[int]]) -> Script:
    """Right every time: replies maps a prompt to the reply plain decoding gives."""

    def script(tokens: Sequence[int], budget: int) -> list[int]:
        for prompt, reply in replies.items():
            if tuple(tokens[: len(prompt)]) == prompt:
                done = len(tokens) - len(prompt)
                return reply[done : done + budget]
        return []

    return script


def mixed(replies: dict[tuple[int, ...], list[int]], right: int, vocab_size: int) -> Script:
    """Right for `right` tokens, then wrong; right = 0 is always wrong."""
    truth = oracle(replies)

    def script(tokens: Sequence[int], budget: int) -> list[int]:
        ids = truth(tokens, budget)
        return [t if i < right else (t + 1) % vocab_size for i, t in enumerate(ids)]

    return script


def noise(vocab_size: int, seed: int = 0) -> Script:
    """Random ids and random lengths."""
    rng = random.Random(seed)

    def script(tokens: Sequence[int], budget: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(rng.randint(0, budget))]

    return script


def flaky(replies: dict[tuple[int, ...], list[int]], chance: float, vocab_size: int, seed: int = 0) -> Script:
    """Each token right with probability `chance`, so every accept count occurs."""
    truth = oracle(replies)
    rng = random.Random(seed)

    def script(tokens: Sequence[int], budget: int) -> list[int]:
        return [t if rng.random() < chance else (t + 1) % vocab_size for t in truth(tokens, budget)]

    return script


def empty(tokens: Sequence[int], budget: int) -> list[int]:
    """Never drafts anything."""
    return []


class BrokenDrafter(ScriptedDrafter):
    """Breaks its contract in the way `fault` names.

    fault: "raise", "none", "range", "negative", "float", "shape", "state" or "nan".
    """

    def __init__(self, fault: str, vocab_size: int):
        super().__init__(lambda tokens, budget: [1] * budget, kind=f"broken-{fault}")
        self.fault, self.vocab_size = fault, vocab_size

    def propose(self, lane: Lane, budget: Sequence[int]) -> Draft:
        """The fault, every time."""
        import mlx.core as mx

        self.calls += 1
        shape = (lane.size, max(budget))
        if self.fault == "raise":
            raise ValueError("scripted fault")
        if self.fault == "none":
            return None  # type: ignore[return-value]
        if self.fault in ("range", "negative"):
            bad = self.vocab_size + 7 if self.fault == "range" else -3
            return Draft(mx.full(shape, bad, dtype=mx.int32))
        if self.fault == "float":
            return Draft(mx.zeros(shape))
        if self.fault == "shape":
            return Draft(mx.zeros((lane.size + 1, *shape), dtype=mx.int32))
        if self.fault == "state":
            lane.target.forward(mx.zeros((lane.size, 1), dtype=mx.int32), lane.states)
            return Draft(mx.zeros(shape, dtype=mx.int32))
        probs = mx.full((*shape, self.vocab_size), float("nan"))
        return Draft(mx.ones(shape, dtype=mx.int32), None, probs)
