"""The built-in drafter `prompt-lookup`: copy what followed the longest match of the newest tokens.

No weights. Every row keeps an index from its last few tokens to the places they occurred before; the place
where the most tokens before it agree too wins, the newest one on a tie. A copy may run into itself, which
continues a repetition. The drafter stays silent on rows where its recent copies failed, and comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .draft_state import DraftState
from .errors import UsageError
from .models import Drafter
from .types import Capabilities, Draft, DrafterCard

if TYPE_CHECKING:
    from .lane import Lane

KIND = "prompt-lookup"
MIN_N, MAX_N = 3, 16  # matched tokens: fewer copy at random, more no longer tell places apart
CANDIDATES = 32  # earlier places compared per proposal, newest first
FAILURES = 3  # copies in a row without an accepted token before a match length falls silent
LONGEST_SILENCE = 64  # proposals


class NgramIndex:
    """One row's history by n-gram; every token is added once and looked at once.

    Attributes:
        tokens: the history, as far as it was added.
    """

    def __init__(self, min_n: int = MIN_N, max_n: int = MAX_N):
        self.min_n, self.max_n = min_n, max_n
        self.tokens: list[int] = []
        self._newest: dict[tuple[int, ...], int] = {}  # n-gram -> index of its last token, newest occurrence
        self._before: list[int] = []  # per index: the same n-gram's occurrence before that, -1 for none

    def extend(self, history: Sequence[int]) -> None:
        """Add what `history` has beyond the tokens already here."""
        n, newest, before = self.min_n, self._newest, self._before
        start = len(self.tokens)
        self.tokens += history[start:]
        for i in range(start, len(self.tokens)):
            if i + 1 < n:
                before.append(-1)
                continue
            key = tuple(self.tokens[i + 1 - n : i + 1])
            before.append(newest.get(key, -1))
            newest[key] = i

    def match(self) -> tuple[int, int]:
        """(index of the last token of the best earlier match, tokens matched); (-1, 0) when there is none."""
        if len(self.tokens) <= self.min_n:
            return -1, 0
        best, longest = -1, 0
        place = self._before[-1]
        for _ in range(CANDIDATES):
            if place < 0:
                break
            length = self._agreement(place)
            if length > longest:
                best, longest = place, length
            if longest >= self.max_n:
                break
            place = self._before[place]
        return best, longest

    def _agreement(self, place: int) -> int:
        """Tokens that agree backward from `place` and from the end; at least min_n, at most max_n."""
        tokens, end = self.tokens, len(self.tokens) - 1
        length = self.min_n
        while length < self.max_n and place >= length and tokens[place - length] == tokens[end - length]:
            length += 1
        return length

    def copy(self, place: int, count: int) -> list[int]:
        """`count` tokens from after `place` on; past the end of the history it goes on with its own copy."""
        out = self.tokens[place + 1 : place + 1 + count]
        period = len(self.tokens) - 1 - place
        while len(out) < count:
            out.append(out[len(out) - period])
        return out


class Silence:
    """When to keep quiet: matches of one length class that failed FAILURES times wait 2, 4, ... 64 turns."""

    def __init__(self) -> None:
        self._failed: dict[int, int] = {}
        self._wait: dict[int, int] = {}

    @staticmethod
    def group(length: int) -> int:
        """Class of a match length: 3..4, 5..8, 9 and more behave alike."""
        return 0 if length <= 4 else 1 if length <= 8 else 2

    def quiet(self, group: int) -> bool:
        """True when this class should sit out one more turn."""
        left = self._wait.get(group, 0)
        if left > 0:
            self._wait[group] = left - 1
        return left > 0

    def learn(self, group: int, accepted: int) -> None:
        """A copy of this class had `accepted` tokens accepted."""
        if accepted > 0:
            self._failed[group] = 0
            return
        failed = self._failed[group] = self._failed.get(group, 0) + 1
        if failed >= FAILURES:
            self._wait[group] = min(LONGEST_SILENCE, 2 ** (failed - FAILURES + 1))


class LookupRow:
    """What one request owns: its index, its silence, and the copy that waits for a verdict."""

    def __init__(self, min_n: int, max_n: int):
        self.index = NgramIndex(min_n, max_n)
        self.silence = Silence()
        self.pending: int | None = None
        self.reason = ""

    def propose(self, history: Sequence[int], budget: int) -> list[int]:
        """At most `budget` ids to follow `history`."""
        self.pending = None
        self.index.extend(history)
        if budget <= 0:
            return []
        place, length = self.index.match()
        if place < 0:
            self.reason = f"the last {self.index.min_n} tokens did not occur before"
            return []
        group = Silence.group(length)
        if self.silence.quiet(group):
            self.reason = f"copies after {length} matching tokens failed lately"
            return []
        self.reason = ""
        self.pending = group
        return self.index.copy(place, budget)

    def learn(self, accepted: int) -> None:
        """The verdict on the last proposal, if there was one."""
        if self.pending is not None:
            self.silence.learn(self.pending, accepted)
        self.pending = None


class PromptLookupDrafter(Drafter):
    """Point-mass drafts copied from prompt and reply. See the module's docstring.

    card.extra: prompt_lookup_min, prompt_lookup_max (tokens that must and may match), or min_n, max_n for short.
    """

    capabilities = Capabilities(history="none")

    def __init__(self, card: DrafterCard | None = None):
        self.card = card or DrafterCard(kind=KIND, model_type="")
        self.min_n, self.max_n = _lengths(self.card.extra)

    def make_state(self) -> DraftState:
        """An empty index for one row."""
        return DraftState(rows=[LookupRow(self.min_n, self.max_n)])

    def propose(self, lane: Lane, budget: Sequence[int]) -> Draft:
        """Copies for every row; rows without one have count 0."""
        import mlx.core as mx

        rows = _rows(lane)
        drafts = [row.propose(t, k) for row, t, k in zip(rows, lane.tokens, budget, strict=True)]
        counts = [len(d) for d in drafts]
        width = max(counts)
        padded = [d + [0] * (width - len(d)) for d in drafts]
        return Draft(mx.array(padded, dtype=mx.int32).reshape(len(rows), width), counts)

    def rollback(self, lane: Lane, keep: Sequence[int]) -> None:
        """Learn whether the copies held. The index itself only ever holds committed tokens."""
        for row, kept in zip(_rows(lane), keep, strict=True):
            row.learn(kept - 1)


def _rows(lane: Lane) -> list[LookupRow]:
    if lane.draft_state is None:
        raise RuntimeError("prompt-lookup on a lane without drafter state")
    return lane.draft_state.rows


def _either(extra: Any, name: str, short: str, default: int) -> Any:
    """The value under one of two spellings of a name."""
    if name in extra and short in extra:
        raise UsageError(
            f"{name} and {short}",
            found=f"{extra[name]!r} and {extra[short]!r}",
            expected="one of the two, which mean the same",
            next_step=f"Drop {short}",
            code="U74",
        )
    return extra.get(name, extra.get(short, default))


def _lengths(extra: Any) -> tuple[int, int]:
    low = _either(extra, "prompt_lookup_min", "min_n", MIN_N)
    high = _either(extra, "prompt_lookup_max", "max_n", max(MAX_N, low) if type(low) is int else MAX_N)
    for name, value in (("prompt_lookup_min", low), ("prompt_lookup_max", high)):
        if type(value) is not int or not 1 <= value <= 64:
            raise UsageError(
                name, found=repr(value), expected="a whole number from 1 to 64", next_step="Correct it", code="U76"
            )
    if low > high:
        raise UsageError(
            "prompt_lookup_min and prompt_lookup_max",
            found=f"{low} and {high}",
            expected="a minimum that is no larger than the maximum",
            next_step="Swap or correct them",
            code="U76",
        )
    return low, high
