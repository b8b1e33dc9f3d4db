"""What `spec inspect` reports about a directory, gathered from files; weights are not loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .checkpoint import end_ids, read_config, tensor_index
from .coverage import Coverage, kernel_coverage
from .errors import Finding, PairError, SpecError, listed
from .generic_target import declared_context
from .head_stages import Stage, own_stages, pair_stages
from .heads import HEAD_KIND, Head, contradictions, find_heads, text_section, whole_index
from .identify import carries_embedding, identify
from .kernels import check_kernels
from .memory import MemoryNeed, head_settings, memory_needed
from .refs import resolve
from .types import DrafterCard, ModelRef

if TYPE_CHECKING:
    from .loading import DrafterChoice
    from .plugins import PluginManager
    from .tensorfiles import TensorInfo
    from .tokenizer import Tokenizer

T = TypeVar("T")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
SHOWN_CONTEXT = 8192  # positions the memory estimate uses when nobody asks for another number


@dataclass(slots=True)
class DrafterFit:
    """Whether one drafter could serve this target."""

    kind: str
    source: str  # "built in", "in this checkpoint", "plugin NAME" or a directory
    fits: bool
    reason: str
    stages: list[Stage] = field(default_factory=list)  # of a drafter head, how far it gets


@dataclass(slots=True)
class Inspection:
    """All that files tell about a directory; a problem of severity error means it cannot be used."""

    name: str
    path: Path
    kind: str = "unknown"
    reason: str = ""
    model_type: str = ""
    owner: str | None = None
    distribution: str | None = None
    card: DrafterCard | None = None
    parameters: int = 0
    tensors: int = 0
    files: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)  # safetensors dtype -> bytes
    quantisation: dict[str, Any] | None = None
    context: int | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    layers: int | None = None
    heads: list[Head] = field(default_factory=list)
    embedded: str = ""  # kind of the head in this target that an installed plugin reads
    tokenizer: dict[str, Any] = field(default_factory=dict)
    end_ids: list[int] = field(default_factory=list)
    memory: MemoryNeed | None = None
    kernels: Coverage | None = None
    drafters: list[DrafterFit] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)  # of the head in this checkpoint
    problems: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what else may change the answer

    @property
    def ok(self) -> bool:
        """True when nothing stands in the way of using it."""
        return all(problem.severity != "error" for problem in self.problems)


def inspect(
    name: str, drafters: Sequence[str] = (), context: int | None = None, kv_bits: int | None = None
) -> Inspection:
    """Look at a directory or hub id; problems are collected, not raised, once every directory is found."""
    manager = _manager()
    manager.check_asked()
    check_kernels()
    ref = resolve(name, config=False)
    for candidate in drafters:
        resolve(candidate, config=False, drafter=True)
    report = Inspection(name, ref.path, notes=manager.failures())
    config = _try(report, lambda: read_config(ref.path)) if (ref.path / "config.json").exists() else None
    ref = ModelRef(ref.name, ref.path, config or {})
    _identify(report, ref, config)
    if config is None:
        _no_target(report, drafters)
        return report
    index = _try(report, lambda: tensor_index(ref.path))
    if report.kind in ("target", "drafter"):
        _sizes(report, config)
        if index is not None:
            _weights(report, config, index, context, kv_bits)
        _text(report, ref)
    if report.kind == "target":
        _owner(report, ref)
        if index is not None:
            report.stages = _try(report, lambda: own_stages(ref)) or []
        if report.ok:
            report.kernels = _try(report, lambda: kernel_coverage(ref, index or ()))
        _fits(report, ref, drafters)
    else:
        _no_target(report, drafters)
    report.problems.sort(key=lambda problem: problem.severity != "error")
    return report


def prove_heads(report: Inspection) -> None:
    """Run the exactness probe on the model with each of its heads; the verdict becomes the last stage.

    A head that an earlier stage stands in the way of is left as it is.
    """
    heads = [(None, report.stages), *((drafter.source, drafter.stages) for drafter in report.drafters)]
    for source, stages in heads:
        if stages and report.ok and all(stage.state != "no" for stage in stages[:-1]):
            stages[-1] = _proven(report.name, source)


def _proven(name: str, drafter: str | None) -> Stage:
    """The probe's verdict on a target with a head in a directory, or with its own."""
    from .head_stages import verdict_stage
    from .pair import load
    from .settings import choose

    block_size, source = choose("draft_block_size")
    try:
        plan = load(name, drafter, HEAD_KIND, block_size=block_size, block_size_from=source).plan
    except SpecError as error:
        return Stage.refused("probe", error)
    if plan.exactness is None:
        return Stage("probe", "open", plan.reason, "Change the setting that turned it off")
    return verdict_stage(plan.exactness)


