"""The output head a draft is drawn from: the target's own, or a cheaper one that only drafts see.

A step of a small head spends most of its time in the output matrix. Two options make it smaller, and neither can
change a reply, because acceptance weighs every draft against the law it was really drawn from:

- `draft_head_bits`: a copy of the target's matrix in 4 or 8 bits;
- `draft_vocab_size`, `draft_vocab`: only the rows of frequent tokens; the others become impossible to draft.
"""

# mypy: disable-error-code="misc, no-any-return"
# mlx.nn is untyped to mypy: its classes and calls are Any.

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_spec.errors import LoadError

log = logging.getLogger("mlx_spec_qwen35")

CHUNK = 8192
"""Rows that are unpacked at a time: one piece of the matrix in float at once, not all of it."""
GROUPS = (64, 32)
"""Quantisation groups, the first that divides the hidden size."""


class DraftOutput(nn.Module):
    """An output matrix of its own, over all ids or over a selection of them.

    Attributes:
        rows: the matrix as a linear layer, (n, D).
        ids: token id of each row, (n,) int32; None for row i = id i.
    """

    def __init__(self, rows: nn.Module, vocab_size: int, ids: mx.array | None):
        super().__init__()
        self.rows = rows
        self._ids, self._vocab_size = ids, vocab_size

    @property
    def ids(self) -> mx.array | None:
        return self._ids

    def __call__(self, hidden: mx.array) -> mx.array:
        """Post-norm hidden (B, D) -> logits (B, V), -inf where there is no row."""
        scores = self.rows(hidden)
        if self._ids is None:
            return scores
        nothing = mx.full((scores.shape[0], self._vocab_size), -mx.inf, scores.dtype)
        return mx.put_along_axis(nothing, mx.broadcast_to(self._ids, scores.shape), scores, axis=-1)


def draft_output(
    matrix: Any, vocab_size: int, options: Mapping[str, object], ends: Collection[int]
) -> tuple[DraftOutput | None, str]:
    """The output head that the options ask for, None for the target's own; and which it is, in words.

    Args:
        matrix: the target's output layer, or its embedding when the two are tied.
        ends: ids that end a reply; they stay possible under `draft_vocab_size` alone.
    """
    bits, size, file = (options.get(key) for key in ("draft_head_bits", "draft_vocab_size", "draft_vocab"))
    if bits is None and size is None and file is None:
        return None, "the target's output head"
    ids = None if size is None and file is None else _chosen(vocab_size, size, file, ends)
    index = None if ids is None else mx.array(ids, dtype=mx.int32)
    shown = "" if ids is None else f", {len(ids)} of {vocab_size} ids"
    if type(bits) is not int:
        return DraftOutput(_selected(matrix, index), vocab_size, index), f"the target's rows{shown}"
    rows = requantised(matrix, bits, index)
    if rows is not None:
        return DraftOutput(rows, vocab_size, index), f"a copy of the target's in {bits} bits{shown}"
    log.warning(
        "draft_head_bits: found a piece of only zeros after packing, expected numbers. Drafts use the target's matrix"
    )
    note = "the target's rows (packing them gave zeros)"
    return (None if index is None else DraftOutput(_selected(matrix, index), vocab_size, index)), note + shown


# -- which ids -----------------------------------------------------------------------------------------


def _chosen(vocab_size: int, size: object, file: object, ends: Collection[int]) -> list[int]:
    """The first `size` ids of the ranking; without a file, the lowest, which merges make frequent."""
    ranked = read_ranking(Path(str(file)), vocab_size) if file is not None else list(range(vocab_size))
    if type(size) is int and size < len(ranked):
        rest = sorted(e for e in ends if e < vocab_size)
        ranked = list(dict.fromkeys([*ranked[:size], *(rest if file is None else ())]))
    return ranked


def read_ranking(file: Path, vocab_size: int) -> list[int]:
    """Token ids of a file, most frequent first: a JSON list, or one id per line. May raise LoadError."""
    try:
        text = file.read_text(encoding="utf-8")
        values: Any = json.loads(text) if text.lstrip().startswith("[") else [int(line) for line in text.split()]
    except (OSError, ValueError) as error:
        raise _bad(
            file, getattr(error, "strerror", None) or str(error), "a JSON list of ids, or one id per line"
        ) from error
    bad = next((v for v in values if type(v) is not int or not 0 <= v < vocab_size), None)
    if bad is not None:
        raise _bad(file, repr(bad), f"ids from 0 to {vocab_size - 1}")
    if len(set(values)) != len(values) or not values:
        raise _bad(file, "ids that repeat" if values else "no ids", "each id once, the most frequent first")
    return list(values)


def _bad(file: Path, found: str, expected: str) -> LoadError:
    step = "Correct the file, or leave draft_vocab out"
    return LoadError(f"draft_vocab {file}", found=found, expected=expected, next_step=step, code="QW35")


# -- the matrix ----------------------------------------------------------------------------------------


def requantised(
    matrix: Any, bits: int, ids: mx.array | None = None, quantise: Callable[..., Sequence[mx.array]] = mx.quantize
) -> nn.QuantizedLinear | None:
    """A packed copy of (chosen) rows, made piece by piece; None when a piece came out as zeros.

    A Metal command that runs out of memory leaves zeros and no error, hence the look at the result.
    """
    width = int(_unpacked(matrix, slice(0, 1)).shape[-1])
    group = next((g for g in GROUPS if width % g == 0), None)
    count = matrix.weight.shape[0] if ids is None else ids.size
    if group is None:
        raise LoadError(
            "draft_head_bits",
            found=f"a hidden size of {width}",
            expected=f"a multiple of {GROUPS[-1]}, to pack it in groups",
            next_step="Leave draft_head_bits out",
            code="QW36",
        )
    pieces = []
    for lo in range(0, count, CHUNK):
        place: Any = slice(lo, lo + CHUNK) if ids is None else ids[lo : lo + CHUNK]
        rows = _unpacked(matrix, place)
        piece = list(quantise(rows, group_size=group, bits=bits))
        lost = mx.any(rows != 0) & ~mx.any(mx.stack(piece[1:]) != 0)
        if lost.item():  # every piece is looked at: one of them may be lost alone
            return None
        pieces.append(piece)
    weight, scales, biases = (mx.concatenate(parts) for parts in zip(*pieces, strict=True))
    out = nn.QuantizedLinear(width, count, bias=False, group_size=group, bits=bits)
    out.weight, out.scales, out.biases = weight, scales, biases
    return out


def _unpacked(matrix: Any, place: Any) -> mx.array:
    """Rows of a linear layer or a table, in float: (n, D)."""
    if "scales" not in matrix:
        return matrix.weight[place]
    biases = matrix.biases[place] if matrix.get("biases") is not None else None
    return mx.dequantize(
        matrix.weight[place], matrix.scales[place], biases, matrix.group_size, matrix.bits, matrix.mode
    )


def _selected(matrix: Any, ids: mx.array | None) -> nn.Module:
    """The same rows in the same form, as a linear layer; each is packed by itself and can be picked."""
    place: Any = slice(None) if ids is None else ids
    if "scales" not in matrix:
        weight = matrix.weight[place]
        dense = nn.Linear(1, 1, bias=False)
        dense.weight = weight
        return dense
    out = nn.QuantizedLinear(64, 1, bias=False, group_size=matrix.group_size, bits=matrix.bits, mode=matrix.mode)
    out.weight, out.scales = matrix.weight[place], matrix.scales[place]
    if matrix.get("biases") is not None:
        out.biases = matrix.biases[place]
    return out
