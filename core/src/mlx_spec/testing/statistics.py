"""Were these tokens drawn from these distributions? Two seeded tests over many draws.

Draw i was made from law q_i, which may depend on everything before it. Under the claim

    u_i = mass of tokens likelier than x_i, plus a uniform part of q_i(x_i)     is uniform on (0, 1)
    sum of (log q_i(x_i) - E log q_i) / sqrt(sum of Var log q_i)                 is near a standard normal

The first finds laws of the wrong shape, the second a wrong temperature. Limits are chosen so that a true
claim fails about once in a million seeds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import mlx.core as mx

UNIFORM_LIMIT = 2.7  # sqrt(n) times the largest gap of the distribution function (Kolmogorov): p = 1e-6
NORMAL_LIMIT = 4.9  # standard deviations: p = 1e-6
FEWEST = 300  # draws; fewer say nothing


@dataclass(slots=True)
class Draws:
    """Draws collected so far: laws (n, V) float32 and token ids (n,)."""

    laws: list[mx.array] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def add(self, law: mx.array, token: int) -> None:
        """One draw: law (V,), the token that came out."""
        self.laws.append(law)
        self.tokens.append(token)

    def __len__(self) -> int:
        return len(self.tokens)

    def complaint(self, seed: int = 0) -> str:
        """Why these tokens were not drawn from these laws, in words; "" when nothing speaks against it."""
        laws = mx.stack(self.laws).astype(mx.float32)
        picked = mx.array(self.tokens)[:, None]
        chosen = mx.take_along_axis(laws, picked, axis=1)
        impossible = int((chosen <= 0).sum().item())
        if impossible:
            return f"{impossible} of {len(self)} tokens that have probability 0 in the law given for them"
        mass = laws.sum(axis=1)
        if float(mx.max(mx.abs(mass - 1)).item()) > 1e-3:
            return f"laws with a mass from {float(mx.min(mass).item()):.4f} to {float(mx.max(mass).item()):.4f}"
        above = mx.where(laws > chosen, laws, 0.0).sum(axis=1)
        u = above + mx.random.uniform(shape=above.shape, key=mx.random.key(seed)) * chosen[:, 0]
        return _uniform(u, len(self)) or _likelihood(laws, chosen[:, 0])


def _uniform(u: mx.array, n: int) -> str:
    """Kolmogorov's test of uniformity."""
    ordered = mx.sort(u)
    steps = mx.arange(n + 1) / n
    gap = mx.max(mx.maximum(mx.abs(steps[1:] - ordered), mx.abs(ordered - steps[:-1])))
    value = math.sqrt(n) * float(gap.item())
    if value <= UNIFORM_LIMIT:
        return ""
    return f"{n} tokens that do not fit their laws (distance {value:.1f}, true laws stay below {UNIFORM_LIMIT})"


def _likelihood(laws: mx.array, chosen: mx.array) -> str:
    """Are the tokens as likely as their laws say they would be on average?"""
    logs = mx.where(laws > 0, mx.log(mx.maximum(laws, 1e-30)), 0.0)
    mean = (laws * logs).sum(axis=1)
    spread = (laws * logs * logs).sum(axis=1) - mean * mean
    total = float(mx.sum(spread).item())
    if total < 1e-6:  # point masses: nothing is random
        return ""
    z = float(mx.sum(mx.log(chosen) - mean).item()) / math.sqrt(total)
    if abs(z) <= NORMAL_LIMIT:
        return ""
    way = "likelier" if z > 0 else "less likely"
    size = f"{abs(z):.1f} standard deviations, true laws stay below {NORMAL_LIMIT}"
    return f"tokens that are {way} than their laws say ({size})"
