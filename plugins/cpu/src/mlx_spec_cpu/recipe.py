"""Operations in a row, as data: run as one by the library, or one after the other by mlx.

A recipe is written once per layer. Its steps number their results as they go, inputs included.
"""

# mypy: disable-error-code="no-any-return"
# mlx.nn is untyped to mypy: its classes and calls are Any.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .native import library
from .operations import (
    attention_reference,
    greedy_reference,
    linear_reference,
    rms_norm_reference,
    rope_reference,
    rows_reference,
)

Lent = tuple[mx.array, mx.array, int, int]
"""Keys and values (1, Hkv, capacity, D) to be read from the first of these rows up to the second."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation: the name of the recipe's method and of the library's, and what both are given."""

    op: str
    args: tuple[Any, ...]
    given: dict[str, Any]


class Recipe:
    """What lies between two attentions of a model, say.

    Attributes:
        steps: in order; step i makes result i.
        outputs: (result, heads) of everything that leaves.
        feeds: (result, input), for calls that repeat the recipe.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.outputs: list[tuple[int, int]] = []
        self.feeds: list[tuple[int, int]] = []

    def _add(self, op: str, *args: Any, **given: Any) -> int:
        self.steps.append(Step(op, args, given))
        return len(self.steps) - 1

    def input(self, width: int, heads: int = 0) -> int:
        """The next input: (B, L, width), or (B, heads, L, width // heads)."""
        return self._add("input", width, heads)

    def ids(self) -> int:
        """The next input, token ids (B, L) int32: to be looked up, handed out and fed."""
        return self._add("ids")

    def embed(self, of: int, **weights: Any) -> int:
        """The rows of a table that ids name, weights as for `rows_reference`."""
        return self._add("embed", of, **weights)

    def join(self, first: int, second: int) -> int:
        """Two results side by side."""
        return self._add("join", first, second)

    def choose(self, of: int) -> int:
        """The greedy choice from logits, as ids: the best within the limit of the call."""
        return self._add("choose", of)

    def norm(self, of: int, weight: mx.array | None, eps: float, size: int) -> int:
        """rms_norm of every `size` values: of the width, or of each head; weight (size,)."""
        return self._add("norm", of, weight, eps, size)

    def linear(self, of: int, **weights: Any) -> int:
        """A linear layer, weights as for `linear_reference`; neighbours that read the same run side by side."""
        return self._add("linear", of, **weights)

    def combine(self, name: str, first: int, second: int) -> int:
        """ "add", "multiply", "silu" (silu(first) * second) or "gelu" (by its tanh approximation)."""
        return self._add("combine", name, first, second)

    def rotate(self, of: int, heads: int, dims: int, neighbours: bool, scale: float, inverse: mx.array) -> int:
        """Rotary positions of `heads` side by side, as `rope_reference` has them, at the offset of the call."""
        return self._add("rotate", of, heads, dims, neighbours, scale, inverse)

    def scale(self, of: int, weight: mx.array) -> int:
        """Every row times weight (width,), or (1,) for all of it."""
        return self._add("scale", of, weight)

    def attend(
        self, queries: int, keys: int, values: int, heads: int, key_heads: int, scale: float, window: int = 0
    ) -> int:
        """Causal attention over stored keys and values, after `keys` and `values` were added to them; once.

        window: keys a row sees, its own the last of them; 0 for all.
        """
        return self._add("attend", queries, keys, values, heads, key_heads, scale, window)

    def look(self, place: int, queries: int, heads: int, key_heads: int, scale: float, window: int = 0) -> int:
        """As `attend` over storage number `place` of those lent to a call, which the rows of the call end."""
        return self._add("look", place, queries, heads, key_heads, scale, window)

    def feed(self, of: int, into: int) -> None:
        """In a call that repeats the recipe, what every run but the first finds in an input."""
        self.feeds.append((of, into))

    def output(self, of: int, heads: int = 0) -> None:
        """The next output, in the shape an input would have."""
        self.outputs.append((of, heads))

    def build(self, dtype: mx.Dtype) -> Callable[..., list[mx.array]]:
        """function(*inputs of dtype, offset=0, keys, values, low, start, lent, repeat=1, limit=0) -> outputs.

        As `by_mlx`.

        One operation of the library. It holds the weights. Storage is filled in place when nobody else holds it
        by then.
        """
        program = library().Program(mx.zeros((), dtype))
        for step in self.steps:
            getattr(program, step.op)(*step.args, **step.given)
        for of, into in self.feeds:
            program.feed(of, into)
        for of, heads in self.outputs:
            program.output(of, heads)
        return program


def by_mlx(
    recipe: Recipe,
    *inputs: mx.array,
    offset: int | mx.array = 0,
    keys: mx.array | None = None,
    values: mx.array | None = None,
    low: int = 0,
    start: int = 0,
    lent: Sequence[Lent] = (),
    repeat: int = 1,
    limit: int = 0,
) -> list[mx.array]:
    """The outputs of a recipe, by mlx's own operations; then, when it attends, the filled storage.

    With `repeat` above 1 it runs so often over one row at that position, every run fed by the one before: outputs
    (B, repeat, width) hold a row per run. Such a recipe does not attend. What is chosen is one of the first `limit`
    ids, of all when it is 0.
    """
    given = dict(zip(_ports(recipe), inputs, strict=True))
    runs = []
    for _ in range(repeat):
        results, filled = _run(recipe, given, offset, keys, values, low, start, lent, limit)
        runs.append([_apart(results[of], heads) for of, heads in recipe.outputs])
        given |= {into: results[of] for of, into in recipe.feeds}
    joined = [mx.concatenate(rows, axis=-2 if rows[0].ndim > 2 else 1) for rows in zip(*runs, strict=True)]
    return joined + filled


def _ports(recipe: Recipe) -> list[int]:
    return [i for i, step in enumerate(recipe.steps) if step.op in ("input", "ids")]


def _run(
    recipe: Recipe,
    given: Mapping[int, mx.array],
    offset: int | mx.array,
    keys: mx.array | None,
    values: mx.array | None,
    low: int,
    start: int,
    lent: Sequence[Lent],
    limit: int,
) -> tuple[list[mx.array], list[mx.array]]:
    """Every result of one run, and the filled storage."""
    results: list[mx.array] = []
    filled: list[mx.array] = []
    for i, step in enumerate(recipe.steps):
        if step.op == "input":
            results.append(_side_by_side(given[i], step.args[1]))
        elif step.op == "ids":
            results.append(given[i])
        elif step.op == "embed":
            results.append(rows_reference(results[step.args[0]], **step.given))
        elif step.op == "join":
            results.append(mx.concatenate([results[of] for of in step.args], axis=-1))
        elif step.op == "choose":
            logits = results[step.args[0]]
            results.append(greedy_reference(logits, limit or logits.shape[-1])[0])
        elif step.op == "norm":
            of, weight, eps, size = step.args
            heads = results[of].reshape(*results[of].shape[:-1], -1, size)
            results.append(rms_norm_reference(heads, weight, eps).reshape(results[of].shape))
        elif step.op == "linear":
            results.append(linear_reference(results[step.args[0]], **step.given))
        elif step.op == "rotate":
            of, heads, dims, neighbours, scale, inverse = step.args
            turned = rope_reference(_apart(results[of], heads), dims, neighbours, scale, inverse, offset)
            results.append(_side_by_side(turned, heads))
        elif step.op == "scale":
            results.append(results[step.args[0]] * step.args[1])
        elif step.op == "look":
            place, queries, heads, _, scale, window = step.args
            stored, upto = lent[place][:2], lent[place][3]
            q, (k, v) = _apart(results[queries], heads), (a[:, :, lent[place][2] : upto] for a in stored)
            results.append(_side_by_side(_attention(q, k, v, scale, window), heads))
        elif step.op == "attend":
            queries, new_keys, new_values, heads, key_heads, scale, window = step.args
            k, v = _apart(results[new_keys], key_heads), _apart(results[new_values], key_heads)
            end = start + k.shape[2]
            for held, new in ((keys, k), (values, v)):
                if held is None:
                    raise ValueError("a recipe that attends needs keys and values")
                filled.append(mx.slice_update(held, new, mx.array([start]), axes=(2,)))
            q, (k, v) = _apart(results[queries], heads), (a[:, :, low:end] for a in filled)
            results.append(_side_by_side(_attention(q, k, v, scale, window), heads))
        else:
            name, first, second = step.args
            results.append(_COMBINE[name](results[first], results[second]))
    return results, filled


_COMBINE: dict[str, Callable[[mx.array, mx.array], mx.array]] = {
    "add": mx.add,
    "multiply": mx.multiply,
    "silu": lambda a, b: nn.silu(a) * b,
    "gelu": lambda a, b: nn.gelu_approx(a) * b,
}


def _attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float, window: int) -> mx.array:
    """The last query sees the last key; with a window, each the `window` keys up to its own."""
    if not window:
        return attention_reference(queries, keys, values, scale, causal=True)
    L, T = queries.shape[2], keys.shape[2]
    ahead = mx.arange(T - L, T)[:, None] - mx.arange(T)
    return attention_reference(queries, keys, values, scale, (ahead >= 0) & (ahead < window))


def _side_by_side(x: mx.array, heads: int) -> mx.array:
    """(B, H, L, D) -> (B, L, H * D) when there are heads."""
    return x.swapaxes(1, 2).flatten(2) if heads else x


def _apart(x: mx.array, heads: int) -> mx.array:
    """(B, L, W) -> (B, H, L, W / H) when there are heads."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2) if heads else x
