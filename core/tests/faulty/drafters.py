"""Drafters with one fault each; every class is the contract run on it. Collected by test_testing_faults.py alone."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_spec.full_model import FullModelDrafter
from mlx_spec.laws import fit_width
from mlx_spec.lookup import PromptLookupDrafter
from mlx_spec.sampling import Sampling
from mlx_spec.shaping import shape_logprobs
from mlx_spec.testing import DrafterContract
from mlx_spec.types import Capabilities, Draft


class Faulty(DrafterContract):
    """A full-model drafter of the kit's llama, changed by `kind`."""

    capabilities = {"batch", "sampling"}
    kind: type[FullModelDrafter] = FullModelDrafter
    tokens = 8

    @pytest.fixture
    def drafter(self, folders, target):
        from mlx_spec.testing.contracts.base import loaded_drafter

        return type(self).kind(loaded_drafter(folders.drafter, target).lm)


def asks_first(change):
    """A drafter class whose propose is `change(lane, draft)` of a sound one's."""

    class Changed(FullModelDrafter):
        def propose(self, lane, budget):
            return change(lane, super().propose(lane, budget))

    return Changed


# -- the target's state --------------------------------------------------------------------------------------


class Peeks(FullModelDrafter):
    """Asks the target itself and takes the trace away."""

    def propose(self, lane, budget):
        mark = lane.states.mark()
        lane.target.forward(lane.anchors[:, None], lane.states)
        lane.states.rewind(mark, [0] * lane.size)
        return super().propose(lane, budget)


class TestPeeksAtTheTarget(Faulty):
    kind = Peeks


def overwrite(lane, draft):
    if lane.states.lengths[0] > 1:
        lane.states[1]._buffer.arrays[0][:, :, 0] = 0.0
    return draft


class TestOverwritesTheTarget(Faulty):
    kind = asks_first(overwrite)


def append(lane, draft):
    lane.target.forward(draft.tokens[:, :1], lane.states)
    return draft


class TestAppendsToTheTarget(Faulty):
    kind = asks_first(append)


def commit_early(lane, draft):
    lane.tokens = [[*tokens, int(draft.tokens[0, 0].item())] for tokens in lane.tokens]
    return draft


class TestCommitsByItself(Faulty):
    kind = asks_first(commit_early)


# -- form ----------------------------------------------------------------------------------------------------


class TestDraftsBeyondTheBudget(Faulty):
    kind = asks_first(lambda lane, d: Draft(mx.concatenate([d.tokens, d.tokens[:, :1]], axis=1)))


class TestDraftsFloats(Faulty):
    kind = asks_first(lambda lane, d: Draft(d.tokens.astype(mx.float32), d.counts, d.probs))


class TestDraftsIdsOutsideTheVocabulary(Faulty):
    kind = asks_first(lambda lane, d: Draft(d.tokens + lane.target.vocab_size, d.counts))


def stumble(lane, draft):
    if lane.lengths[0] == 9:
        raise KeyError("row 9")
    return draft


class TestRaisesNowAndThen(Faulty):
    kind = asks_first(stumble)


class TestNeverDrafts(Faulty):
    kind = asks_first(lambda lane, d: Draft(d.tokens[:, :0], [0] * lane.size))


# -- probabilities -------------------------------------------------------------------------------------------


class TestReportsAnotherTemperature(Faulty):
    kind = asks_first(lambda lane, d: d if d.probs is None else Draft(d.tokens, d.counts, _warmer(d.probs)))


def _warmer(probs):
    flat = mx.sqrt(probs)
    return flat / flat.sum(axis=-1, keepdims=True)


class TestReportsTheLawOfAnotherStep(Faulty):
    kind = asks_first(lambda lane, d: d if d.probs is None else Draft(d.tokens, d.counts, d.probs[:, ::-1]))


class TestKeepsTheLawToItself(Faulty):
    kind = asks_first(lambda lane, d: Draft(d.tokens, d.counts))


class DrawsAlone(FullModelDrafter):
    """Draws by itself at temperature 1 and reports the law of temperature 0.7."""

    def propose(self, lane, budget):
        turn = [0]

        def draw(logits, step):
            turn[0] += 1
            key = mx.random.key(7919 * sum(lane.lengths) + 31 * turn[0] + sum(t[-1] for t in lane.tokens))
            logits = fit_width(logits, lane.target.vocab_size, -mx.inf)
            law = mx.exp(shape_logprobs(logits, Sampling(temperature=0.7)))
            return mx.random.categorical(logits, key=key).astype(mx.int32), law

        real, lane._draw = lane._draw, draw
        try:
            return super().propose(lane, budget)
        finally:
            lane._draw = real


class TestDrawsFromAnotherLawThanItReports(Faulty):
    kind = DrawsAlone


def cut_unlikely(lane, draft):
    if draft.probs is None:
        return draft
    chosen = mx.take_along_axis(draft.probs, draft.tokens[..., None], axis=-1)[..., 0].tolist()
    counts = [next((i for i, p in enumerate(row) if p < 0.3), len(row)) for row in chosen]
    return Draft(draft.tokens, [min(a, b) for a, b in zip(counts, draft.counts, strict=True)], draft.probs)


