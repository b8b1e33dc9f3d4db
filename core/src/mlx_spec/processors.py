"""What changes raw logits before they are shaped: bias, penalties, user processors, minimum length.

Row i of a verify is processed with exactly the history it has: the committed tokens (prompt, reply, anchor
last) followed by the first i drafted ones. Drafts stay on the device; nothing here syncs with the host.
Semantics and order are those of mlx-lm's make_logits_processors; user processors come after the built-in
ones, the minimum length last.

Letters: R processed rows, V vocabulary, c context size of a penalty.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType

import mlx.core as mx

from .errors import SpecError, message
from .sampling import Processor, Sampling

_HOLDERS = (FunctionType, MethodType, CellType, partial, tuple, list, dict)
_MANY = 1000  # a mapping with more entries is a vocabulary or the like


@dataclass(frozen=True, slots=True)
class History:
    """What stands before the first verify row of one request.

    Attributes:
        tokens: prompt + reply as host ints, anchor last.
        reply_length: reply tokens among them.
        end_ids: ids that end the reply (the ones `min_tokens` holds back).
    """

    tokens: Sequence[int]
    reply_length: int = 0
    end_ids: Collection[int] = ()


def process_rows(
    logits: mx.array, settings: Sampling, history: History, drafts: mx.array | None = None, first: int = 0
) -> tuple[mx.array, str]:
    """Processed copy of logits (R, V), and an error; row r follows history.tokens + drafts[: first + r].

    Args:
        logits: (R, V) raw, any float dtype; not changed.
        drafts: (>= first + R - 1,) int32, may be lazy; None when no row has a drafted token behind it.

    Returns:
        The rows, and why a user processor failed ("" when none did). From the row it failed at on, all logits
        are NaN: a failure on the far side of a refused draft must not end the request.
    """
    if settings.logit_bias:
        logits = add_bias(logits, settings.logit_bias)
    before = len(history.tokens) + first
    if before or logits.shape[0] > 1:
        for penalty, context, apply in (
            (settings.repetition_penalty, settings.repetition_context_size, repeat_penalty),
            (settings.presence_penalty, settings.presence_context_size, presence_penalty),
            (settings.frequency_penalty, settings.frequency_context_size, frequency_penalty),
        ):
            if penalty:
                logits = _penalise(logits, penalty, context, apply, history.tokens, drafts, first)
    error = ""
    if settings.processors:
        logits, error = _user(logits, settings.processors, history.tokens, drafts, first)
    if settings.min_tokens:
        held = settings.min_tokens - history.reply_length - first
        logits = hold_back(logits, min(held, logits.shape[0]), history.end_ids)
    return logits, error


def add_bias(logits: mx.array, bias: Mapping[int, float]) -> mx.array:
    """logits (R, V) with bias[id] added; ids outside the vocabulary have no logit to add to."""
    known = {token: value for token, value in bias.items() if token < logits.shape[-1]}
    if not known:
        return logits
    return logits.at[:, mx.array(list(known))].add(mx.array(list(known.values())))


def hold_back(logits: mx.array, rows: int, ids: Collection[int]) -> mx.array:
    """The first `rows` rows of logits (R, V) with `ids` made impossible."""
    known = sorted(token for token in ids if token < logits.shape[-1])
    if rows <= 0 or not known:
        return logits
    index = mx.broadcast_to(mx.array(known), (rows, len(known)))
    held = mx.put_along_axis(logits[:rows], index, mx.array(-math.inf, dtype=logits.dtype), axis=-1)
    return held if rows == logits.shape[0] else mx.concatenate([held, logits[rows:]])


# -- penalties: (logits (R, V), ids (R, w), valid (R, w), penalty) -> logits --------------------------


def repeat_penalty(logits: mx.array, ids: mx.array, valid: mx.array | None, penalty: float) -> mx.array:
    """Positive logits of seen ids divided by the penalty, negative ones multiplied (arXiv 1909.05858)."""
    seen = mx.take_along_axis(logits, ids, axis=-1)
    return mx.put_along_axis(logits, ids, mx.where(seen < 0, seen * penalty, seen / penalty), axis=-1)


def presence_penalty(logits: mx.array, ids: mx.array, valid: mx.array | None, penalty: float) -> mx.array:
    """The penalty subtracted once from every seen id."""
    return mx.put_along_axis(logits, ids, mx.take_along_axis(logits, ids, axis=-1) - penalty, axis=-1)


def frequency_penalty(logits: mx.array, ids: mx.array, valid: mx.array | None, penalty: float) -> mx.array:
    """The penalty subtracted once per occurrence; places outside the window subtract nothing."""
    amount = mx.array(penalty, dtype=logits.dtype)
    if valid is not None:
        amount = mx.where(valid, amount, mx.array(0, dtype=logits.dtype))
    return logits.at[mx.arange(logits.shape[0])[:, None], ids].subtract(amount)


def _penalise(
    logits: mx.array,
    penalty: float,
    context: int,
    apply: Callable[[mx.array, mx.array, mx.array | None, float], mx.array],
    tokens: Sequence[int],
    drafts: mx.array | None,
    first: int,
) -> mx.array:
    """Apply one penalty to every row with that row's own window of the last `context` tokens."""
    if not tokens and first == 0:  # the first row has seen nothing
        rest = _penalise(logits[1:], penalty, context, apply, tokens, drafts, 1) if logits.shape[0] > 1 else logits[1:]
        return mx.concatenate([logits[:1], rest])
    rows, vocab = logits.shape
    tail = list(tokens[-context:])
    seen = _joined(tail, drafts, first + rows - 1)
    ends = [len(tail) + first + r for r in range(rows)]
    width = min(context, ends[-1])
    # a window that is still short repeats its oldest token: harmless for set penalties, masked for counts
    index = [[max(0, end - width + j) for j in range(width)] for end in ends]
    valid = None if ends[0] >= width else mx.array([[end - width + j >= 0 for j in range(width)] for end in ends])
    ids = mx.clip(seen, 0, vocab - 1)[mx.array(index)]
    return apply(logits, ids, valid, penalty)


