"""From a verify's logits to what every row emits, with one host transfer for the whole lane.

Rows of a lane may run under different laws, filters and processors. They are split into groups that share
everything, each group is judged by `laws` on the device, and the results are packed into one int32 array:

    tokens (L) | accepted | flags | draft ids (K) | logprobs (L) | alternative ids (L*n) | their logprobs (L*n)

Log-probabilities travel as float32 bit patterns, and only when some row asks for them. A group's result does
not depend on its neighbours, so a row in a mixed lane gets exactly what it gets alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite

import mlx.core as mx

from .errors import message
from .greedy import PLAIN, GreedyChoice
from .laws import accept_coupled, accept_greedy, accept_rejection
from .noise import gumbel, uniform
from .processors import History, process_rows
from .sampling import Sampling
from .shaping import assemble, logprobs_of, shape_logprobs
from .types import Draft

Logprob = tuple[int, float, list[tuple[int, float]]]  # token id, its logprob, (id, logprob) of the best ones

_BAD_Q, _BAD_LOGITS = 1, 2
_NO_HISTORY = History(())
NOT_FINITE = message(
    "target logits",
    "NaN, infinity or no possible token",
    "finite numbers",
    "Check the weights, their dtype and banned tokens",
)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What acceptance must know about one row of the lane.

    Attributes:
        settings, seed: how it samples, and its noise seed.
        position: absolute index of the token drawn at verify row 0 (committed positions + 1).
        history: what stands before verify row 0; its tokens are read only when `settings.needs_history`.
    """

    settings: Sampling
    seed: int = 0
    position: int = 0
    history: History = _NO_HISTORY

    def positions(self, count: int) -> list[int]:
        """Positions of `count` tokens from verify row 0 on."""
        return list(range(self.position, self.position + count))


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one row may emit, before stops and limits cut it.

    Attributes:
        tokens: accepted drafts, then the target's own token; without it when `error` is set.
        accepted: drafts accepted.
        draft_ids: what was drafted, counts[b] ids.
        draft_fault: why a drafted token could not be tested, "" when all could.
        error: why the row cannot go on past `tokens`, "" when it can.
        logprobs: (id, logprob, alternatives) per token, None when the row did not ask.
    """

    tokens: list[int]
    accepted: int
    draft_ids: list[int] = field(default_factory=list)
    draft_fault: str = ""
    error: str = ""
    logprobs: list[Logprob] | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """Columns of the packed array, and the host facts needed to read it."""

    drafted: int  # K
    counts: tuple[int, ...]
    vocab: int
    asked: tuple[int | None, ...]  # alternatives wanted per row
    alternatives: int | None = None  # n columns per token, None when nobody asked
    errors: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """L."""
        return self.drafted + 1

    @property
    def logprobs_at(self) -> int:
        """First column of the log-probabilities."""
        return self.width + 2 + self.drafted


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """Lazy result of one accept.

    Attributes:
        packed: (B, columns) int32, see the module docstring.
        tokens: (B, L) int32; accepted: (B,) int32. Both lazy, for use on the device.
    """

    packed: mx.array
    tokens: mx.array
    accepted: mx.array
    layout: Layout

    def start(self) -> None:
        """Have the device compute it, without waiting."""
        mx.async_eval(self.packed)

    @property
    def next_anchors(self) -> mx.array:
        """(B,) int32, the last token each row emits; lazy, so a further forward can be built on it."""
        if self.layout.drafted == 0:
            return self.tokens[:, 0]
        return mx.take_along_axis(self.tokens, self.accepted[:, None], axis=1)[:, 0]

    def read(self) -> list[RowResult]:
        """Wait for the device once and unpack."""
        return unpack(self.packed.tolist(), self.layout)


@dataclass(frozen=True, slots=True)
class GreedyStep:
    """Lazy result of one plain greedy step of every row: the common case in the fewest operations.

    Attributes:
        ids: (B,) int32.
        check: (B,), finite where the row's logits are.
    """

    ids: mx.array
    check: mx.array

    @property
    def next_anchors(self) -> mx.array:
        """(B,) int32, the token each row emits; lazy, as in `AcceptResult`."""
        return self.ids

    def start(self) -> None:
        """Have the device compute it, without waiting."""
        mx.async_eval(self.ids, self.check)

    def read(self) -> list[RowResult]:
        """Wait for the device once and unpack."""
        mx.eval(self.ids, self.check)
        found = zip(self.ids.tolist(), self.check.tolist(), strict=True)
        return [RowResult([t], 0) if isfinite(c) else RowResult([], 0, error=NOT_FINITE) for t, c in found]


@dataclass(frozen=True, slots=True)
class GreedyBlock:
    """Lazy result of a verify of greedy rows: the device chooses, what is accepted is counted here.

    Attributes:
        ids: (B, L) int32, the target's choice after each verified row.
        check: (B, L), finite where the row's logits are.
        drafts: (B, K) int32.
    """

    ids: mx.array
    check: mx.array
    drafts: mx.array
    layout: Layout

    def start(self) -> None:
        """Have the device compute it, without waiting."""
        mx.async_eval(self.ids, self.check, self.drafts)

    def read(self) -> list[RowResult]:
        """Wait for the device once; `accept_greedy` over plain numbers."""
        mx.eval(self.ids, self.check, self.drafts)
        counts, vocab = self.layout.counts, self.layout.vocab
        results = []
        for ids, check, drafts, count in zip(
            self.ids.tolist(), self.check.tolist(), self.drafts.tolist(), counts, strict=True
        ):
            accepted = 0
            while accepted < count and ids[accepted] == drafts[accepted] and isfinite(check[accepted]):
                accepted += 1
            error = "" if isfinite(check[accepted]) else NOT_FINITE
            tokens = ids[:accepted] if error else ids[: accepted + 1]
            drafted = drafts[:count]
            results.append(RowResult(tokens, accepted, drafted, _outside(drafted, vocab), error))
        return results


@dataclass(slots=True)
class _Group:
    """Rows that are judged together, and their processed logits (b, L, V)."""

    rows: list[int]
    logits: mx.array
    error: str = ""  # of a user processor; counts only when a row it spoilt is used


def accept(
    plan: Sequence[RowPlan],
    logits: mx.array,
    draft: Draft,
    vocab_limit: int | None = None,
    greedy: GreedyChoice = PLAIN,
) -> AcceptResult | GreedyStep | GreedyBlock:
    """Judge a verify.

    Args:
        plan: one RowPlan per row (B).
        logits: (B, L, V) raw.
        draft: tokens (B, K) with K = L - 1, counts and probs as in `Draft`.
        vocab_limit: ids from here on mean nothing (padding of the embedding): never accepted nor drawn.
        greedy: chooses the tokens of greedy rows.
    """
    rows, width, vocab = logits.shape
    limit = vocab if vocab_limit is None else min(vocab, vocab_limit)
    plain = all(row.settings.plain_greedy for row in plan)
    if plain and width == 1:
        return GreedyStep(*greedy(mx.squeeze(logits, 1), limit))
    counts = tuple([width - 1] * rows if draft.counts is None else draft.counts)
    asked = tuple(row.settings.logprobs for row in plan)
    if plain:
        layout = Layout(width - 1, counts, limit, asked, None, ("",) * rows)
        return GreedyBlock(*greedy(logits, limit), draft.tokens.astype(mx.int32), layout)
    wanted = [n for n in asked if n is not None]
    n = min(max(wanted), limit) if wanted else None
    groups = _groups(plan, logits, draft.tokens)
    parts = []
    for group in groups:
        members, own = [plan[b] for b in group.rows], [counts[b] for b in group.rows]
        parts.append(_judge(members, group, draft, _picker(group.rows, rows), own, limit, n, greedy))
    order = [group.rows for group in groups]
    tokens, accepted, flags = (assemble(list(zip(order, [p[i] for p in parts], strict=True))) for i in range(3))
    columns = [tokens, accepted[:, None], flags[:, None], draft.tokens.astype(mx.int32)]
    if n is not None:
        columns.append(assemble(list(zip(order, [p[3] for p in parts], strict=True))))
    errors = [""] * rows
    for group in groups:
        for b in group.rows:
            errors[b] = group.error
    layout = Layout(width - 1, counts, limit, asked, n, tuple(errors))
    return AcceptResult(mx.concatenate(columns, axis=1), tokens, accepted, layout)


def _finite(best: mx.array) -> mx.array:
    """False for NaN (max hands it on) and for a row with no finite entry."""
    return (best - best) == 0


def _groups(plan: Sequence[RowPlan], logits: mx.array, drafts: mx.array) -> list[_Group]:
    """Rows with equal law and filters share a group; a row whose logits are processed stands alone."""
    shared: dict[object, list[int]] = {}
    alone: list[_Group] = []
    for b, row in enumerate(plan):
        settings = row.settings
        if settings.touches_logits:
            alone.append(_processed(b, row, logits[b], drafts[b]))
        else:
            law = settings.law
            shared.setdefault((law, None if law == "greedy" else settings.shape_key), []).append(b)
    whole = len(plan)
    return [_Group(rows, _picker(rows, whole)(logits)) for rows in shared.values()] + alone


def _processed(b: int, row: RowPlan, logits: mx.array, drafts: mx.array) -> _Group:
    rows, error = process_rows(logits, row.settings, row.history, drafts)
    return _Group([b], rows[None], error)


def _picker(rows: Sequence[int], whole: int) -> Callable[[mx.array], mx.array]:
    """Selects the group's rows of a lane array; does nothing when the group is the lane."""
    if len(rows) == whole:
        return lambda value: value
    index = mx.array(list(rows))
    return lambda value: value[index]


