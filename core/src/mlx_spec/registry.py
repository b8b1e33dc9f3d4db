"""Who owns what: model_types, drafter kinds and kernels, and the plugin that claimed each.

Owners are plugin names. Two plugins claiming one model_type leave it contested: nobody serves it and a
lookup raises a PluginError naming both distributions, while everything else of both keeps working.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import PluginError, SpecError
from .types import DrafterCard, ModelRef

log = logging.getLogger("mlx_spec.registry")

Detect = Callable[[ModelRef], "DrafterCard | None"]
CORE = "core"


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel a plugin brings.

    Attributes:
        op: what it computes, e.g. "attention-rows".
        backends: device kinds it can be built for, e.g. ("metal", "cuda").
        claim: "bitwise", or the tolerance it promises against `reference`.
        build: builds the kernel when it is first needed; must not run at import.
        reference: the same result in plain mlx operations.
        swap: function(module) -> the mlx module that runs the kernel in its place and shares its weights, or
            None for modules it does not cover. Core calls it on every module of a target or drafter that loaded.
        ready: function() -> (True, what runs, e.g. "avx2") or (False, why it cannot run here); asked before swap.
    """

    op: str
    backends: tuple[str, ...]
    claim: str
    build: Callable[[], Callable[..., Any]]
    reference: Callable[..., Any]
    swap: Callable[[Any], Any] | None = None
    ready: Callable[[], tuple[bool, str]] | None = None


@dataclass(frozen=True, slots=True)
class DrafterClaim:
    """One plugin's offer to build drafters of `kind`."""

    owner: str
    kind: str
    model_types: tuple[str, ...]
    detect: Detect | None = None
    options: tuple[str, ...] = ()  # names of drafting options it reads from its card

    def card(self, ref: ModelRef) -> DrafterCard | None:
        """The card of `ref` when this claim covers it; reads files only."""
        if self.model_types and ref.model_type not in self.model_types:
            return None
        if self.detect is not None:
            return self.detect(ref)
        return DrafterCard(self.kind, ref.model_type) if self.model_types else None


@dataclass(frozen=True, slots=True)
class Demo:
    """A small trained pair that a plugin ships."""

    name: str
    owner: str
    target: Path
    drafter: Path


@dataclass(slots=True)
class Register:
    """What `spec_register` receives: one plugin's claims, taken over only when all of them are sound."""

    owner: str
    distribution: str
    targets: list[str] = field(default_factory=list)
    drafters: list[DrafterClaim] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    demos: list[Demo] = field(default_factory=list)
    tinies: list[tuple[str, str]] = field(default_factory=list)

    def tiny(self, family: str, writer: str) -> None:
        """Offer seeded random checkpoints of `family` to the conformance kit and its command line.

        writer: "module:function", imported when it is first needed. It is called as
        function(out: Path, seed=N, **options) and returns the directories (target, drafter) it wrote below
        `out`; drafter is None when the family brings targets only.
        """
        (family,) = self._names("tiny family", (family,))
        module, colon, function = writer.partition(":") if isinstance(writer, str) else ("", "", "")
        if not (module and colon and function.isidentifier()):
            raise self._bad(f"tiny writer of family {family!r}", repr(writer), '"module:function"')
        self.tinies.append((family, writer))

    def demo(self, name: str, target: Path, drafter: Path) -> None:
        """Offer a pair shipped as package data: `-m demo:PLUGIN`, or the first by plugin name without -m.

        target and drafter are the same directory when the head is in the target's own checkpoint.
        """
        self.demos.append(Demo(name, self.owner, target, drafter))

    def target(self, model_type: str, *more: str) -> None:
        """Claim the targets whose config.json declares one of these model_types."""
        self.targets.extend(self._names("target model_type", (model_type, *more)))

    def drafter(
        self, kind: str, model_types: Sequence[str] = (), detect: Detect | None = None, options: Sequence[str] = ()
    ) -> None:
        """Offer drafters of `kind` ("mtp", "dflash", ...).

        model_types: config.json model_types of the drafter directories; empty for kinds that need no
        directory of their own type. detect(ref) reads files only and returns a card, or None when the
        directory is something else; without it every directory of these model_types is taken. A model_type
        that is also a target's means a head in the target's own checkpoint: detect says whether it is there.
        options: names of drafting options (`--spec-config`) it reads; they arrive in `card.extra`, and others
        are refused before anything is loaded.
        """
        names = self._names("drafter model_type", (model_types,) if isinstance(model_types, str) else model_types)
        (kind,) = self._names("drafter kind", (kind,))
        read = self._names("drafter option", options)
        self.drafters.append(DrafterClaim(self.owner, kind, tuple(names), detect, tuple(read)))

    def kernel(self, record: Kernel) -> None:
        """Bring a kernel."""
        if not isinstance(record, Kernel):
            raise self._bad("kernel", f"a {type(record).__name__}", "a mlx_spec.registry.Kernel")
        self.kernels.append(record)

    def _names(self, what: str, names: Iterable[str]) -> list[str]:
        """`names` checked to be non-empty strings."""
        checked = list(names)
        for name in checked:
            if not isinstance(name, str) or not name:
                raise self._bad(what, repr(name), "a non-empty string")
        return checked

    def _bad(self, what: str, found: str, expected: str) -> PluginError:
        return PluginError(
            f"{what} registered by {self.distribution}",
            found=found,
            expected=expected,
            next_step=f"Correct spec_register in plugin {self.owner!r}",
            code="G03",
        )


