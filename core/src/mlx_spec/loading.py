"""From names to a loaded pair: resolve, classify, validate, load, choose a width. In that order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .errors import MODEL_NAME, Finding, LoadError, NoEmbeddedMtpHead, PairError, RefusedError, SpecError, UsageError
from .heads import HEAD_KIND
from .registry import CORE
from .types import DrafterCard, ModelRef

if TYPE_CHECKING:
    from .models import Drafter, Target
    from .registry import Registry

DRAFTER_FLAG, KIND_FLAG = "--draft-model", "--draft-kind"
DRAFTER_ARGUMENT, KIND_ARGUMENT = "drafter", "kind"  # what `load` calls the two
FULL_MODEL = "full-model"  # the one kind without model_types of its own that still needs a directory


@dataclass(frozen=True, slots=True)
class DrafterChoice:
    """Which drafter will run and who said so."""

    kind: str
    ref: ModelRef | None
    card: DrafterCard
    owner: str  # plugin name
    decided_by: str  # "--draft-kind", "directory", ...


def open_ref(name: str, drafter: bool = False) -> ModelRef:
    """Resolve `name` to a folder and read its config.json; PluginError for an absent plugin asked for.

    drafter: which folder of a bundled pair demo:PLUGIN means.
    """
    from .checkpoint import read_config
    from .plugins import get_manager
    from .refs import resolve

    get_manager().check_asked()

    ref = resolve(name, drafter=drafter)
    return ModelRef(ref.name, ref.path, read_config(ref.path))


def load_target(ref: ModelRef) -> Target:
    """Load a target with the plugin that claimed its model_type, or core's generic one."""
    from .plugins import get_manager

    manager = get_manager()
    if manager.registry.drafter_for(ref) is not None and manager.registry.target_owner(ref.model_type) is None:
        raise LoadError(
            f"target {ref.name}",
            found=f"a drafter (model_type {ref.model_type})",
            expected="a complete language model",
            next_step="Pass this directory as --draft-model and the model it was trained for as -m",
            code="L05",
        )
    owner = manager.registry.target_owner(ref.model_type) or CORE
    target: Target | None = manager.owner_call("spec_load_target", owner)(ref=ref, config=ref.config)
    if target is None:
        raise LoadError(
            f"target {ref.name}",
            found=f"model_type {ref.model_type}, which plugin {owner} claims but did not load",
            expected="a loaded target",
            next_step=f"Report this to the authors of plugin {owner}",
            code="L21",
        )
    return target


def model_classes(ref: ModelRef) -> tuple[type, type] | None:
    """Classes the target of `ref` is built from: its plugin's, else mlx-lm's, None without either."""
    from mlx_lm.utils import _get_classes

    from .plugins import get_manager

    manager = get_manager()
    owner = manager.registry.target_owner(ref.model_type)
    own: tuple[type, type] | None = None
    if owner is not None:
        own = manager.owner_call("spec_model_classes", owner)(ref=ref, config=ref.config)
    if own is not None:
        return own
    try:
        found: tuple[type, type] = _get_classes(dict(ref.config))
    except ValueError:  # its only way to say that it knows no such model_type
        return None
    return found


def choose_drafter(
    name: str | None,
    kind: str | None,
    options: Mapping[str, object],
    target: ModelRef | None = None,
    *,
    name_from: str = DRAFTER_FLAG,
    kind_from: str = KIND_FLAG,
) -> DrafterChoice | None:
    """Classify the drafter directory; None when nothing was asked for or kind is "none".

    Without a directory the target may draft for itself, with a head its checkpoint carries.

    Args:
        options: drafting options by name; what the chosen kind does not read is refused, and any where nobody was
            asked to draft.
        name_from, kind_from: flag or variable that gave the two, which an error names.
    """
    choice = _choose(name, kind, target, name_from, kind_from)
    if choice is None and kind is None and options:
        option, value = next(iter(options.items()))
        raise UsageError(
            f"drafting option {option}",
            found=f"{value!r}, and no drafter",
            expected="a drafter that reads it",
            next_step=f"Name one with {DRAFTER_FLAG} or {KIND_FLAG}, or drop it",
            code="U78",
        )
    return choice if choice is None or not options else _with_options(choice, options)


