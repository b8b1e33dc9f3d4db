"""What every contract shares: capabilities, fixtures, and the check of the contract itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pytest

from ..faults import require
from . import whole

if TYPE_CHECKING:
    from ...models import Drafter, Target
    from ..writers import TinyPair

F = TypeVar("F", bound=Callable[..., Any])

CAPABILITIES: Mapping[str, str] = {
    "batch": "several requests in one lane",
    "sampling": "temperature, with the law of every draw reported",
    "window": "sliding windows: prompts around and past them",
    "recurrent": "recurrent state of fixed size",
    "conv": "short convolution windows",
    "taps": "named intermediates of the target",
    "tree": "drafts that branch",
    "quantised_kv": "K/V stored in 4 or 8 bits",
}
"""What a subclass may declare, and what it means."""

SMALLEST = {"tokens": 6, "block_size": 3}
"""Least values of settings that a subclass may change."""

_meanings: dict[str, str] = {}
_folders: dict[str, TinyPair] = {}
_loaded: dict[Any, Any] = {}


def needs(*capabilities: str) -> Callable[[F], F]:
    """The test runs when the subclass declares one of these; else it is left out, and the summary says so."""

    def mark(function: F) -> F:
        function.mlx_spec_needs = capabilities  # type: ignore[attr-defined]
        return function

    return mark


def needs_given(name: str, meaning: str) -> Callable[[F], F]:
    """The test runs when the subclass gives `name`; else the summary says what is not found."""

    def mark(function: F) -> F:
        function.mlx_spec_needs_given = name  # type: ignore[attr-defined]
        _meanings[name] = meaning
        return function

    return mark


def given_meaning(name: str) -> str:
    """What is not found without a given `name`."""
    return _meanings[name]


class Contract:
    """Base of all contracts. Subclass one of those, say what is tested and what it can do.

    Attributes:
        capabilities: names out of `CAPABILITIES` that the thing under test has. A name left out is printed.
        family: whose tiny checkpoints are written (see `python -m mlx_spec.testing tiny`).
        options: options of that family's writer.
        seeds: each parametrised test runs once per seed; the seed is part of the test's name.
        level: "bitwise" when L rows at once give the bytes of L single steps, "greedy" when the tokens.

    Fixtures to override: `target`, `drafter`, `folders` (the two directories), and those of each contract.
    """

    capabilities: ClassVar[frozenset[str] | set[str] | None] = None
    family: ClassVar[str] = "llama"
    options: ClassVar[Mapping[str, Any]] = {}
    seeds: ClassVar[tuple[int, ...]] = (1,)
    level: ClassVar[str] = "bitwise"

    @classmethod
    def declares(cls, capability: str) -> bool:
        """Whether the subclass has this capability."""
        return capability in (cls.capabilities or ())

    @classmethod
    def notes(cls) -> list[str]:
        """What the summary says besides what was left out."""
        return [] if cls.level == "bitwise" else [f"level {cls.level}: blocks are compared by token, not by bytes"]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One run per seed for tests that take one."""
        if "seed" in metafunc.fixturenames:
            metafunc.parametrize("seed", type(self).seeds, ids=lambda seed: f"seed{seed}")

    # -- fixtures ----------------------------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def _kit_is_active(self, request: pytest.FixtureRequest) -> None:
        require(
            request.config.pluginmanager.has_plugin("mlx_spec.testing.plugin"),
            "pytest plugin of the conformance kit",
            found="it not loaded",
            expected="-p mlx_spec.testing.plugin",
            look='addopts in pyproject.toml: [tool.pytest.ini_options] addopts = "-p mlx_spec.testing.plugin"',
        )

    @pytest.fixture
    def folders(self, tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
        """Directories of a tiny target and drafter; written once per family and options, never to be changed."""
        return tiny_folders(tmp_path_factory, self.family, self.options, self.seeds[0])

    @pytest.fixture
    def target(self, folders: TinyPair) -> Target:
        """The target, loaded through the hooks of whoever claims its model_type."""
        return loaded_target(folders.target)

    @pytest.fixture
    def drafter(self, folders: TinyPair, target: Target) -> Drafter:
        """The drafter, loaded through the hooks of whoever recognises its directory."""
        require(
            folders.drafter is not None,
            f"drafter of family {self.family!r}",
            found="a writer of tiny checkpoints that writes no drafter",
            expected="a drafter directory, or a `drafter` fixture of your own",
            look="the function you gave to register.tiny, or override the drafter fixture in your test class",
        )
        return loaded_drafter(folders.drafter, target)  # type: ignore[arg-type]

    # -- the contract itself -----------------------------------------------------------------------------

    def test_the_contract_is_whole(self) -> None:
        """No test of the contract was overridden, deleted or skipped without a strict xfail and a reason."""
        faults = whole.weakened(type(self))
        require(
            not faults,
            f"contract tests of {type(self).__name__}",
            found="; ".join(faults),
            expected="every test of the contract as the kit has it",
            look="your test class. A known fault is declared, not hidden: expected_failure(Contract.test_name, reason)",
        )

    def test_the_declaration_is_known(self) -> None:
        """`capabilities` is declared, with names the kit knows."""
        declared = type(self).capabilities
        require(
            declared is not None,
            f"capabilities of {type(self).__name__}",
            found="no declaration",
            expected=f"a set of {', '.join(CAPABILITIES)}",
            look="your test class: capabilities = {...}, an empty set when there are none",
        )
        unknown = sorted(set(declared or ()) - set(CAPABILITIES))
        require(
            not unknown,
            f"capabilities of {type(self).__name__}",
            found=f"unknown {', '.join(map(repr, unknown))}",
            expected=f"names out of {', '.join(CAPABILITIES)}",
            look="the spelling in your test class",
        )
        require(
            not self.declares("tree"),
            f"capabilities of {type(self).__name__}",
            found="tree",
            expected="chains: this version verifies no trees",
            look="Capabilities.tree of your target or drafter; leave it False",
        )

    def test_its_settings_leave_something_to_test(self) -> None:
        """Replies are long enough and blocks wide enough for several rounds; `level` is one of two."""
        for name, least in SMALLEST.items():
            value = getattr(type(self), name, least)
            require(
                type(value) is int and value >= least,
                f"{name} of {type(self).__name__}",
                found=repr(value),
                expected=f"at least {least}, for several rounds with accepted and rejected drafts",
                look="your test class; leave it out to get the kit's own",
            )
        require(
            self.level in ("bitwise", "greedy"),
            f"level of {type(self).__name__}",
            found=repr(self.level),
            expected='"bitwise" or "greedy"',
            look="your test class",
        )


def tiny_folders(factory: pytest.TempPathFactory, family: str, options: Mapping[str, Any], seed: int) -> TinyPair:
    """Directories of a tiny pair, written once per session."""
    from ..writers import write_tiny

    key = json.dumps([family, dict(options), seed], sort_keys=True, default=str)
    known = _folders.get(key)
    if known is None or not known.target.exists():
        known = _folders[key] = write_tiny(family, factory.mktemp(family), seed, options)
    return known


def loaded_target(path: Path) -> Target:
    """The target in `path`, loaded once per session."""
    from ...loading import load_target, open_ref

    key = ("target", path)
    if key not in _loaded:
        _loaded[key] = load_target(open_ref(str(path)))
    target: Target = _loaded[key]
    return target


def loaded_drafter(path: Path, target: Target) -> Drafter:
    """The drafter in `path` for `target`, loaded once per session."""
    from ...loading import choose_drafter, load_drafter

    key = ("drafter", path, id(target))
    if key not in _loaded:
        choice = choose_drafter(str(path), None, {})
        if choice is None:
            raise RuntimeError(f"{path} was not taken for a drafter")
        _loaded[key] = (load_drafter(choice, target), target)
    drafter: Drafter = _loaded[key][0]
    return drafter