def _no_target(report: Inspection, candidates: Sequence[str]) -> None:
    """Say of each candidate that there is nothing here to draft for."""
    reason = f"{report.name} is no target to draft for ({report.reason or 'see the errors'})"
    report.drafters += [DrafterFit("?", name, False, reason) for name in candidates]


def _try(report: Inspection, step: Callable[[], T]) -> T | None:
    """Result of one step, or None with its error noted once."""
    try:
        return step()
    except SpecError as error:
        _note(report, error)
        return None


def _note(report: Inspection, error: SpecError) -> None:
    finding = Finding(error.code, "error", error.what, str(error.found), str(error.expected), error.next_step)
    if finding not in report.problems:
        report.problems.append(finding)


def _manager() -> PluginManager:
    from .plugins import get_manager

    return get_manager()


def _identify(report: Inspection, ref: ModelRef, config: Mapping[str, Any] | None) -> None:
    """Kind of the directory: what a plugin recognises first, then what the files show."""
    from .identify import other_kind

    report.model_type = ref.model_type
    found = _try(report, lambda: _manager().registry.drafter_for(ref)) if config is not None else None
    identity = identify(ref.path, config)
    report.kind, report.reason = identity.kind, identity.reason
    report.embedded = found[1].kind if found is not None and _is_target(ref) else ""
    if found is not None and not report.embedded and identity.kind in ("target", "drafter", "speculators"):
        report.kind, report.card, report.owner = "drafter", found[1], found[0]
        report.reason = f"plugin {found[0]} recognises a drafter of kind {found[1].kind}"
        report.distribution = _distribution(found[0])
    elif identity.kind not in ("target", "drafter") and not report.problems:
        _note(report, other_kind(ref.path, identity))


def _is_target(ref: ModelRef) -> bool:
    """True for a model_type that some plugin serves as a target: a drafter found there is its own head."""
    return ref.model_type in _manager().registry.model_types()


def _distribution(owner: str | None) -> str | None:
    record = _manager().record(owner) if owner is not None else None
    return record.distribution if record is not None else None


def _sizes(report: Inspection, config: Mapping[str, Any]) -> None:
    section = text_section(config)
    report.vocab_size, report.hidden_size = section.get("vocab_size"), section.get("hidden_size")
    report.layers, report.context = section.get("num_hidden_layers"), declared_context(config)
    report.quantisation = section.get("quantization") or section.get("quantization_config")


def _weights(
    report: Inspection,
    config: Mapping[str, Any],
    index: Mapping[str, TensorInfo],
    context: int | None,
    kv_bits: int | None,
) -> None:
    """Counts, dtypes, heads, memory, and what contradicts config.json."""
    report.tensors, report.files = len(index), len({info.file for info in index.values()})
    for info in index.values():
        report.dtypes[info.dtype] = report.dtypes.get(info.dtype, 0) + info.nbytes
    report.parameters = count_parameters(index, report.quantisation)
    if report.kind == "target" and not carries_embedding(config, index):
        report.kind = "drafter"
        report.reason = "no tensor has a row per vocabulary entry: it borrows its target's table"
    settings = config
    if report.kind == "drafter" and (own := held_layers(index)):
        report.layers, settings = own, head_settings(config, own)
    positions = context or min(report.context or SHOWN_CONTEXT, SHOWN_CONTEXT)
    report.memory = memory_needed(settings, index, positions, kv_bits)
    if report.kind != "target":
        return
    whole = _try(report, lambda: whole_index(report.path, index)) or index
    report.heads = find_heads(config, whole)
    report.problems += contradictions(config, whole)


