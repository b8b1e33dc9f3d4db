"""States and targets with one fault each. Collected by test_testing_faults.py alone."""

from __future__ import annotations

import mlx.core as mx
import pytest
from toys import Drip, Recurrence

from mlx_spec.models import Target
from mlx_spec.state import KVState, StateGroup, WindowState, register_state
from mlx_spec.state.base import Mark
from mlx_spec.testing import Attention, StateContract, TargetContract
from mlx_spec.types import Capabilities, Verification


class Own(StateContract):
    """A state fed by itself."""

    capabilities = {"batch"}
    batch_level = "bitwise"
    state: type = KVState
    arguments: tuple = ()

    @pytest.fixture
    def make_state(self):
        return lambda: type(self).state(*type(self).arguments)

    @pytest.fixture
    def feed(self):
        return Drip() if issubclass(type(self).state, Recurrence) else Attention()


class LosesARow(KVState):
    """Zeroes the last row it should keep."""

    def rewind(self, mark, keep):
        super().rewind(mark, keep)
        n = self._lengths[0]
        if keep[0] > 1:
            self._buffer.arrays[1][:, :, n - 1] = 0.0


register_state("faulty-loses")(LosesARow)


class TestForgetsOneRow(Own):
    state = LosesARow


class ShortByOne(KVState):
    """Counts the anchor twice."""

    def rewind(self, mark, keep):
        super().rewind(mark, [max(0, k - 1) for k in keep])


register_state("faulty-short")(ShortByOne)


class TestKeepsOneRowLess(Own):
    state = ShortByOne


class Ring(WindowState):
    """Drops what left the window at once, as a ring buffer would."""

    def __init__(self, window, max_width=64, batch=1, align=32):
        super().__init__(window, max_width, batch, align)

    @property
    def capacity(self):
        return self.window + 1

    def check_rewind(self, mark, keep):
        KVState.check_rewind(self, mark, keep)

    def update_and_fetch(self, keys, values):
        out = KVState._append(self, keys, values)
        n = self._lengths[0]
        lost = max(0, n - self.window) - self._origins[0]
        if lost > 0 and keys.shape[2] > 1:
            self._buffer.arrays[0][:, :, :lost] = 0.0
        return out


register_state("faulty-ring")(Ring)


class TestCannotGoBackOnceTheWindowWrapped(Own):
    capabilities = {"batch", "window"}
    state = Ring
    arguments = (8,)


class AllAlike(KVState):
    """Takes every row back by what the first one keeps."""

    def rewind(self, mark, keep):
        super().rewind(mark, [keep[0]] * len(keep))


register_state("faulty-alike")(AllAlike)


class TestTakesAllRowsBackAlike(Own):
    state = AllAlike


class Permissive(KVState):
    """Takes any keep."""

    def check_rewind(self, mark, keep):
        pass


register_state("faulty-permissive")(Permissive)


class TestTakesAnyKeep(Own):
    state = Permissive


class Shared(KVState):
    """Its copies write into the same buffer."""

    def extract(self, row):
        copy = type(self)()
        copy._buffer, copy._lengths, copy._origins = self._buffer, [self._lengths[row]], [self._origins[row]]
        return copy

    def rewind(self, mark, keep):
        super().rewind(mark, keep)
        if self._buffer.arrays:
            self._buffer.arrays[0][:, :, 0] = 1.0


register_state("faulty-shared")(Shared)


class TestSharesItsBuffer(Own):
    state = Shared


class NoTape(Recurrence):
    """Saves its h and not the tape it needs to go back."""

    def to_tensors(self):
        tensors, meta = super().to_tensors()
        tensors.pop("tape", None)
        return tensors, meta

    def check_rewind(self, mark, keep):
        pass

    def rewind(self, mark, keep):
        if len(self.tape) < max(keep):
            self.tape += [self.h] * max(keep)
        super().rewind(mark, keep)


register_state("faulty-tape")(NoTape)


class TestForgetsItsTapeInAFile(Own):
    capabilities = {"batch", "recurrent"}
    state = NoTape


class Stays(Recurrence):
    """Goes back in length and not in h."""

    def rewind(self, mark, keep):
        h = self.h
        super().rewind(mark, keep)
        self.h = h


