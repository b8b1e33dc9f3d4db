"""A loaded pair and the plan it runs by."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .asked import check_arguments, check_level, check_values, check_width
from .device import Device
from .errors import FINDINGS, ExactnessError, Finding, LoadError, UsageError
from .kernels import KernelUse, unrounded, use_kernels
from .loading import (
    DRAFTER_ARGUMENT,
    KIND_ARGUMENT,
    DrafterChoice,
    check_kind,
    choose_drafter,
    idle_head,
    load_drafter,
    load_target,
    open_ref,
    validate_pair,
)
from .settings import get_settings
from .types import LEVELS, ExactnessReport, Level, ModelRef

if TYPE_CHECKING:
    from .draft_state import DraftState
    from .greedy import GreedyChoice
    from .models import Drafter, Target
    from .tokenizer import Tokenizer

log = logging.getLogger("mlx_spec.load")
said = logging.getLogger(FINDINGS)


@dataclass(slots=True)
class Plan:
    """What a pair will do and why; everything a status page or a log line needs.

    Attributes:
        requested: drafter kind that was asked for ("none" when nothing was).
        active: True when rounds will draft.
        block_size, block_size_from: L (anchor counted) and who decided it.
        exactness: the probe's report, None before a probe or without a drafter.
        reason: why it is (not) active, in one sentence.
        per_row_accepts: False when the rows of a lane all keep the fewest drafts accepted in it.
        notes, findings: everything else said while loading.
        kernels: what runs in the place of mlx's own operations, in both models.
    """

    requested: str = "none"
    active: bool = False
    block_size: int = 1
    block_size_from: str = "no drafter"
    exactness: ExactnessReport | None = None
    exactness_asked: str = "greedy"
    reason: str = "no drafter was asked for"
    per_row_accepts: bool = True
    kv_bits: int | None = None
    kv_group_size: int = 64
    prefill_step: int = 2048
    notes: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    kernels: KernelUse = field(default_factory=KernelUse)

    @property
    def level(self) -> str:
        """Exactness level in force: the probe's, or "unproven"."""
        return self.exactness.level if self.exactness is not None else "unproven"

    def demand(self, level: Level) -> None:
        """Raise ExactnessError unless replies are proven at least this exact; plain decoding always is."""
        check_level(level)
        if not self.active or LEVELS.index(self.level) >= LEVELS.index(level):
            return
        raise ExactnessError(
            "exactness",
            found=f"{self.level} at L={self.block_size} ({self.reason})",
            expected=f"at least {level}",
            next_step=f"Load the pair with exactness={level!r}, which narrows the block or decodes plainly",
            code="X01",
        )

    def line(self) -> str:
        """The start line: one line of key=value pairs."""
        state = "on" if self.active else "off"
        accepts = "" if self.per_row_accepts else "accepts=shortest-row "
        level = self.level if self.active or self.exactness is not None else "plain"  # there is nothing to prove
        return (
            f"speculation={state} kind={self.requested} block_size={self.block_size} "
            f"block_size_from={self.block_size_from.replace(' ', '-')} exactness={level} {accepts}"
            f"reason={self.reason!r} kernels={self.kernels.line()!r}"
        )


def _greedy() -> GreedyChoice:
    from .greedy import PLAIN

    return PLAIN


@dataclass(slots=True)
class Pair:
    """A target, its drafter (or None), the tokenizer (or None) and the plan.

    Any thread may use a pair, whichever thread loaded it: engines take turns on its `device`. Code that calls
    models or states itself, in a process of several threads, does so in a function given to `device.run`.
    """

    target: Target
    drafter: Drafter | None
    tokenizer: Tokenizer | None
    plan: Plan
    target_ref: ModelRef
    drafter_ref: ModelRef | None = None
    end_ids: frozenset[int] = frozenset()
    token_limit: int | None = None
    owner: str = "core"
    drafter_owner: str = "core"
    costs: Any = None
    device: Device = field(default_factory=Device, repr=False, compare=False)
    greedy: GreedyChoice = field(default_factory=_greedy, repr=False, compare=False)
    _blank: DraftState | None = field(default=None, init=False, repr=False, compare=False)  # see membership
    _said: set[str] = field(default_factory=set, init=False, repr=False, compare=False)  # faults that were logged

    @property
    def key(self) -> str:
        """Names this pair on this machine in caches: weights, quantisation, K/V mode."""
        return pair_key(self)


