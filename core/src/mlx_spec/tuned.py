"""The block size that `spec tune` measured fastest, kept per pair and kind of machine.

An entry is there only when drafting at that width beat plain decoding; it is used when nobody asks for another width.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

AREA = "tuned"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Tuned:
    """One measured choice.

    Attributes:
        block_size: L, anchor counted.
        gain: decode speed over plain decoding, geometric mean over what it was measured on.
        measured: when, as UTC text.
    """

    block_size: int
    gain: float
    measured: str

    def line(self) -> str:
        """What a person is told when it is used."""
        return f"block size L={self.block_size} as spec tune measured it ({self.gain:.2f}x plain, {self.measured[:10]})"


def read_tuned(key: str, directory: Path | None = None) -> Tuned | None:
    """What is stored for the pair of this key on this kind of machine; None when nothing sensible is."""
    from .diskcache import read_entry
    from .width import MAX_BLOCK_SIZE

    data = read_entry(AREA, _name(key), directory) or {}
    size, measured = data.get("block_size"), data.get("measured")
    gain: Any = data.get("gain")
    if data.get("version") != VERSION or type(size) is not int or not 2 <= size <= MAX_BLOCK_SIZE:
        return None
    if type(gain) not in (int, float) or not math.isfinite(gain) or not isinstance(measured, str):
        return None
    return Tuned(size, gain, measured)


def write_tuned(key: str, tuned: Tuned, directory: Path | None = None) -> bool:
    """Store a choice in the place of an earlier one; False when that was not possible."""
    from .diskcache import write_entry

    return write_entry(AREA, _name(key), {"version": VERSION, **asdict(tuned)}, directory)


def forget_tuned(key: str, directory: Path | None = None) -> bool:
    """Remove what is stored; True when there was something."""
    from .diskcache import remove_entry

    return remove_entry(AREA, _name(key), directory)


def _name(key: str) -> str:
    from .costs import machine_key

    return f"{key}-{machine_key()}"
