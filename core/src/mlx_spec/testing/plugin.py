"""pytest plugin of the conformance kit: `-p mlx_spec.testing.plugin`.

It leaves out the tests of capabilities that a class does not declare and prints which those were, turns a
skipped contract test into a failure, and shows a broken contract as its message alone.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from .contracts.base import CAPABILITIES, Contract, given_meaning
from .contracts.whole import is_contract, weakened
from .faults import ContractFault

pytest.register_assert_rewrite(
    *(f"mlx_spec.testing.contracts.{name}" for name in ("plugin", "target", "drafter", "state", "kernel", "pair"))
)

_LEFT_OUT = pytest.StashKey[dict[str, dict[str, int]]]()
_NOTES = pytest.StashKey[dict[str, list[str]]]()


def pytest_configure(config: pytest.Config) -> None:
    """A place for what is told at the end."""
    config.stash[_LEFT_OUT] = {}
    config.stash[_NOTES] = {}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of undeclared capabilities; refuse classes that dropped the check of themselves."""
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        cls = _contract_of(item)
        missing = _missing(cls, item) if cls is not None else ""
        if cls is None or not missing:
            kept.append(item)
            continue
        dropped.append(item)
        counts = config.stash[_LEFT_OUT].setdefault(_label(cls), {})
        counts[missing] = counts.get(missing, 0) + 1
    for cls in {cls for cls in map(_contract_of, items) if cls is not None}:
        if "test_the_contract_is_whole" in {text.split()[0] for text in weakened(cls)}:
            raise pytest.UsageError(
                f"{_label(cls)} removes test_the_contract_is_whole, the test that its contract is complete. "
                "Put it back."
            )
        notes = cls.notes()
        if notes:
            config.stash[_NOTES][_label(cls)] = notes
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A contract test is not skipped; a broken contract is shown as its message."""
    report = yield
    cls = _contract_of(item)
    if cls is None:
        return report
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = (
            f"{_label(cls)}: found {item.name} skipped, expected every contract test to run.\n"
            "Look at: your fixtures. Leave a capability out, or declare expected_failure(test, reason), "
            "instead of skipping."
        )
    elif report.failed and call.excinfo is not None and isinstance(call.excinfo.value, ContractFault):
        report.longrepr = str(call.excinfo.value)
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what was left out, per class."""
    left_out, notes = config.stash[_LEFT_OUT], config.stash[_NOTES]
    if not (left_out or notes):
        return
    terminalreporter.section("mlx-spec contracts: not tested")
    for label in sorted({*left_out, *notes}):
        for reason, count in left_out.get(label, {}).items():
            tests = "1 test" if count == 1 else f"{count} tests"
            terminalreporter.write_line(f"{label}: {reason}: {tests} left out")
        for text in notes.get(label, ()):
            terminalreporter.write_line(f"{label}: {text}")


def _contract_of(item: pytest.Item) -> type[Contract] | None:
    """The author's contract class an item belongs to."""
    cls = getattr(item, "cls", None)
    return cls if isinstance(cls, type) and issubclass(cls, Contract) and not is_contract(cls) else None


def _missing(cls: type[Contract], item: pytest.Item) -> str:
    """Why the test is left out of this class, "" when it is not."""
    function = getattr(item, "obj", None)
    wanted: tuple[str, ...] = getattr(function, "mlx_spec_needs", ())
    declared = getattr(cls, "capabilities", None) or ()
    if wanted and not any(name in declared for name in wanted):
        return f"{' or '.join(wanted)} not declared ({CAPABILITIES[wanted[0]]})"
    given: str = getattr(function, "mlx_spec_needs_given", "")
    return "" if not given or _gives(cls, given) else f"no {given} given ({given_meaning(given)})"


def _gives(cls: type, name: str) -> bool:
    """Whether the class has a value of that name, or its author a fixture; None is neither."""
    owner = next((base for base in cls.__mro__ if name in vars(base)), None)
    value = vars(owner)[name] if owner is not None else None
    return owner is not None and value is not None and (isinstance(value, str) or not is_contract(owner))


def _label(cls: type) -> str:
    return cls.__name__