def idle_head(target: ModelRef) -> str:
    """A note on the head that a target's checkpoint carries and nobody asked for; "" without one."""
    own = _idle(target)
    return f"the checkpoint carries a head that can draft for it: {KIND_FLAG} {own[1].kind}" if own else ""


def how_to_draft(target: ModelRef) -> str:
    """The next step for somebody who named no drafter: the head that is there already comes first."""
    own = f"{KIND_FLAG} {idle[1].kind} (a head is in this checkpoint), " if (idle := _idle(target)) else ""
    return f"Pass {own}{DRAFTER_FLAG} DIR or {KIND_FLAG} prompt-lookup"


def _idle(target: ModelRef) -> tuple[str, DrafterCard] | None:
    """(owner, card) of the head in a target's own checkpoint, if one can be read."""
    from .plugins import get_manager

    try:
        return get_manager().registry.drafter_for(target)
    except SpecError:  # a head that cannot be read is told about when it is asked for
        return None


def _with_options(choice: DrafterChoice, options: Mapping[str, object]) -> DrafterChoice:
    """The same choice with the options in its card; UsageError for one that its drafter does not read."""
    from .plugins import get_manager

    known = get_manager().registry.options(choice.owner, choice.kind)
    strange = next((name for name in options if name not in known), None)
    if strange is not None:
        raise UsageError(
            f"drafting option {strange}",
            found=f"{options[strange]!r} for a drafter of kind {choice.kind}",
            expected=f"one that this kind reads: {', '.join(known) or 'none'}",
            next_step="Drop it, or choose the kind it belongs to",
            code="U78",
        )
    return replace(choice, card=replace(choice.card, extra={**choice.card.extra, **options}))


def check_kind(
    name: str | None, kind: str | None, *, name_from: str = DRAFTER_FLAG, kind_from: str = KIND_FLAG
) -> None:
    """UsageError for a kind nobody has, or one that cannot go with a drafter directory or without.

    Opens no folder. What depends on the target, a head of its own say, is left to `choose_drafter`.
    """
    from .plugins import get_manager

    manager = get_manager()
    manager.check_asked()
    registry = manager.registry
    if kind is None or kind == "none":
        return
    if kind not in registry.kinds():
        raise UsageError(
            kind_from,
            found=kind or "an empty name",
            expected=" | ".join([*registry.kinds(), "none"]) + manager.missing(),
            next_step="Choose one of these",
            code="U26",
        )
    if kind != FULL_MODEL and registry.kind_owner(kind) is not None and name is not None:
        raise UsageError(
            name_from,
            found=f"{name or repr(name)} together with {kind_from} {kind}",
            expected="no drafter directory, since this kind has no weights",
            next_step="Drop one of the two",
            code="U21",
        )
    if kind == FULL_MODEL and name is None:
        raise _no_directory(kind, kind_from)


def _no_directory(kind: str | None, kind_from: str) -> UsageError:
    step = f"Pass {DRAFTER_FLAG} DIR, or {KIND_FLAG} prompt-lookup, which needs none"
    called = kind_from == KIND_ARGUMENT
    return UsageError(
        DRAFTER_ARGUMENT if called else DRAFTER_FLAG,
        found="no drafter directory",
        expected=f"one for {kind_from} {kind}",
        next_step="Give drafter=DIR, or kind='prompt-lookup', which needs none" if called else step,
        code="U22",
    )


