"""How far a drafter head gets: declared, present, fitting, readable, of this trunk, proven.

Core knows what every family shares; what a head's tensors must be, its plugin says in `spec_inspect_head`. A stage that
cannot be judged because an earlier one failed is "open".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .errors import Finding, SpecError
from .heads import (
    HEAD_KIND,
    KEEP_HEAD,
    PROMISES,
    Head,
    contradictions,
    counted,
    find_heads,
    promised_layers,
    text_section,
    whole_index,
)

if TYPE_CHECKING:
    from .types import DrafterCard, ExactnessReport, ModelRef

State = Literal["ok", "no", "open"]
FAMILY_STAGES = ("shapes", "norms", "quantisation")  # those a plugin answers for
NOTHING = "Nothing has to be done"
APART = "If hardly any draft is accepted, take the drafter that was trained for this very target"


@dataclass(frozen=True, slots=True)
class Stage:
    """One thing a head needs.

    Attributes:
        name: "declared", "tensors", "shapes", "norms", "quantisation", "trunk" or "probe".
        state: "ok"; "no": it stands in the way; "open": not known, or worth a look.
        reason: what was found.
        next_step: what to do about it.
    """

    name: str
    state: State
    reason: str
    next_step: str = NOTHING

    @classmethod
    def refused(cls, name: str, error: SpecError | Finding) -> Stage:
        """The stage that an error stands in the way of, with its code."""
        return cls(name, "no", f"{error.found}, expected {error.expected} ({error.code})", error.next_step)


def own_stages(ref: ModelRef) -> list[Stage]:
    """Stages of the head in a target's own checkpoint; empty for a model that has and promises none."""
    index = whole_index(ref.path)
    heads = find_heads(ref.config, index)
    if not heads and not promised_layers(ref.config):
        return []
    stages = [declared(ref.config, heads), present(ref.config, heads, contradictions(ref.config, index))]
    return _finish(stages, ref, ref)


def pair_stages(target: ModelRef, drafter: ModelRef, extracted: bool = True) -> list[Stage]:
    """Stages of a head in a directory of its own, for this target.

    extracted: heads of its kind are taken out of whole models, so that a record of the trunk is to be expected.
    """
    from .tensorfiles import tensor_index

    index = tensor_index(drafter.path)
    kind = f"model_type {drafter.model_type} in its config.json"
    files = len({info.file for info in index.values()})
    held = f"{len(index)} tensors in {files} file" + "s" * (files > 1)
    return _finish([Stage("declared", "ok", kind), Stage("tensors", "ok", held)], target, drafter, extracted)


def declared(config: Mapping[str, Any], heads: Sequence[Head]) -> Stage:
    """Whether config.json promises a head."""
    layers = promised_layers(config)
    if layers:
        key = next(key for key in PROMISES if text_section(config).get(key) == layers)
        return Stage("declared", "ok", f"{key} is {layers}")
    names = ", ".join(head.prefix for head in heads)
    step = f"Add the key from the original config.json (one of {', '.join(PROMISES)})"
    return Stage("declared", "no", f"config.json declares no head, although there are tensors under {names}", step)


def present(config: Mapping[str, Any], heads: Sequence[Head], problems: Sequence[Finding]) -> Stage:
    """Whether the promised tensors are there, all of them."""
    if not heads:
        return Stage("tensors", "no", f"none, where config.json declares {counted(promised_layers(config))}", KEEP_HEAD)
    broken = next((problem for problem in problems if problem.code == "C03"), None)
    if broken is not None:
        return Stage.refused("tensors", broken)
    held = ", ".join(f"{head.tensors} under {head.prefix}" for head in heads)
    return Stage("tensors", "ok", held)


def _finish(stages: list[Stage], target: ModelRef, drafter: ModelRef, extracted: bool = True) -> list[Stage]:
    """The stages after the tensors; those that cannot be judged are open."""
    blocked = next((stage for stage in stages if stage.state == "no" and stage.name == "tensors"), None)
    if blocked is not None:
        return [*stages, *_open([*FAMILY_STAGES, "trunk", "probe"], "the tensors are not there", blocked.next_step)]
    stages += _by_plugin(target, drafter)
    stages.append(_trunk(target, drafter, extracted))
    worst = next((stage for stage in stages if stage.state == "no"), None)
    stages.append(probed(target, drafter) if worst is None else _blocked_probe(worst))
    return stages


def _open(names: Sequence[str], reason: str, step: str) -> Iterator[Stage]:
    return (Stage(name, "open", f"not looked at: {reason}", step) for name in names)