def held_layers(index: Mapping[str, TensorInfo]) -> int:
    """Layers that the tensors are of; what config.json says may be about the trunk of a head."""
    return len({found[1] for name in index if (found := _LAYER.search(name))})


def count_parameters(index: Mapping[str, TensorInfo], quantisation: Mapping[str, Any] | None) -> int:
    """Parameters of the model: packed words count as what they hold, scales of groups do not count."""
    total = 0
    for name, info in index.items():
        base = name.rsplit(".", 1)[0]
        packed = f"{base}.scales" in index
        if packed and name.endswith((".scales", ".biases")):
            continue
        if packed and info.dtype == "U32":
            own = (quantisation or {}).get(base)
            bits = (own if isinstance(own, dict) else quantisation or {}).get("bits", 4)
            total += info.size * 32 // bits if type(bits) is int and bits > 0 else info.size
        else:
            total += info.size
    return total


def _text(report: Inspection, ref: ModelRef) -> None:
    """Tokenizer state and end ids, checked against the vocabulary."""
    from .tokenizer import lacking, load_tokenizer

    report.end_ids = sorted(_try(report, lambda: end_ids(ref.path, ref.config)) or ())
    lack = lacking(ref.path)
    try:
        tokenizer = None if lack else load_tokenizer(ref.path)
    except SpecError as error:
        report.tokenizer = {"state": "broken"}
        _note(report, error)
        return
    if tokenizer is None:
        report.tokenizer = {"state": "none"}
        if report.kind == "target":  # a drafter has its target's
            step = "Copy them from the model this one was made of; without them the prompt can only be --prompt-ids"
            report.problems.append(
                Finding("L41", "warning", f"tokenizer of {ref.name}", lack, "tokenizer.json and its settings", step)
            )
        return
    report.end_ids = sorted({*report.end_ids, *tokenizer.end_ids})
    report.tokenizer = {
        "state": "ok",
        "tokens": len(tokenizer),
        "control_tokens": len(tokenizer.control_ids),
        "chat_template": tokenizer.has_chat_template,
    }
    report.problems += _vocabulary(report, tokenizer)


def _vocabulary(report: Inspection, tokenizer: Tokenizer) -> list[Finding]:
    """A tokenizer that does not belong to this model."""
    vocab = report.vocab_size
    if vocab is None:
        return []
    step = "Take tokenizer and config.json from one source"
    findings = []
    if len(tokenizer) > vocab:
        findings.append(
            Finding("C06", "warning", "tokenizer", f"{len(tokenizer)} tokens", f"at most vocab_size {vocab}", step)
        )
    past = [token for token in report.end_ids if token >= vocab]
    if past:
        findings.append(Finding("C07", "warning", "end ids", str(past), f"ids below vocab_size {vocab}", step))
    return findings


def _owner(report: Inspection, ref: ModelRef) -> None:
    """Plugin that loads this target; core's generic one otherwise, when mlx-lm knows the model_type."""
    manager = _manager()
    owner = _try(report, lambda: manager.registry.target_owner(ref.model_type))
    report.owner = owner or manager.core_name
    report.distribution = _distribution(report.owner)
    if owner is None and report.ok:
        try:
            _check_generic(ref)
        except SpecError as error:
            report.owner = report.distribution = None
            _note(report, error)