def load(
    target: str,
    drafter: str | None = None,
    kind: str | None = None,
    block_size: int | None = None,
    *,
    block_size_from: str = "operator",
    drafter_from: str = DRAFTER_ARGUMENT,
    kind_from: str = KIND_ARGUMENT,
    exactness: str = "greedy",
    probe: bool = True,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    prefill_step: int | None = None,
    dtype: str | None = None,
    options: Mapping[str, object] | None = None,
    check: Callable[[Pair], object] | None = None,
    tick: Callable[[str], None] | None = None,
) -> Pair:
    """Load a target and, when asked for, its drafter; validate, choose a width, prove exactness.

    May be called in any thread; the pair is not bound to it. What can be refused unread is refused first.

    Args:
        target, drafter: local directory, hub id, or demo:PLUGIN.
        kind: "mtp", "full-model", "prompt-lookup", "none" or None (from the directory).
        block_size: L, the verified rows per round, anchor counted.
        block_size_from, drafter_from, kind_from: argument, flag or variable that gave the value, for messages.
        exactness: weakest level accepted: "bitwise", "greedy", "distribution" or "lossy".
        probe: False skips the exactness probe; the pair then runs as "unproven".
        kv_bits: 4 or 8 for a quantised K/V state, None for the model's dtype.
        dtype: "float32", "bfloat16" or "float16" casts unquantised weights after loading.
        check: called with the loaded pair before the probe, which takes long; what it raises is raised here.
        tick: told what is going on while the probe runs, which takes longer the wider the block.

    Raises:
        LoadError, PairError, UsageError: each with what was found, expected and the next step.
    """
    check_arguments(options, probe, check=check, tick=tick)
    check_values(block_size, block_size_from, dtype, exactness, kv_bits, kv_group_size, prefill_step)
    check_kind(drafter, kind, name_from=drafter_from, kind_from=kind_from)
    device, step = Device(), prefill_step or get_settings().prefill_step
    plan = Plan(exactness_asked=exactness, kv_bits=kv_bits, kv_group_size=kv_group_size, prefill_step=step)

    def choose(ref: ModelRef) -> DrafterChoice | None:
        found = choose_drafter(drafter, kind, options or {}, ref, name_from=drafter_from, kind_from=kind_from)
        return check_width(found, block_size, block_size_from)

    def work() -> Pair:
        pair = _load(device, plan, target, choose, dtype)
        if drafter is None and kind is None and (idle := idle_head(pair.target_ref)):
            plan.notes.append(idle)
        if check is not None:
            check(pair)
        _choose_width(pair, block_size, block_size_from)
        _prove(pair, probe, tick)
        log.info("%s", plan.line())
        return pair

    return device.run(work)


def _load(
    device: Device, plan: Plan, target: str, choose: Callable[[ModelRef], DrafterChoice | None], dtype: str | None
) -> Pair:
    """Target and drafter, validated; no width chosen yet."""
    target_ref = open_ref(target)
    choice = choose(target_ref)
    if choice is not None:
        plan.requested = choice.kind
        plan.findings = validate_pair(target_ref, choice)
        for finding in plan.findings:
            said.log(logging.WARNING if finding.severity == "warning" else logging.INFO, "%s", finding)
    loaded = load_target(target_ref)
    _cast(loaded, dtype)
    _check_quantised(plan.kv_bits, plan.kv_group_size, loaded)
    import mlx.nn as nn

    from .greedy import GreedyChoice
    from .plugins import get_manager

    plan.notes += get_manager().failures()
    greedy = nn.Sequential(GreedyChoice())  # a module that another one holds can be replaced
    plan.kernels = use_kernels(loaded.model, greedy)
    _check_experts(loaded)
    pair = Pair(loaded, None, None, plan, target_ref, device=device, greedy=greedy.layers[0])
    _attach_text(pair)
    networks = [loaded.model]
    if choice is not None:
        pair.drafter = load_drafter(choice, loaded)
        _check_chains(pair.drafter)
        _cast(pair.drafter, dtype)
        names = [name for name in pair.drafter.networks if getattr(pair.drafter, name) is not None]
        if names:
            # modules that another one holds: one that describes itself is replaced as a whole
            whole = nn.Sequential(*(getattr(pair.drafter, name) for name in names))
            plan.kernels = plan.kernels.merged(use_kernels(whole))
            for name, network in zip(names, whole.layers, strict=True):
                setattr(pair.drafter, name, network)
            networks += whole.layers
        pair.drafter_ref, pair.drafter_owner = choice.ref, choice.owner
    if note := unrounded(plan.kernels, *networks):
        plan.notes.append(note)
        said.warning("%s", note)
    return pair


def _cast(model: Target | Drafter, dtype: str | None) -> None:
    if dtype is None or model.model is None:
        return
    import mlx.core as mx

    kind: mx.Dtype = getattr(mx, dtype)
    model.model.set_dtype(kind)
    if hasattr(model, "dtype"):
        model.dtype = kind


def _check_chains(drafter: Drafter) -> None:
    if drafter.capabilities.tree:
        raise LoadError(
            f"drafter of kind {drafter.kind}",
            found="the capability tree: drafts that branch",
            expected="chains of tokens, which is what a round verifies",
            next_step="Use another drafter, or leave tree False and draft the best branch",
            code="L34",
        )


def _check_experts(target: Target) -> None:
    """LoadError for experts that neither a kernel nor mlx's own operation multiplies here."""
    from .kernels import device_kind

    if target.model is None or device_kind() != "cpu":
        return
    import mlx.core as mx
    from mlx_lm.models.switch_layers import SwitchLinear

    for _, layer in target.model.named_modules():
        if type(layer) is SwitchLinear and layer["weight"].dtype != mx.float32:
            kept = str(layer["weight"].dtype).removeprefix("mlx.core.")
            raise LoadError(
                f"experts of {target.ref.name}",
                found=f"{kept} weights on a CPU and no kernel for them, where MLX multiplies float32 alone",
                expected="float32 or quantised experts, or the kernels of mlx-spec-cpu",
                next_step="Give --dtype float32 (dtype= in Python), or see in spec doctor why no kernels run",
                code="L66",
            )