def _choose(
    name: str | None, kind: str | None, target: ModelRef | None, name_from: str, kind_from: str
) -> DrafterChoice | None:
    """`choose_drafter` without the options."""
    from .plugins import get_manager

    registry = get_manager().registry
    if kind == "none" or (kind is None and name is None):
        return None
    check_kind(name, kind, name_from=name_from, kind_from=kind_from)
    if kind is not None and kind != FULL_MODEL and registry.kind_owner(kind) is not None:
        card = DrafterCard(kind=kind, model_type="")
        return DrafterChoice(kind, None, card, registry.kind_owner(kind) or CORE, kind_from)
    if name is None and target is not None and kind != FULL_MODEL:
        own = registry.drafter_for(target, kind)
        if own is not None:
            return DrafterChoice(own[1].kind, target, own[1], own[0], kind_from)
        if kind == HEAD_KIND:
            raise _no_head(target)
    if name is None:
        raise _no_directory(kind, kind_from)
    try:
        ref = open_ref(name, drafter=True)
    except SpecError as error:
        nameless = name_from not in (DRAFTER_FLAG, DRAFTER_ARGUMENT) or error.what == MODEL_NAME
        raise error.given_by(name_from) if nameless else error  # noqa: B904 - it is the same error
    return _classify(ref, kind, target, kind_from)


def _no_head(target: ModelRef) -> NoEmbeddedMtpHead:
    """The error for a target that was asked to draft for itself; says when it has a head nobody reads."""
    from .heads import counted, find_heads, promised_layers, whole_index

    heads, promised = find_heads(target.config, whole_index(target.path)), promised_layers(target.config)
    names = ", ".join(head.prefix for head in heads)
    nothing = f"no head tensors{f' (config.json declares {counted(promised)})' if promised else ''}"
    return NoEmbeddedMtpHead(
        f"head of target {target.name} (model_type {target.model_type})",
        found=f"tensors under {names}, which no installed plugin reads" if heads else nothing,
        expected="a head that an installed plugin reads",
        next_step="Install the family's plugin" if heads else _to_get_a_head(target, bool(promised)),
        code="L20",
    )


def _to_get_a_head(target: ModelRef, promised: bool) -> str:
    """The step for a target without a head; extracting one is for families whose models have them."""
    from .heads import KEEP_HEAD
    from .plugins import get_manager

    if promised:
        return KEEP_HEAD
    if apart := _apart(target):
        return apart
    manager = get_manager()
    owner = manager.registry.target_owner(target.model_type)
    claims = [claim for record in manager.records if record.claims is not None for claim in record.claims.drafters]
    heads = [claim for claim in claims if claim.kind == HEAD_KIND]
    if any(target.model_type in claim.model_types or claim.owner == owner for claim in heads):
        return KEEP_HEAD
    return (
        f"No installed plugin drafts for model_type {target.model_type} with a head: choose the kind prompt-lookup, "
        f"which needs no files, or give {DRAFTER_FLAG} DIR of a smaller model with the same tokenizer"
    )


def _apart(target: ModelRef) -> str:
    """The step for a family whose heads are models of their own; "" where checkpoints may carry them."""
    from .demos import DEMO
    from .plugins import get_manager

    manager = get_manager()
    served = manager.registry.model_types()
    record = manager.record(manager.registry.target_owner(target.model_type) or "")
    claims = record.claims.drafters if record is not None and record.claims is not None else ()
    types = [name for claim in claims if claim.kind == HEAD_KIND for name in claim.model_types]
    if not types or not set(types).isdisjoint(served):
        return ""
    one = target.name if target.name.startswith(DEMO) else f"one for this target (model_type {' or '.join(types)})"
    return f"Heads of this family are models of their own: pass {one} as --draft-model, or use another drafter"