class Registry:
    """All claims of all loaded plugins."""

    def __init__(self) -> None:
        self._distributions: dict[str, str] = {}
        self._targets: dict[str, list[str]] = {}
        self._drafter_types: dict[str, list[str]] = {}
        self._bare_kinds: dict[str, list[str]] = {}
        self._claims: list[DrafterClaim] = []
        self._kernels: list[tuple[str, Kernel]] = []
        self._demos: list[Demo] = []
        self._tiny_owners: dict[str, list[str]] = {}
        self._tiny_writers: dict[str, str] = {}
        self._failed_detects: set[tuple[str, str]] = set()

    def add(self, register: Register) -> None:
        """Take over one plugin's claims."""
        self._distributions[register.owner] = register.distribution
        for model_type in register.targets:
            _claim(self._targets, model_type, register.owner)
        for claim in register.drafters:
            for model_type in claim.model_types:
                _claim(self._drafter_types, model_type, register.owner)
            if not claim.model_types and claim.detect is None:
                _claim(self._bare_kinds, claim.kind, register.owner)
            self._claims.append(claim)
        self._kernels.extend((register.owner, kernel) for kernel in register.kernels)
        self._demos.extend(register.demos)
        for family, writer in register.tinies:
            _claim(self._tiny_owners, family, register.owner)
            self._tiny_writers[family] = writer

    # -- lookups ---------------------------------------------------------------------------------------

    def target_owner(self, model_type: str) -> str | None:
        """Plugin that serves targets of `model_type`, None when nobody claims it."""
        return self._sole("target model_type", model_type, self._targets.get(model_type, []))

    def drafter_for(self, ref: ModelRef, kind: str | None = None) -> tuple[str, DrafterCard] | None:
        """(owner, card) of the drafter in `ref`, None when no plugin recognises it; `kind` narrows.

        Plugins are asked before core. Raises PluginError when two plugins recognise one directory.
        """
        self._sole("drafter model_type", ref.model_type, self._drafter_types.get(ref.model_type, []))
        claims = [c for c in self._claims if kind is None or c.kind == kind]
        hits: dict[str, DrafterCard] = {}
        # An exact model_type claim beats a detect that looks at everything; core is asked last.
        for rank in ("claimed", "detected", "core"):
            for claim in (c for c in claims if _rank(c) == rank and c.owner not in hits):
                card = self._ask(claim, ref)
                if card is not None:
                    hits[claim.owner] = card
            if hits:
                break
        if len(hits) > 1:
            raise self._contested("drafter directory", str(ref.path), list(hits))
        return next(iter(hits.items()), None)

    def kind_owner(self, kind: str) -> str | None:
        """Plugin that serves a kind which needs no directory (e.g. "prompt-lookup"), None when nobody does."""
        return self._sole("drafter kind", kind, self._bare_kinds.get(kind, []))

    def kind_owners(self, kind: str) -> tuple[str, ...]:
        """Every plugin that offers drafters of `kind`, in the order they registered."""
        return tuple(dict.fromkeys(c.owner for c in self._claims if c.kind == kind))

    def options(self, owner: str, kind: str) -> tuple[str, ...]:
        """Drafting options that `owner`'s drafters of `kind` read, sorted."""
        claims = (c for c in self._claims if c.owner == owner and c.kind == kind)
        return tuple(sorted({name for c in claims for name in c.options}))

    def kinds(self) -> tuple[str, ...]:
        """Names of all drafter kinds, sorted."""
        return tuple(sorted({c.kind for c in self._claims}))

    def model_types(self) -> tuple[str, ...]:
        """All claimed target model_types, sorted; contested ones included."""
        return tuple(sorted(self._targets))

    def demos(self) -> tuple[Demo, ...]:
        """Bundled pairs, sorted by plugin name, those of one plugin as it registered them."""
        return tuple(sorted(self._demos, key=lambda demo: demo.owner))

    def tiny_families(self) -> tuple[str, ...]:
        """Families a tiny checkpoint can be written of, sorted."""
        return tuple(sorted(self._tiny_owners))

    def tiny_writer(self, family: str) -> str | None:
        """ "module:function" that writes tiny checkpoints of `family`, None when nobody offers one."""
        owner = self._sole("tiny family", family, self._tiny_owners.get(family, []))
        return None if owner is None else self._tiny_writers[family]

    def kernels(self, op: str | None = None) -> list[tuple[str, Kernel]]:
        """(owner, kernel) of every kernel, or of those for `op`."""
        return [(owner, kernel) for owner, kernel in self._kernels if op is None or kernel.op == op]

    def conflicts(self, owner: str) -> list[PluginError]:
        """Every claim of `owner` that another plugin makes too."""
        tables = (
            ("target model_type", self._targets),
            ("drafter model_type", self._drafter_types),
            ("drafter kind", self._bare_kinds),
            ("tiny family", self._tiny_owners),
        )
        return [
            self._contested(what, key, owners)
            for what, table in tables
            for key, owners in sorted(table.items())
            if owner in owners and len(owners) > 1
        ]

    # -- inner -----------------------------------------------------------------------------------------

    def _ask(self, claim: DrafterClaim, ref: ModelRef) -> DrafterCard | None:
        """The claim's card; a detect that fails speaks only for directories of its own model_types."""
        try:
            return claim.card(ref)
        except Exception as error:  # foreign code: an error for its own directories, a warning for others'
            if ref.model_type in claim.model_types:
                raise error if isinstance(error, SpecError) else self._failed_detect(claim, ref, error) from error
            if (claim.owner, claim.kind) not in self._failed_detects:
                self._failed_detects.add((claim.owner, claim.kind))
                log.warning("%s", self._failed_detect(claim, ref, error))
            return None

    def _failed_detect(self, claim: DrafterClaim, ref: ModelRef, error: Exception) -> PluginError:
        return PluginError(
            f"plugin {claim.owner!r} looking for a drafter of kind {claim.kind} in {ref.path}",
            found=f"{type(error).__name__}: {error}",
            expected="a card or None",
            next_step=f"Report it to the authors of {self._distributions.get(claim.owner, claim.owner)}",
            code="G05",
        )

    def _sole(self, what: str, key: str, owners: Sequence[str]) -> str | None:
        """The one owner, None without any; raises when there are several."""
        if len(owners) > 1:
            raise self._contested(what, key, owners)
        return owners[0] if owners else None

    def _contested(self, what: str, key: str, owners: Sequence[str]) -> PluginError:
        names = sorted(self._distributions.get(owner, owner) for owner in owners)
        return PluginError(
            f"{what} {key!r}",
            found=f"{len(names)} distributions that claim it: {', '.join(names)}",
            expected="exactly one",
            next_step="Uninstall one of them, or name the plugins to load in MLX_SPEC_PLUGINS",
            code="G04",
        )


def _claim(table: dict[str, list[str]], key: str, owner: str) -> None:
    """Note the claim once per owner."""
    owners = table.setdefault(key, [])
    if owner not in owners:
        owners.append(owner)


def _rank(claim: DrafterClaim) -> str:
    """Which of the three turns of `drafter_for` a claim is asked in."""
    if claim.owner == CORE:
        return "core"
    return "claimed" if claim.model_types else "detected"