def _check_generic(ref: ModelRef) -> None:
    """LoadError when core's generic target cannot serve it; the module is built without weights."""
    from mlx_lm.utils import _get_classes

    from .checkpoint import load_error
    from .state import from_mlx_lm

    try:
        model_class, arguments = _get_classes(dict(ref.config))
        model = model_class(arguments.from_dict(dict(ref.config)))
    except Exception as error:  # ValueError for an unknown type, whatever else its module raises
        raise load_error(ref, ref.config, error) from error
    from_mlx_lm(model)


def _fits(report: Inspection, ref: ModelRef, candidates: Sequence[str]) -> None:
    """Built-in drafters, heads in the checkpoint, what plugins offer, and the candidates given."""
    blocked = "" if report.ok else "the target itself cannot be used, see the errors"
    any_size = f"any smaller causal LM with the same tokenizer, vocabulary up to {report.vocab_size}"
    for kind, reason in (("prompt-lookup", "works with every target"), ("full-model", any_size)):
        report.drafters.append(DrafterFit(kind, "built in", report.ok, blocked or reason))
    for head in report.heads:
        whole = not any(problem.code == "C03" for problem in report.problems)
        use = "install a plugin that drafts with it"
        if report.embedded:
            use = f"use it with --draft-kind {report.embedded}"
        reason = f"{head.tensors} tensors; {use}" if whole else "its tensors are not complete"
        report.drafters.append(DrafterFit(HEAD_KIND, f"in this checkpoint ({head.prefix})", whole, reason))
    record = _manager().record(report.owner) if report.owner else None
    for claim in record.claims.drafters if record is not None and record.claims is not None else ():
        if claim.model_types:
            types = ", ".join(claim.model_types)
            report.drafters.append(
                DrafterFit(claim.kind, f"plugin {claim.owner}", report.ok, f"a directory of model_type {types}")
            )
    report.drafters += _without_files(report.ok, blocked)
    report.drafters += [_candidate(ref, name) for name in candidates]


def _without_files(ok: bool, blocked: str) -> list[DrafterFit]:
    """Drafters of plugins whose kinds need no directory: which targets they draft for is theirs to say."""
    manager = _manager()
    claims = [c for record in manager.records if record.claims is not None for c in record.claims.drafters]
    return [
        DrafterFit(c.kind, f"plugin {c.owner}", ok, blocked or f"needs no directory; use it with --draft-kind {c.kind}")
        for c in claims
        if c.owner != manager.core_name and not c.model_types and c.detect is None
    ]


def _candidate(ref: ModelRef, name: str) -> DrafterFit:
    """One drafter directory against this target, by the checks that run before weights are loaded."""
    from .conversion.trunk import PASSING
    from .loading import choose_drafter, validate_pair

    kind, choice = "?", None
    try:
        choice = choose_drafter(name, None, {}, ref)
        if choice is None:
            return DrafterFit(kind, name, False, "no drafter")
        kind = choice.kind
        findings = validate_pair(ref, choice)
    except PairError as refused:
        reason = "; ".join(listed([f for f in refused.findings if f.severity == "error"], coded=True))
        return DrafterFit(kind, name, False, reason, _stages_of(ref, choice) if choice is not None else [])
    except SpecError as error:
        return DrafterFit(kind, name, False, error.line())
    stages = _stages_of(ref, choice)
    told = PASSING if stages else ()  # by the stage "trunk"
    reason = "; ".join(f.line() for f in findings if f.code not in told)
    return DrafterFit(kind, name, True, reason or ("see its stages" if stages else "no findings"), stages)


def _stages_of(target: ModelRef, choice: DrafterChoice) -> list[Stage]:
    """Stages of a drafter directory that holds a head."""
    from .loading import is_extracted

    if choice.kind != HEAD_KIND or choice.ref is None or choice.ref.path == target.path:
        return []
    return pair_stages(target, choice.ref, is_extracted(choice))
