"""How wide a block is: who decides L, and what values are refused.

L is the block size: verified rows per round, the anchor counted. K = L - 1 tokens are drafted. Every message
says which of the two it counts. Order: operator, then what `spec tune` stored for the pair, then what the drafter
declares, then a measured table of this device, then a default per kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UsageError
from .types import DrafterCard

if TYPE_CHECKING:
    from .spec_config import SpecConfig
    from .tuned import Tuned

SWEEP = "spec tune"  # who tries widths beyond the declared one on purpose
MAX_BLOCK_SIZE = 64  # L; a sliding-window state can take back no more rows than this
# prompt-lookup: a copy runs long where it hits and proposes nothing where it does not, so it may start
# wide; past 8 rows a verify begins to cost more on every device measured so far.
DEFAULTS: Mapping[str, int] = {"mtp": 4, "dflash": 16, "full-model": 4, "prompt-lookup": 8}
FALLBACK = 4  # kinds that plugins bring and that declare nothing
AREA = "widths"
TABLE_VERSION = 1

Operator = tuple[Any, str]  # (value as given, option or variable it came from)


@dataclass(frozen=True, slots=True)
class BlockSize:
    """L and who decided it; `notes` is what a user should be told besides."""

    L: int
    source: str
    notes: tuple[str, ...] = ()

    @property
    def K(self) -> int:
        """Drafted tokens per round."""
        return self.L - 1


def resolve_block_size(
    operator: Operator | None,
    card: DrafterCard,
    kind: str,
    device_table: Mapping[str, int] | None = None,
    exact_width: int | None = None,
    tuned: Tuned | None = None,
) -> BlockSize:
    """Decide L.

    Args:
        operator: (L, where it was set), None when nobody set it.
        tuned: what `spec tune` stored for this pair on this machine.
        device_table: kind, or "kind/model_type", -> measured L; None reads the cache folder.
        exact_width: widest L known to be exact, None when unknown.

    Raises UsageError when the operator's L is no whole number in range, or the drafter can not do it.
    """
    notes: list[str] = []
    if operator is not None:
        chosen = _from_operator(operator, card, notes)
    else:
        chosen = _from_files(card, kind, device_table, notes, tuned)
    width, source = chosen
    if exact_width is not None and width > max(1, exact_width):
        notes.append(f"block size narrowed from L={width} to L={max(1, exact_width)}, the widest exact one")
        width, source = max(1, exact_width), "exactness probe"
    return BlockSize(width, source, tuple(notes))


def _from_operator(operator: Operator, card: DrafterCard, notes: list[str]) -> tuple[int, str]:
    value, source = operator
    width = check_block_size(value, source)
    if width < 2:
        notes.append(f"block size L={width} from {source} leaves no room for drafts: drafting is off")
        return 1, source
    if card.max_block_size is not None and width > card.max_block_size:
        raise UsageError(
            f"{source} (L, anchor counted)",
            found=width,
            expected=f"at most {card.max_block_size}, which this {card.kind} drafter cannot exceed",
            next_step=f"Pass {card.max_block_size} or less",
            code="U71",
        )
    if card.block_size is not None and width > card.block_size and source != SWEEP:
        notes.append(
            f"block size L={width} from {source} is wider than the L={card.block_size} the drafter declares; "
            "drafts past that may rarely be accepted"
        )
    return width, source


def _from_files(
    card: DrafterCard, kind: str, device_table: Mapping[str, int] | None, notes: list[str], tuned: Tuned | None
) -> tuple[int, str]:
    limit = min(card.max_block_size or MAX_BLOCK_SIZE, MAX_BLOCK_SIZE)
    if tuned is not None:
        width, source = tuned.block_size, "tuned"
        notes.append(tuned.line())
    elif card.block_size is not None:
        width, source = card.block_size, "drafter"
    else:
        table = read_device_table() if device_table is None else device_table
        measured = table.get(f"{kind}/{card.model_type}", table.get(kind))
        width, source = (measured, "device table") if measured else (DEFAULTS.get(kind, FALLBACK), "default")
    if width > limit:
        notes.append(f"block size L={width} from {source} cut to L={limit}, the most this drafter and core can run")
        width = limit
    if width < 2:
        notes.append(f"block size L={width} from {source} leaves no room for drafts: drafting is off")
    return max(1, width), source


def check_block_size(value: object, option: str) -> int:
    """`value` as L, 0..64, or UsageError naming option and range. 0 and 1 both mean: draft nothing."""
    return _whole(value, option, "L, verified rows per round, anchor counted", MAX_BLOCK_SIZE)


def check_draft_tokens(value: object, option: str) -> int:
    """`value` as K, 0..63, or UsageError naming the option and the range. 0 means: draft nothing."""
    return _whole(value, option, "K, drafted tokens per round, anchor not counted", MAX_BLOCK_SIZE - 1)


def _whole(value: object, option: str, meaning: str, most: int) -> int:
    if type(value) is int and 0 <= value <= most:
        return value
    raise UsageError(
        f"{option} ({meaning})",
        found=repr(value),
        expected=f"a whole number from 0 to {most}; 0 turns drafting off",
        next_step=f"Give {option} a number in that range, or leave it out",
        code="U70",
    )


# -- measured table ------------------------------------------------------------------------------------


def read_device_table(directory: Path | None = None) -> dict[str, int]:
    """Kind, or "kind/model_type", -> L that measured fastest on this machine; {} when never measured."""
    from .costs import machine_key
    from .diskcache import read_entry

    data = read_entry(AREA, machine_key(), directory) or {}
    table = data.get("block_size")
    if data.get("version") != TABLE_VERSION or not isinstance(table, dict):
        return {}
    return {k: v for k, v in table.items() if isinstance(k, str) and type(v) is int and 1 <= v <= MAX_BLOCK_SIZE}


def write_device_table(table: Mapping[str, int], directory: Path | None = None) -> bool:
    """Keep measured block sizes for this kind of machine; False when that was not possible."""
    from .costs import machine_key
    from .diskcache import write_entry

    return write_entry(AREA, machine_key(), {"version": TABLE_VERSION, "block_size": dict(table)}, directory)


def parse_spec_config(text: str | None, flags: Mapping[str, object] | None = None) -> SpecConfig:
    """--spec-config as an object, see `spec_config.parse`."""
    from .spec_config import parse

    return parse(text, flags or {})