def _judge(
    plan: Sequence[RowPlan],
    group: _Group,
    draft: Draft,
    pick: Callable[[mx.array], mx.array],
    counts: Sequence[int],
    limit: int,
    n: int | None,
    greedy: GreedyChoice,
) -> tuple[mx.array, mx.array, mx.array, mx.array | None]:
    """tokens (b, L), accepted (b,), flags (b,), log-probability columns or None."""
    drafts = pick(draft.tokens).astype(mx.int32)
    settings = plan[0].settings
    logits = group.logits[..., :limit] if limit < group.logits.shape[-1] else group.logits
    faulty = None
    if settings.law == "greedy":
        ids, check = greedy(group.logits, limit)
        usable = _finite(check)
        accepted, tokens = accept_greedy(ids, drafts, counts, usable)
    else:
        usable = _finite(mx.max(logits, axis=-1))
        logprobs = shape_logprobs(logits, settings)
        seeds = [row.seed for row in plan]
        if settings.law == "coupled":
            noise = gumbel(seeds, [row.positions(logits.shape[1]) for row in plan], "token", limit)
            accepted, tokens = accept_coupled(logprobs, noise, drafts, counts, usable)
        else:
            noise = gumbel(seeds, [row.positions(1) for row in plan], "residual", limit)[:, 0]
            uniforms = uniform(seeds, [row.positions(drafts.shape[1]) for row in plan])
            q = None if draft.probs is None else pick(draft.probs)
            accepted, tokens, faulty = accept_rejection(logprobs, q, drafts, counts, uniforms, noise, usable)
    used = usable[:, 0] if drafts.shape[1] == 0 else mx.take_along_axis(usable, accepted[:, None], axis=1)[:, 0]
    flags = mx.where(used, 0, _BAD_LOGITS)
    if faulty is not None:
        flags = flags + faulty * _BAD_Q
    columns = None if n is None else _logprob_columns(logits, tokens, n, [row.settings.logprobs for row in plan])
    return tokens, accepted, flags, columns


