"""prompt-lookup: the longest backward match, found incrementally, silent when it keeps failing."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence

import pytest

from mlx_spec.draft_state import DraftState
from mlx_spec.errors import UsageError
from mlx_spec.lane import Lane
from mlx_spec.lookup import CANDIDATES, LONGEST_SILENCE, NgramIndex, PromptLookupDrafter, Silence
from mlx_spec.types import DrafterCard


def brute(tokens: Sequence[int], low: int, high: int) -> tuple[int, int]:
    """The best earlier match by comparing every place; newest wins a tie."""
    end, best, longest = len(tokens) - 1, -1, 0
    for place in range(end - 1, low - 2, -1):
        n = 0
        while n < high and n <= place and tokens[place - n] == tokens[end - n]:
            n += 1
        if n >= low and n > longest:
            best, longest = place, n
    return best, longest


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("low", "high"), [(1, 3), (2, 5), (3, 16)])
def test_the_longest_backward_match_wins(seed, low, high):
    rng = random.Random(seed)
    tokens = [rng.randrange(3) for _ in range(40)]  # few enough that every candidate is looked at
    index, hits = NgramIndex(low, high), 0
    for n in range(1, len(tokens) + 1):
        index.extend(tokens[:n])
        want = brute(tokens[:n], low, high)
        hits += want[1] > 0
        assert index.match() == want
    assert hits > 5 and CANDIDATES >= 32


def test_the_newest_of_equal_matches_wins():
    index = NgramIndex(2, 4)
    index.extend([5, 6, 1, 9, 5, 6, 2, 9, 5, 6])
    place, length = index.match()
    assert (place, length) == (5, 3)  # "9 5 6" beats the older "5 6"
    assert index.copy(place, 3) == [2, 9, 5]
    index = NgramIndex(2, 2)
    index.extend([5, 6, 1, 5, 6, 2, 5, 6])
    assert index.copy(index.match()[0], 1) == [2]


def test_a_copy_runs_into_itself():
    index = NgramIndex(2, 8)
    index.extend([1, 2, 3, 1, 2, 3, 1, 2])
    assert index.copy(index.match()[0], 7) == [3, 1, 2, 3, 1, 2, 3]
    index = NgramIndex(2, 8)
    index.extend([4, 4, 4])
    assert index.copy(index.match()[0], 5) == [4] * 5


def test_short_histories_have_no_match():
    index = NgramIndex(3, 8)
    for history in ([], [1], [1, 1], [1, 1, 1]):
        index.extend(history)
        assert index.match() == (-1, 0)


class Counting(list):
    """A history that counts how many of its tokens are read."""

    reads = 0

    def __getitem__(self, item):
        out = super().__getitem__(item)
        Counting.reads += len(out) if isinstance(item, slice) else 1
        return out


def test_every_token_is_read_once():
    index, history = NgramIndex(), Counting()
    for step in range(3000):
        history.append(step % 11)
        index.extend(history)
        index.match()
    assert Counting.reads == 3000
    assert len(index.tokens) == 3000


def test_failing_copies_fall_silent_and_come_back():
    silence = Silence()
    waits, spoke = [], 0
    for _ in range(600):
        if silence.quiet(0):
            waits[-1] += 1
            continue
        spoke += 1
        silence.learn(0, 0)
        waits.append(0)
    assert waits[:6] == [0, 0, 2, 4, 8, 16]
    assert max(waits) == LONGEST_SILENCE
    assert not silence.quiet(1)  # another length class is not concerned
    while silence.quiet(0):
        pass
    silence.learn(0, 4)
    assert not silence.quiet(0)
    silence.learn(0, 0)
    assert not silence.quiet(0)


def lane_of(drafter: PromptLookupDrafter, rows: Sequence[Sequence[int]]) -> Lane:
    state = DraftState.merge([drafter.make_state() for _ in rows])
    lane = Lane(None, drafter, None, state)  # type: ignore[arg-type]
    lane.tokens = [list(r) for r in rows]
    return lane


def test_rows_have_counts_of_their_own():
    drafter = PromptLookupDrafter(DrafterCard("prompt-lookup", "", extra={"min_n": 2, "max_n": 6}))
    lane = lane_of(drafter, [[1, 2, 3, 4, 1, 2], [9, 8, 7, 6, 5], [1, 2, 1, 2], [7, 7, 7]])
    draft = drafter.propose(lane, [3, 3, 5, 0])
    assert list(draft.counts) == [3, 0, 5, 0]
    assert draft.tokens.shape == (4, 5)
    assert draft.tokens[0].tolist() == [3, 4, 1, 0, 0]
    assert draft.tokens[2].tolist() == [1, 2, 1, 2, 1]
    assert draft.probs is None and draft.confidence is None
    assert lane.draft_state.rows[1].reason.startswith("the last 2 tokens")


def test_nothing_to_say_is_an_empty_draft():
    drafter = PromptLookupDrafter()
    lane = lane_of(drafter, [[1, 2, 3, 4], [5]])
    draft = drafter.propose(lane, [4, 4])
    assert draft.tokens.shape == (2, 0) and list(draft.counts) == [0, 0]


def test_verdicts_silence_a_row_and_not_its_neighbour():
    drafter = PromptLookupDrafter(DrafterCard("prompt-lookup", "", extra={"min_n": 2}))
    lane = lane_of(drafter, [[1, 2, 3, 1, 2], [1, 2, 3, 1, 2]])
    counts = []
    for step in range(12):
        draft = drafter.propose(lane, [2, 2])
        counts.append(list(draft.counts))
        lane.tokens[0] += [50 + step, 1, 2]  # whatever was copied was wrong
        lane.tokens[1] += [3, 1, 2]  # and right here
        drafter.rollback(lane, [1, 3 if draft.counts[1] else 1])
    assert [c[0] for c in counts[:3]] == [2, 2, 2] and 0 in [c[0] for c in counts]
    assert all(c[1] == 2 for c in counts)


def test_rows_join_and_leave_with_their_index():
    drafter = PromptLookupDrafter(DrafterCard("prompt-lookup", "", extra={"min_n": 2}))
    lane = lane_of(drafter, [[1, 2, 3, 1, 2], [4, 5, 6, 4, 5]])
    drafter.propose(lane, [1, 1])
    lane.draft_state, lane.tokens = lane.draft_state.select([1]), [lane.tokens[1]]
    assert drafter.propose(lane, [2]).tokens.tolist() == [[6, 4]]


@pytest.mark.parametrize(
    "extra", [{"min_n": 0}, {"min_n": 5, "max_n": 3}, {"max_n": "4"}, {"min_n": True}, {"max_n": 100}, {"min_n": None}]
)
def test_bad_lengths_name_the_option(extra):
    with pytest.raises(UsageError, match="prompt_lookup_m"):
        PromptLookupDrafter(DrafterCard("prompt-lookup", "", extra=extra))


def test_a_larger_minimum_raises_the_maximum():
    drafter = PromptLookupDrafter(DrafterCard("prompt-lookup", "", extra={"min_n": 20}))
    assert (drafter.min_n, drafter.max_n) == (20, 20)


def test_importing_it_does_not_import_mlx():
    code = "import mlx_spec.lookup, sys; raise SystemExit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_both_spellings_of_the_lengths_mean_the_same():
    for extra in ({"min_n": 2, "max_n": 6}, {"prompt_lookup_min": 2, "prompt_lookup_max": 6}):
        drafter = PromptLookupDrafter(DrafterCard("prompt-lookup", "", extra=extra))
        assert (drafter.min_n, drafter.max_n) == (2, 6)
    with pytest.raises(
        UsageError, match="prompt_lookup_min and min_n: found 2 and 3, expected one of the two"
    ) as caught:
        PromptLookupDrafter(DrafterCard("prompt-lookup", "", extra={"prompt_lookup_min": 2, "min_n": 3}))
    assert caught.value.code == "U74"


@pytest.mark.parametrize("name", ["min_n", "prompt_lookup_min"])
def test_either_spelling_is_an_option_of_the_kind(name):
    from mlx_spec.loading import choose_drafter

    choice = choose_drafter(None, "prompt-lookup", {name: 4})
    assert PromptLookupDrafter(choice.card).min_n == 4
