"""How a drafter draws: every row the way its request samples, with the noise acceptance expects."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from .accept import RowPlan
from .greedy import PLAIN, GreedyChoice
from .laws import fit_width
from .noise import gumbel
from .processors import process_rows
from .shaping import assemble, shape_logprobs


class Drawer:
    """The `draw` of one propose; remembers the tokens it drew, which are history for processors.

    greedy rows take the argmax; `rejection` rows sample and report the distribution they sampled from;
    `coupled` rows use the very noise the target will use at that position, so they agree when p and q do.
    """

    def __init__(
        self,
        plan: Sequence[RowPlan],
        vocab_size: int,
        vocab_limit: int | None = None,
        greedy: GreedyChoice = PLAIN,
    ):
        self.plan = plan
        self.vocab_size = vocab_size
        self.limit = vocab_size if vocab_limit is None else min(vocab_size, vocab_limit)
        self.greedy = greedy
        self._drawn: list[mx.array] = []
        self._history = any(row.settings.needs_history for row in plan)

    def __call__(self, logits: mx.array, step: int) -> tuple[mx.array, mx.array | None]:
        """logits (B, Vd) raw -> tokens (B,) int32, and q (B, V) float32 or None when no row reports one.

        Vd may be smaller than the target's V: the missing ids are impossible. Rows that do not run under
        `rejection` have zeros in q. Steps come in order, 0 first.
        """
        if step > len(self._drawn):
            raise ValueError(f"draw of step {step}: found {len(self._drawn)} earlier steps, expected {step}")
        logits = fit_width(logits, self.vocab_size, -math.inf)
        parts = [self._group(rows, self._prepare(rows, logits, step), step) for rows in self._groups()]
        tokens = assemble([(rows, drawn) for rows, drawn, _ in parts])
        del self._drawn[step:]
        self._drawn.append(tokens)
        if all(q is None for _, _, q in parts):
            return tokens, None
        zeros = [(rows, q if q is not None else mx.zeros((len(rows), self.limit))) for rows, _, q in parts]
        return tokens, assemble(zeros)

    @property
    def greedy_limit(self) -> int | None:
        """When a draw is the greedy choice from raw logits for every row, what it chooses among; else None."""
        plain = all(row.settings.law == "greedy" and not row.settings.touches_logits for row in self.plan)
        return self.limit if plain else None

    def _groups(self) -> list[list[int]]:
        """Row indices that are drawn together."""
        groups: dict[object, list[int]] = {}
        for b, row in enumerate(self.plan):
            settings = row.settings
            key: object = (settings.law, None if settings.law == "greedy" else settings.shape_key)
            groups.setdefault(b if settings.touches_logits else key, []).append(b)
        return list(groups.values())

    def _prepare(self, rows: Sequence[int], logits: mx.array, step: int) -> mx.array:
        """The group's logits (b, V), processed with the history the drawn position has."""
        if len(rows) < len(self.plan):
            logits = logits[mx.array(list(rows))]
        row = self.plan[rows[0]]
        if not row.settings.touches_logits:
            return logits
        drafts = mx.stack([drawn[rows[0]] for drawn in self._drawn[:step]]) if step and self._history else None
        processed, error = process_rows(logits, row.settings, row.history, drafts, first=step)
        return logits if error else processed  # a guess without the failing processor is still a guess

    def _group(self, rows: list[int], logits: mx.array, step: int) -> tuple[list[int], mx.array, mx.array | None]:
        plan = [self.plan[b] for b in rows]
        settings = plan[0].settings
        if settings.law == "greedy":
            return rows, self.greedy(logits, self.limit)[0], None
        logprobs = shape_logprobs(logits[..., : self.limit], settings)
        coupled = settings.law == "coupled"
        seeds, positions = [row.seed for row in plan], [[row.position + step] for row in plan]
        noise = gumbel(seeds, positions, "token" if coupled else "draft", self.limit)[:, 0]
        tokens = mx.argmax(logprobs + noise, axis=-1).astype(mx.int32)
        return rows, tokens, None if coupled else mx.exp(logprobs)