def _recognised(
    registry: Registry, ref: ModelRef, kind: str | None, target: ModelRef | None
) -> tuple[str, DrafterCard] | None:
    """(owner, card) of the drafter directory; a whole model that carries a head counts only when meant.

    It is when the kind says so or, without a kind, when the plugin that reads the head owns the target too;
    a target that is not known rules nothing out.
    """
    found = registry.drafter_for(ref)
    if found is None or registry.target_owner(ref.model_type) is None:
        return found
    owner, card = found
    related = target is None or registry.target_owner(target.model_type) == owner
    return found if kind == card.kind or (kind is None and related) else None


def _classify(ref: ModelRef, kind: str | None, target: ModelRef | None, kind_from: str) -> DrafterChoice:
    from .plugins import get_manager

    registry = get_manager().registry
    found = _recognised(registry, ref, kind, target)
    if found is None and kind == HEAD_KIND and target is not None and ref.path == target.path:
        raise _no_head(target)
    if found is not None:
        owner, card = found
        if kind is not None and kind != card.kind:
            raise UsageError(
                kind_from,
                found=f"{kind} for {ref.name}, a drafter of kind {card.kind} (model_type {ref.model_type})",
                expected=card.kind,
                next_step=f"Drop {kind_from}, or give it {card.kind}",
                code="U23",
            )
        return DrafterChoice(card.kind, ref, card, owner, "directory")
    if kind not in (None, FULL_MODEL):
        raise UsageError(
            kind_from,
            found=f"{kind} for {ref.name} (model_type {ref.model_type or 'missing'})",
            expected=f"a directory that an installed plugin knows as a drafter of kind {kind}",
            next_step="Check `spec inspect` on the directory and `spec plugins`",
            code="U24",
        )
    vocab = ref.config.get("vocab_size")
    card = DrafterCard(
        kind=FULL_MODEL,
        model_type=ref.model_type,
        vocab_size=vocab if isinstance(vocab, int) else None,
    )
    owner = registry.kind_owner(FULL_MODEL) or CORE
    return DrafterChoice(FULL_MODEL, ref, card, owner, "directory" if kind is None else kind_from)


def validate_pair(target: ModelRef, choice: DrafterChoice) -> list[Finding]:
    """Ask every plugin about the pair, from files alone; raises PairError when a finding is an error."""
    if choice.ref is None:
        return []
    from .conversion.trunk import check_trunk
    from .plugins import get_manager

    answers = get_manager().ask_each("spec_validate_pair", target=target, drafter=choice.ref, card=choice.card)
    findings = [f for _, answer in answers if answer for f in answer]
    told = any(f.severity == "error" for f in findings)  # a pair that does not fit has no trunk in common either
    if choice.kind != FULL_MODEL and not told:
        findings += check_trunk(target, choice.ref, is_extracted(choice))
    errors = [f for f in findings if f.severity == "error"]
    if errors:
        raise PairError(findings)
    return findings


def is_extracted(choice: DrafterChoice) -> bool:
    """True for a directory that holds a head alone, of a kind its plugin also finds inside whole models."""
    from .plugins import get_manager

    manager = get_manager()
    record, targets = manager.record(choice.owner), manager.registry.model_types()
    if record is None or record.claims is None or choice.card.model_type in targets:
        return False
    inside = {t for claim in record.claims.drafters if claim.kind == choice.kind for t in claim.model_types}
    return "spec_split_drafter" in record.hooks and not inside.isdisjoint(targets)


def load_drafter(choice: DrafterChoice, target: Target) -> Drafter:
    """Load the chosen drafter with the plugin that owns it."""
    from .plugins import get_manager

    call = get_manager().owner_call("spec_load_drafter", choice.owner)
    ref = choice.ref or ModelRef(choice.kind, target.ref.path, {})
    drafter: Drafter | None = call(ref=ref, card=choice.card, target=target)
    if drafter is None:
        raise RefusedError(
            f"drafter {ref.name}",
            found=f"kind {choice.kind}, which plugin {choice.owner} did not load",
            expected="a loaded drafter",
            next_step="Check `spec plugins` for load errors",
            code="L21",
        )
    return drafter