def _logprob_columns(logits: mx.array, tokens: mx.array, n: int, asked: Sequence[int | None]) -> mx.array:
    """(b, L * (1 + 2 n)) int32: bits of the chosen tokens' logprobs, ids and bits of the n best ones.

    They describe the processed logits before filters and temperature, as mlx-lm reports them.
    """
    rows, width, _ = logits.shape
    if all(count is None for count in asked):
        return mx.zeros((rows, width * (1 + 2 * n)), dtype=mx.int32)
    logprobs = logprobs_of(logits)
    chosen = mx.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]
    columns = [chosen.view(mx.int32)]
    if n:
        ids = best_ids(logprobs, n)
        columns.append(ids.astype(mx.int32).reshape(rows, -1))
        columns.append(mx.take_along_axis(logprobs, ids, axis=-1).view(mx.int32).reshape(rows, -1))
    return mx.concatenate(columns, axis=1)


def best_ids(logprobs: mx.array, n: int) -> mx.array:
    """Ids of the n largest log-probabilities, best first; of equal ones the lowest id.

    logprobs (..., V) float32 -> (..., n) int64. Half-precision logits are full of equal values: which of
    them are named must not depend on n, which is the lane's, and the first one is what an argmax takes.
    """
    vocab = logprobs.shape[-1]
    # Bit patterns of values up to 0 order them backwards, so one integer holds both criteria.
    keys = logprobs.view(mx.uint32).astype(mx.int64) * vocab + mx.arange(vocab)
    return mx.sort(mx.partition(keys, kth=n - 1, axis=-1)[..., :n], axis=-1) % vocab


# -- host side ------------------------------------------------------------------------------------------


def unpack(packed: Sequence[Sequence[int]], layout: Layout) -> list[RowResult]:
    """Rows of the packed array, as lists, to results."""
    return [_unpack_row(values, b, layout) for b, values in enumerate(packed)]


def _unpack_row(values: Sequence[int], b: int, layout: Layout) -> RowResult:
    width = layout.width
    accepted, flags = values[width], values[width + 1]
    drafted = list(values[width + 2 : width + 2 + layout.counts[b]])
    error = ""
    if flags & _BAD_LOGITS:
        error = layout.errors[b] or NOT_FINITE
    emitted = list(values[: accepted if error else accepted + 1])
    fault = _outside(drafted, layout.vocab)
    if not fault and flags & _BAD_Q:
        fault = "a drafted token cannot have been drawn from the distribution given for it"
    logprobs = None
    count = layout.asked[b]
    if count is not None:
        logprobs = [_logprob(values, i, token, count, layout) for i, token in enumerate(emitted)]
    return RowResult(emitted, accepted, drafted, fault, error, logprobs)


def _outside(drafted: Sequence[int], vocab: int) -> str:
    """Which drafted id is none, in words; "" when all are."""
    if not drafted or (min(drafted) >= 0 and max(drafted) < vocab):
        return ""
    first = next(token for token in drafted if not 0 <= token < vocab)
    return f"drafted id {first} is outside 0..{vocab - 1}"


def _logprob(values: Sequence[int], i: int, token: int, count: int, layout: Layout) -> Logprob:
    n, start = layout.alternatives or 0, layout.logprobs_at
    ids_at = start + layout.width + i * n
    bits_at = ids_at + layout.width * n
    top = [(values[ids_at + j], _as_float(values[bits_at + j])) for j in range(min(count, n))]
    return token, _as_float(values[start + i]), top


def _as_float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])
