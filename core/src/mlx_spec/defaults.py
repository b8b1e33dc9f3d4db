"""Core's own plugin: default hooks, answering last, and the built-in drafter kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .hookspecs import hookimpl

if TYPE_CHECKING:
    from .errors import Finding
    from .lane import Lane
    from .models import Drafter, Target
    from .probe import ProbePlan
    from .registry import Register
    from .types import Draft, DrafterCard, ExactnessReport, ModelRef, Side, Verification


@hookimpl
def spec_register(register: Register) -> None:
    """Claim the drafter kinds that work with every target; bring the GPU kernel of core's recurrence."""
    from .own_kernels import GATED_DELTA

    register.kernel(GATED_DELTA)
    register.drafter("full-model")
    register.drafter("prompt-lookup", options=("prompt_lookup_min", "prompt_lookup_max", "min_n", "max_n"))
    register.tiny("llama", "mlx_spec.testing.tiny:write_llama")
    register.tiny("gemma3", "mlx_spec.testing.tiny:write_gemma3")


@hookimpl(trylast=True)
def spec_load_target(ref: ModelRef, config: Mapping[str, object]) -> Target:
    """Any causal LM mlx-lm defines, when no plugin claims its model_type."""
    from .generic_target import GenericTarget

    return GenericTarget.load(ref, config)


@hookimpl(trylast=True)
def spec_load_drafter(ref: ModelRef, card: DrafterCard, target: Target) -> Drafter | None:
    """The built-in kinds: full-model and prompt-lookup."""
    if card.kind == "prompt-lookup":
        from .lookup import PromptLookupDrafter

        return PromptLookupDrafter(card)
    if card.kind == "full-model":
        from .full_model import FullModelDrafter
        from .loading import load_target

        return FullModelDrafter(load_target(ref), card)
    return None


@hookimpl
def spec_validate_pair(target: ModelRef, drafter: ModelRef, card: DrafterCard) -> list[Finding] | None:
    """Findings about full-model drafters; other kinds belong to their plugins."""
    if card.kind != "full-model":
        return None
    from .full_model_checks import validate

    return validate(target, drafter)


@hookimpl(trylast=True)
def spec_propose(lane: Lane, budget: Sequence[int]) -> Draft:
    """Ask the drafter object."""
    if lane.drafter is None:
        raise RuntimeError("spec_propose on a lane without a drafter")
    return lane.drafter.propose(lane, budget)


@hookimpl(trylast=True)
def spec_verify(lane: Lane, draft: Draft) -> Verification:
    """One target forward over [anchor, *draft]."""
    import mlx.core as mx

    if lane.anchors is None:
        raise RuntimeError("spec_verify on a lane without anchors")
    block = lane.anchors[:, None]
    if draft.tokens.shape[1]:
        block = mx.concatenate([block, draft.tokens], axis=1)
    taps = lane.drafter.taps if lane.drafter is not None else ()
    return lane.target.forward(block, lane.states, taps)


@hookimpl(trylast=True)
def spec_rollback(lane: Lane, side: Side, keep: Sequence[int]) -> Sequence[int]:
    """Rewind the target's states to the mark, or tell the drafter what stayed."""
    if side == "target":
        if lane.mark is None:
            raise RuntimeError("spec_rollback before a mark")
        lane.states.rewind(lane.mark, keep)
        return lane.states.lengths
    if lane.drafter is not None:
        lane.drafter.rollback(lane, keep)
    return lane.lengths


@hookimpl(trylast=True)
def spec_probe_exactness(target: Target, drafter: Drafter, plan: ProbePlan) -> ExactnessReport:
    """Real rounds against single steps."""
    from .probe import probe

    return probe(target, drafter, plan)