def _check_quantised(bits: int | None, group_size: int, target: Target) -> None:
    """UsageError for a target that keeps no quantised K/V, LoadError when its heads do not split so."""
    if bits is None:
        return
    import mlx.core as mx

    if not target.capabilities.quantised_kv:
        raise UsageError(
            "kv_bits",
            found=f"{bits} for a target ({target.model_type}) that keeps no quantised K/V",
            expected="none",
            next_step="Leave it out",
            code="U39",
        )
    # The shapes of one step show it: nothing is computed.
    target.forward(mx.array([[0]], dtype=mx.int32), target.make_states(bits, group_size))


def _attach_text(pair: Pair) -> None:
    """Tokenizer, end ids and the number of ids that mean something."""
    from .checkpoint import end_ids
    from .plugins import get_manager
    from .registry import CORE
    from .tokenizer import load_tokenizer

    path = pair.target_ref.path
    pair.owner = get_manager().registry.target_owner(pair.target_ref.model_type) or CORE
    pair.tokenizer = load_tokenizer(path)
    ends = set(end_ids(path, pair.target_ref.config))
    if pair.tokenizer is not None:
        ends |= set(pair.tokenizer.end_ids)
        if len(pair.tokenizer) < pair.target.vocab_size:
            pair.token_limit = len(pair.tokenizer)
    pair.end_ids = frozenset(ends)


def _choose_width(pair: Pair, block_size: int | None, source: str) -> None:
    from .costs import load_costs
    from .tuned import read_tuned
    from .width import resolve_block_size

    drafter, plan = pair.drafter, pair.plan
    if drafter is None:
        return
    operator = None if block_size is None else (block_size, source)
    stored = read_tuned(pair.key) if operator is None else None
    chosen = resolve_block_size(operator, drafter.card, drafter.kind, tuned=stored)
    plan.block_size, plan.block_size_from = chosen.L, chosen.source
    plan.notes += chosen.notes
    for text in chosen.notes:
        said.log(logging.INFO if chosen.source == "tuned" else logging.WARNING, "%s", text)
    plan.active = chosen.L > 1
    plan.per_row_accepts = drafter.kind != "dflash" or get_settings().dflash_per_row_accepts
    plan.reason = "drafter loaded" if plan.active else "block size 1 turns drafting off"
    if plan.active and plan.kv_bits is not None and not drafter.capabilities.quantised_kv:
        plan.active = False
        plan.reason = f"plain decoding: {drafter.kind} does not read {plan.kv_bits}-bit K/V; without kv_bits it drafts"
        log.warning("%s", plan.reason)
    if plan.active:
        pair.costs = load_costs(pair.key)


def _prove(pair: Pair, probe: bool, tick: Callable[[str], None] | None) -> None:
    """Run or recall the exactness probe, narrow the width to what is exact, or turn drafting off."""
    from .probe import prove

    plan, settings = pair.plan, get_settings()
    if not plan.active:
        return
    if not probe:
        plan.reason = "exactness unproven: the probe was skipped"
        return
    report = prove(pair, tick=tick or (lambda text: None))
    plan.exactness = report
    reached = LEVELS.index(report.level) >= LEVELS.index(plan.exactness_asked)
    if reached and report.width == plan.block_size:
        plan.reason = f"exactness {report.level} at L={report.width} ({report.source})"
    elif reached and report.width > 1:
        plan.notes.append(f"block size narrowed from {plan.block_size} to {report.width}: {report.reason}")
        plan.block_size, plan.block_size_from = report.width, "exactness probe"
        plan.reason = f"widest exact L is {report.width} ({report.level})"
    elif settings.allow_inexact:
        plan.reason = f"MLX_SPEC_ALLOW_INEXACT=1 overrides: {report.reason}"
        plan.notes.append(plan.reason)
        said.warning("%s", plan.reason)
    else:
        plan.active = False
        plan.reason = f"plain decoding: exactness {plan.exactness_asked} asked, {report.level} reached; {report.reason}"
        log.warning("%s", plan.reason)


def pair_key(pair: Pair) -> str:
    """Hex key over both weights' fingerprints, K/V mode, dtypes, mlx version, device, kernels, options."""
    import hashlib

    import mlx.core as mx

    from . import __version__
    from .checkpoint import fingerprint

    parts = [
        __version__,
        fingerprint(pair.target_ref.path),
        fingerprint(pair.drafter_ref.path) if pair.drafter_ref is not None else pair.plan.requested,
        str(pair.plan.kv_bits),
        str(pair.plan.kv_group_size),
        str(pair.plan.prefill_step),
        str(pair.target.dtype),
        mx.__version__,
        str(mx.default_device()),
        pair.plan.kernels.line(),
        repr(sorted(pair.drafter.card.extra.items()))
        if pair.drafter is not None
        else "",  # options, and what they led to
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