def _joined(tokens: Sequence[int], drafts: mx.array | None, count: int) -> mx.array:
    """Host tokens followed by the first `count` drafted ones, (n + count,) int32."""
    host = mx.array(list(tokens), dtype=mx.int32)
    if count == 0:
        return host
    if drafts is None or drafts.shape[0] < count:
        found = 0 if drafts is None else drafts.shape[0]
        raise ValueError(f"{count} drafted tokens are needed as history, found {found}")
    return mx.concatenate([host, drafts[:count].astype(mx.int32)])


# -- user processors ------------------------------------------------------------------------------------


def evaluate_held(processors: Sequence[Processor]) -> None:
    """Evaluate the arrays that processors hold, in the thread that made them: no other one could.

    Looks into closures, partial arguments, attributes of the processor, and containers in these.
    """
    held: list[mx.array] = []
    for processor in processors:
        for part in (processor, getattr(processor, "__self__", None)):
            for value in gc.get_referents(part):
                if value is not getattr(processor, "__globals__", None):
                    _collect(value, held, 5)
    mx.eval(held)


def _collect(value: object, held: list[mx.array], depth: int) -> None:
    if isinstance(value, mx.array):
        held.append(value)
    elif depth and isinstance(value, _HOLDERS) and not (isinstance(value, dict) and len(value) > _MANY):
        for item in gc.get_referents(value):
            if item is not getattr(value, "__globals__", None):
                _collect(item, held, depth - 1)


def _user(
    logits: mx.array, processors: Sequence[Processor], tokens: Sequence[int], drafts: mx.array | None, first: int
) -> tuple[mx.array, str]:
    """Call every processor once per row, in order, as single-token decoding would."""
    rows = logits.shape[0]
    seen = _joined(tokens, drafts, first + rows - 1)
    done: list[mx.array] = []
    for r in range(rows):
        row = logits[r : r + 1]  # an array of its own: processors may write into it
        for processor in processors:
            row, error = _call(processor, seen[: len(tokens) + first + r], row)
            if error:
                done.append(mx.full((rows - r, logits.shape[1]), math.nan, dtype=logits.dtype))
                return mx.concatenate(done), error
        done.append(row)
    return mx.concatenate(done), ""


def _call(processor: Processor, tokens: mx.array, row: mx.array) -> tuple[mx.array, str]:
    """(what the processor returned, "") or (row, why it cannot be used)."""
    what = f"logits processor {getattr(processor, '__name__', type(processor).__name__)}"
    try:
        out = processor(tokens, row)
    except SpecError as exc:
        return row, str(exc)
    except Exception as exc:  # the caller's code: it may end its own request, never the lane
        step = "Correct the processor; it is called with tokens (n,) int32 and logits (1, V)"
        return row, message(what, f"{type(exc).__name__}: {exc}", "logits", step)
    if isinstance(out, mx.array) and out.shape == row.shape:
        return out, ""
    found = f"shape {out.shape}" if isinstance(out, mx.array) else type(out).__name__
    return row, message(what, found, f"an array of shape {row.shape}", "Return the processed logits")
