"""Medians, paired ratios and token differences. Plain Python, no mlx."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of a few measurements, which stay with it."""

    median: float
    low: float
    high: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Spread of at least one value; ValueError for none."""
        if not values:
            raise ValueError("no values to describe")
        return cls(statistics.median(values), min(values), max(values), tuple(values))

    @property
    def relative(self) -> float:
        """(high - low) / median; how much the runs disagree."""
        return (self.high - self.low) / self.median if self.median else 0.0


def paired_ratios(arm: Sequence[float], base: Sequence[float]) -> Spread:
    """Spread of arm[i] / base[i]: both sides of a pair ran within moments of each other.

    A machine that slows down for a minute moves both sides, so pairs say more than the ratio of two medians.
    """
    return Spread.of([a / b for a, b in zip(arm, base, strict=True)])


def geometric_mean(values: Sequence[float]) -> float:
    """exp(mean(log x)), the mean that fits ratios: 2x and 0.5x cancel. ValueError for no values."""
    if not values:
        raise ValueError("no values to average")
    return math.exp(math.fsum(math.log(v) for v in values) / len(values))


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first position where two replies differ (one ending early counts), None when equal."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return None if len(left) == len(right) else min(len(left), len(right))


def verdict(ratios: Sequence[float]) -> str:
    """What all pairs agree on: "faster 3/3", "slower 3/3", or how many were faster."""
    faster = sum(r > 1 for r in ratios)
    if faster == 0:
        return f"slower {len(ratios)}/{len(ratios)}"
    return f"faster {faster}/{len(ratios)}"


def settled(rates: Sequence[float], tolerance: float = 0.1) -> bool:
    """True when the last two of several repeats agree within `tolerance`."""
    return len(rates) >= 2 and abs(rates[-1] - rates[-2]) <= tolerance * max(rates[-1], rates[-2])
