"""Is a contract whole? Finds tests of it that a subclass overrode, deleted or skips."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

KIT = __name__.rpartition(".")[0]  # the package all contracts live in


def expected_failure(test: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """A contract test that is known to fail: it must, or the run fails.

    class TestMine(DrafterContract):
        test_rows_of_a_batch_... = expected_failure(DrafterContract.test_rows_of_a_batch_..., "issue 12")
    """
    import pytest

    if not reason.strip():
        raise ValueError("expected_failure needs a reason that a reader can follow up")

    @functools.wraps(test)
    def copy(*args: Any, **kwargs: Any) -> Any:
        return test(*args, **kwargs)

    # a mark belongs to the function it is put on; the contract's own must stay as it is
    copy.pytestmark = list(getattr(test, "pytestmark", []))  # type: ignore[attr-defined]
    marked: Callable[..., Any] = pytest.mark.xfail(strict=True, reason=reason)(copy)
    return marked


def contract_tests(cls: type) -> dict[str, Callable[..., Any]]:
    """Tests that the contracts `cls` derives from have, by name."""
    found: dict[str, Callable[..., Any]] = {}
    for base in reversed(cls.__mro__):
        if is_contract(base):
            found |= {name: value for name, value in vars(base).items() if name.startswith("test")}
    return found


def is_contract(cls: type) -> bool:
    """Whether `cls` is one of the kit's own contract classes."""
    return cls.__module__.startswith(KIT)


def weakened(cls: type) -> list[str]:
    """What `cls` did to the tests of its contracts, in words; empty when they are all there."""
    faults = [text for name, test in contract_tests(cls).items() for text in _changed(cls, name, test)]
    marks = [mark for base in cls.__mro__ for mark in getattr(base, "pytestmark", ())]
    return faults + [f"the class is marked {mark.name}" for mark in marks if mark.name in ("skip", "skipif")]


def _changed(cls: type, name: str, test: Callable[..., Any]) -> Iterable[str]:
    now = inspect.getattr_static(cls, name, None)
    if now is test:
        return
    if not callable(now):
        yield f"{name} is deleted (it is {now!r})"
        return
    marks = list(getattr(now, "pytestmark", ()))
    xfail = next((m for m in marks if m.name == "xfail"), None)
    if any(m.name in ("skip", "skipif") for m in marks):
        yield f"{name} is skipped"
    elif xfail is None:
        yield f"{name} is overridden"
    elif not xfail.kwargs.get("strict"):
        yield f"{name} is an xfail that is not strict"
    elif not str(xfail.kwargs.get("reason", "")).strip():
        yield f"{name} is an xfail without a reason"