def _by_plugin(target: ModelRef, drafter: ModelRef) -> list[Stage]:
    """What the plugin that reads the head says of it, in core's order; a stage it leaves out is open."""
    from .plugins import get_manager

    manager = get_manager()
    try:
        found = manager.registry.drafter_for(drafter)
    except SpecError as error:
        return [Stage.refused("shapes", error)]
    if found is None:
        reason = f"no installed plugin reads heads of model_type {drafter.model_type}"
        return list(_open(FAMILY_STAGES, reason, "Install the family's plugin"))
    owner, card = found
    try:
        answers = manager.owner_call("spec_inspect_head", owner)(target=target, drafter=drafter, card=card) or []
    except SpecError as error:
        return [Stage.refused("shapes", error)]
    said = {stage.name: stage for stage in answers}
    if not said:
        said = {"shapes": _by_validation(target, drafter, card, owner)}
    silent = f"plugin {owner} does not tell"
    return [said.get(name, Stage(name, "open", silent, "Run spec pair, which loads it")) for name in FAMILY_STAGES]


def _by_validation(target: ModelRef, drafter: ModelRef, card: DrafterCard, owner: str) -> Stage:
    """The pair checks of a plugin that says nothing about heads by stage."""
    from .plugins import get_manager

    call = get_manager().owner_call("spec_validate_pair", owner)
    findings = [f for answer in call(target=target, drafter=drafter, card=card) if answer for f in answer]
    error = next((finding for finding in findings if finding.severity == "error"), None)
    if error is None:
        return Stage("shapes", "ok", f"plugin {owner} finds nothing wrong with the pair")
    return Stage.refused("shapes", error)


def _trunk(target: ModelRef, drafter: ModelRef, extracted: bool) -> Stage:
    """Whose head it is, by its record."""
    from .conversion.trunk import UNRECORDED, check_trunk, side_files

    try:
        findings = check_trunk(target, drafter, extracted=True)
    except SpecError as error:
        return Stage.refused("trunk", error)
    if findings and findings[0].code == UNRECORDED and not extracted:
        return Stage("trunk", "open", "drafters of this kind are trained apart and carry no record of one", APART)
    if findings:
        state: State = "no" if findings[0].severity == "error" else "open"
        return Stage("trunk", state, f"{findings[0].found} ({findings[0].code})", findings[0].next_step)
    inside = target.path == drafter.path and not side_files(target.path)
    return Stage("trunk", "ok", "in the model's own files" if inside else "it is the recorded one")


# -- the probe ---------------------------------------------------------------------------------------------


def _blocked_probe(worst: Stage) -> Stage:
    return Stage("probe", "open", f"not possible: {worst.name}", worst.next_step)


def probed(target: ModelRef, drafter: ModelRef) -> Stage:
    """The remembered verdict on the pair, of this machine and these versions."""
    from .probe import remembered

    widths: list[int] = []

    def usual(key: str) -> int:
        widths.append(usual_width(drafter, key))
        return widths[0]

    report = remembered(target, drafter, usual)
    if widths and widths[0] < 2:
        return Stage("probe", "open", f"nothing is drafted at L={widths[0]}, which runs now", "Ask for a larger L")
    given = "--draft-kind mtp" if target.path == drafter.path else f"--draft-model {drafter.name}"
    step = f"Run spec probe -m {target.name} {given}, or add --probe here"
    if report is None:
        return Stage("probe", "open", "no verdict on this machine yet", step)
    stage = verdict_stage(report)
    if report.asked_width == widths[0]:
        return stage
    return Stage("probe", "open", f"{stage.reason}; no verdict yet at L={widths[0]}, which runs now", step)


def usual_width(drafter: ModelRef, key: str) -> int:
    """L that runs when no option gives one: the variable's, a tuned one, the drafter's, the kind's."""
    from .plugins import get_manager
    from .settings import get_settings
    from .tuned import read_tuned
    from .types import DrafterCard
    from .width import resolve_block_size

    asked = get_settings().draft_block_size
    found = get_manager().registry.drafter_for(drafter)
    card = found[1] if found is not None else DrafterCard(HEAD_KIND, drafter.model_type)
    if asked is not None:
        return max(1, min(asked, card.max_block_size or asked))
    return resolve_block_size(None, card, card.kind, tuned=read_tuned(key)).L


def verdict_stage(report: ExactnessReport) -> Stage:
    """A probe's report as a stage."""
    exact = report.level in ("bitwise", "greedy") and report.width > 1
    reason = f"{report.level} at L={report.width} of L={report.asked_width} ({report.source})"
    if exact and report.width == report.asked_width:
        return Stage("probe", "ok", reason)
    reason = f"{reason}: {report.reason}" if report.reason else reason
    if exact:
        return Stage("probe", "ok", reason, f"Nothing has to be done; it drafts with L={report.width}")
    return Stage("probe", "no", reason, "Decode plainly, or accept --exactness distribution for sampled text")