class TestDropsTokensAfterDrawingThem(Faulty):
    kind = asks_first(cut_unlikely)


# -- its own state -------------------------------------------------------------------------------------------


class KeepsRejected(FullModelDrafter):
    """Counts back, and leaves rejected rows in its caches."""

    def _tidy(self, state):
        pass


class TestKeepsRejectedRows(Faulty):
    kind = KeepsRejected


class TestMiscountsAfterRollback(Faulty):
    class kind(FullModelDrafter):
        """Believes that one more row was kept than was."""

        def rollback(self, lane, keep):
            super().rollback(lane, [k + 1 for k in keep])


class Remembers(FullModelDrafter):
    """Keeps the last anchor on itself and starts from it."""

    last = None

    def propose(self, lane, budget):
        draft = super().propose(lane, budget)
        before, self.last = self.last, lane.anchors
        if before is None or before.shape != lane.anchors.shape:
            return draft
        return Draft(mx.concatenate([before[:, None], draft.tokens[:, 1:]], axis=1), draft.counts)


class TestRemembersOnTheDrafterObject(Faulty):
    kind = Remembers


class TestTreatsEveryRowAsTheFirst(Faulty):
    kind = asks_first(lambda lane, d: Draft(mx.broadcast_to(d.tokens[:1], d.tokens.shape), d.counts))


class ForgetsStart(PromptLookupDrafter):
    """Looks at the length of the last prompt chunk instead of the position it starts at."""

    def prime(self, state, tokens, taps, start):
        state.rows[0].chunk = tokens.shape[1]

    def propose(self, lane, budget):
        draft = super().propose(lane, budget)
        chunk = getattr(lane.draft_state.rows[0], "chunk", 0)
        return Draft((draft.tokens + chunk % 2) % lane.target.vocab_size, draft.counts)


class LookingUp(DrafterContract):
    """A drafter by lookup, changed by `kind`."""

    capabilities = {"batch", "sampling"}
    kind: type[PromptLookupDrafter] = PromptLookupDrafter

    @pytest.fixture
    def drafter(self):
        return type(self).kind()


class TestMiscountsPromptChunks(LookingUp):
    kind = ForgetsStart


class TestIndexesItsOwnRejectedDrafts(LookingUp):
    class kind(PromptLookupDrafter):
        """Takes what it drafted for text that will stand."""

        def propose(self, lane, budget):
            draft = super().propose(lane, budget)
            for row, ids, count in zip(lane.draft_state.rows, draft.tokens.tolist(), draft.counts, strict=True):
                row.index.extend([*row.index.tokens, *ids[:count]])
            return draft


class TestDraftsAsManyForEveryRow(LookingUp):
    class kind(PromptLookupDrafter):
        """Takes the largest budget of the lane for everybody's."""

        def propose(self, lane, budget):
            return super().propose(lane, [max(budget)] * lane.size)


class TestLooksItUpInAnotherRow(LookingUp):
    class kind(PromptLookupDrafter):
        """Matches a row's own text and copies from the first row's."""

        def propose(self, lane, budget):
            draft = super().propose(lane, budget)
            first = lane.tokens[0]
            copied = [[first[-1 - i % len(first)] for i in range(draft.tokens.shape[1])] for _ in lane.tokens]
            own = draft.tokens.tolist()
            tokens = mx.array([own[0], *copied[1:]], dtype=mx.int32).reshape(draft.tokens.shape)
            return Draft(tokens, draft.counts)


# -- acceptance only: found because something is promised -----------------------------------------------------


class Shifted(FullModelDrafter):
    """Its queries stand one position too far on: a zero row is fed before the prompt."""

    def make_state(self):
        state = super().make_state()
        self.lm.forward(mx.array([[0]], dtype=mx.int32), state.states)
        state.rows[0].held = 0
        return state

    def _tidy(self, state):
        held = tuple(row.held + 1 for row in state.rows)
        if state.states.lengths != held:
            from mlx_spec.state.base import Mark

            state.states.rewind(Mark(held), [0] * len(held))

    def rollback(self, lane, keep):
        for row, length, kept in zip(lane.draft_state.rows, lane.draft_state.states.lengths, keep, strict=True):
            row.held = min(length - 1, row.held + max(kept, 1) - 1)
        self._tidy(lane.draft_state)


class TestStandsOnePositionOff(Faulty):
    kind = Shifted

    @pytest.fixture
    def reference_draft(self, drafter):
        from mlx_spec.testing.rig import rig_for

        last = drafter.lm.vocab_size - 1
        return lambda tokens, budget: rig_for(drafter.lm).plain([min(t, last) for t in tokens], budget)


class TestDraftsWorseThanItsOwnTarget(Faulty):
    """The target drafting for itself is always right; one position off it is not."""

    least_acceptance = 1.0

    @pytest.fixture
    def drafter(self, target):
        return Shifted(target)


class Deaf(FullModelDrafter):
    """Asks for a tap and never looks at it."""

    taps = ("hidden",)

    def __init__(self, model, card=None):
        super().__init__(model, card)
        self.capabilities = Capabilities(history="last")


class TestNeverReadsItsTaps(Faulty):
    capabilities = {"batch", "taps"}
    kind = Deaf
