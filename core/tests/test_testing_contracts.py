"""Sound targets, drafters and states pass the whole kit; these are core's own conformance tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from toys import Drip, Recurrence

from mlx_spec.full_model import FullModelDrafter
from mlx_spec.lookup import PromptLookupDrafter
from mlx_spec.models import Drafter, Target
from mlx_spec.state import DeltaState, KVState, QuantisedKVState, QuantisedWindowState, State, WindowState
from mlx_spec.testing import (
    Attention,
    DrafterContract,
    GatedDeltas,
    Mutation,
    PairContract,
    StateContract,
    TargetContract,
)

PLAIN = {"batch", "sampling", "taps", "quantised_kv"}


class TestLlamaTarget(TargetContract):
    capabilities = PLAIN


class TestGemma3Target(TargetContract):
    family = "gemma3"
    capabilities = PLAIN | {"window"}


class TestFullModelDrafter(DrafterContract):
    capabilities = {"batch", "sampling", "quantised_kv"}

    @pytest.fixture
    def reference_draft(self, drafter: FullModelDrafter) -> Callable[..., list[int]]:
        """The model's own greedy reply to the whole text; ids it does not have read its last row."""
        from mlx_spec.testing.rig import rig_for

        last = drafter.lm.vocab_size - 1
        return lambda tokens, budget: rig_for(drafter.lm).plain([min(t, last) for t in tokens], budget)


class TestWindowedFullModelDrafter(DrafterContract):
    family = "gemma3"
    capabilities = {"batch", "sampling", "window", "quantised_kv"}


class TestTheTargetDraftingForItself(DrafterContract):
    """Positions, catch-up and rollback are right when every draft of the target's own weights is accepted."""

    family = "gemma3"
    capabilities = {"batch", "sampling", "window"}
    least_acceptance = 1.0

    @pytest.fixture
    def drafter(self, target: Target) -> Drafter:
        return FullModelDrafter(target)


class TestFullModelPair(PairContract):
    """Any family may draft for any other; what counts is the vocabulary, and that its own files are sound."""

    stranger = None
    mutations = {
        "model_type": Mutation("llama_other", ("llama_other",)),
        "num_hidden_layers": Mutation(3, ("no tensors model.layers.2.",)),
        "head_dim": Mutation(8, ("(16, 40)", "(32, 40)")),  # two heads of 8 and of 16
        "vocab_size": Mutation(542, ("542",)),
        "tie_word_embeddings": Mutation(False, ("no tensors lm_head.weight",)),
        "max_position_embeddings": Mutation(256, ("256", "512"), severity="note"),
    }
    free = {"rms_norm_eps": "any value runs"}


class TestPromptLookupDrafter(DrafterContract):
    capabilities = {"batch", "sampling", "quantised_kv"}

    @pytest.fixture
    def drafter(self) -> Drafter:
        return PromptLookupDrafter()


class OneState(StateContract):
    """A state fed by an attention of its own, whose rows do not depend on the batch."""

    batch_level = "bitwise"
    state: Callable[[], State] = KVState

    @pytest.fixture
    def make_state(self) -> Callable[[], State]:
        return type(self).state

    @pytest.fixture
    def feed(self) -> Attention:
        return Attention(value_width=32)  # mlx-lm's quantised attention wants Dk = Dv


class TestKVState(OneState):
    capabilities = {"batch"}

    @pytest.fixture
    def feed(self) -> Attention:
        return Attention(value_width=64)


class TestWindowState(OneState):
    capabilities = {"batch", "window"}
    state = staticmethod(lambda: WindowState(8, max_width=7))

    @pytest.fixture
    def feed(self) -> Attention:
        return Attention(value_width=64)


class TestQuantisedKVState(OneState):
    capabilities = {"batch"}
    state = staticmethod(lambda: QuantisedKVState(4, 32))


class TestQuantisedWindowState(OneState):
    capabilities = {"batch", "window"}
    state = staticmethod(lambda: QuantisedWindowState(8, 8, 32))


class TestRecurrence(OneState):
    capabilities = {"batch", "recurrent"}
    state = Recurrence

    @pytest.fixture
    def feed(self) -> Drip:
        return Drip()


class TestDeltaState(OneState):
    capabilities = {"batch", "recurrent", "conv"}
    state = DeltaState

    @pytest.fixture
    def feed(self) -> GatedDeltas:
        return GatedDeltas()


class TestStatesOfATarget(StateContract):
    family = "gemma3"
    capabilities = {"batch", "window"}
