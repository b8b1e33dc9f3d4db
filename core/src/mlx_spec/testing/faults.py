"""How the kit says that a contract is broken: what, found, expected, and where to look."""

from __future__ import annotations

from typing import NoReturn


class ContractFault(AssertionError):
    """A contract is broken; the message is for a person who has never seen this repository."""

    def __init__(self, what: str, *, found: object, expected: object, look: str):
        self.what, self.found, self.expected, self.look = what, found, expected, look
        super().__init__(f"{what}: found {found}, expected {expected}.\nLook at: {look}")


def broken(what: str, *, found: object, expected: object, look: str) -> NoReturn:
    """Raise a ContractFault."""
    __tracebackhide__ = True
    raise ContractFault(what, found=found, expected=expected, look=look)


def require(holds: bool, what: str, *, found: object, expected: object, look: str) -> None:
    """Raise a ContractFault unless `holds`."""
    __tracebackhide__ = True
    if not holds:
        raise ContractFault(what, found=found, expected=expected, look=look)