register_state("faulty-stays")(Stays)


class TestRecurrenceThatStays(Own):
    capabilities = {"batch", "recurrent"}
    state = Stays


class Hoards(Recurrence):
    """Keeps every tape."""

    def mark(self):
        self.kept = [*getattr(self, "kept", []), *self.tape]
        return super().mark()

    @property
    def nbytes(self):
        return super().nbytes + sum(a.nbytes for a in getattr(self, "kept", []))


register_state("faulty-hoards")(Hoards)


class TestHoardsItsTapes(Own):
    capabilities = {"recurrent"}
    state = Hoards


class Swaps(KVState):
    """Selects rows in ascending order whatever was asked for."""

    def select(self, rows):
        return super().select(sorted(rows))


register_state("faulty-swaps")(Swaps)


class TestSelectsInAnotherOrder(Own):
    state = Swaps


# -- targets -------------------------------------------------------------------------------------------------


class Wrapped(Target):
    """A sound target with `change(self, tokens, states, verification)` applied to what it says."""

    def __init__(self, inner, change):
        self._inner, self._change = inner, change
        for name in ("ref", "model_type", "vocab_size", "hidden_size", "context", "dtype", "model", "tap_names"):
            setattr(self, name, getattr(inner, name))
        self.capabilities = inner.capabilities

    def make_states(self, kv_bits=None, kv_group_size=64):
        return self._inner.make_states(kv_bits, kv_group_size)

    def forward(self, tokens, states, taps=()):
        return self._change(self, tokens, states, self._inner.forward(tokens, states, taps))

    def embed(self, tokens):
        return self._inner.embed(tokens)

    def head(self, hidden):
        return self._inner.head(hidden)


class Other(TargetContract):
    """The kit's llama, changed."""

    capabilities = {"batch", "sampling", "taps"}
    tokens = 8

    @staticmethod
    def change(target, tokens, states, seen):
        return seen

    @pytest.fixture
    def target(self, folders):
        from mlx_spec.testing.contracts.base import loaded_target

        return Wrapped(loaded_target(folders.target), type(self).change)


class TestDependsOnTheNumberOfRows(Other):
    @staticmethod
    def change(target, tokens, states, seen):
        return Verification(seen.logits * (1 + 1e-6 * (tokens.shape[1] in (4, 5))), seen.taps)


class TestLooksAhead(Other):
    """Row i is answered with row i + 1."""

    @staticmethod
    def change(target, tokens, states, seen):
        logits = seen.logits
        if 1 < logits.shape[1] < 8:
            logits = mx.concatenate([logits[:, 1:], logits[:, -1:]], axis=1)
        return Verification(logits, seen.taps)


class TestAnswersEveryRowOfABatchWithTheFirst(Other):
    @staticmethod
    def change(target, tokens, states, seen):
        return Verification(mx.broadcast_to(seen.logits[:1], seen.logits.shape), seen.taps)


class TestTapsTheWrongLayer(Other):
    @staticmethod
    def change(target, tokens, states, seen):
        return Verification(seen.logits, {name: value * 2 for name, value in seen.taps.items()})


class TestShowsTheFirstRowOfAPrompt(Other):
    @pytest.fixture
    def target(self, folders):
        from mlx_spec.testing.contracts.base import loaded_target

        class Backwards(Wrapped):
            def prefill(self, tokens, states, taps=(), last=False):
                seen = super().prefill(tokens, states, taps)
                return {name: value[:, :1] for name, value in seen.items()} if last else seen

        return Backwards(loaded_target(folders.target), type(self).change)


class TestClaimsWhatItIsNot(Other):
    capabilities = {"batch", "sampling", "window"}


class TestForgetsItsLastRow(Other):
    """A state of one layer that is one row short after every rewind."""

    @pytest.fixture
    def target(self, folders):
        from mlx_spec.testing.contracts.base import loaded_target

        target = Wrapped(loaded_target(folders.target), type(self).change)
        target.make_states = lambda kv_bits=None, kv_group_size=64: StateGroup([KVState(), LosesARow(), KVState()])
        return target


__all__ = ["Capabilities", "Mark"]
