"""What passes between core and plugins in one round. No mlx import at run time.

Letters: B rows of a lane, K drafted tokens, L = K + 1 verified rows (anchor + drafts), V vocabulary,
D hidden size, a accepted drafts, n committed positions (rows held by the target's state).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import mlx.core as mx

DrafterKind = str  # "mtp", "dflash", "full-model", "prompt-lookup", "none" or a kind a plugin registered
Acceptance = Literal["greedy", "rejection", "coupled"]
Level = Literal["bitwise", "greedy", "distribution", "lossy", "unproven"]
LEVELS: tuple[str, ...] = ("lossy", "unproven", "distribution", "greedy", "bitwise")  # weakest first
Side = Literal["target", "drafter"]
Message = Mapping[str, Any]  # {"role": ..., "content": ...}, as chat templates take it


@dataclass(frozen=True, slots=True)
class ModelRef:
    """Where a model comes from, resolved to a local folder before any hook sees it."""

    name: str
    path: Path
    config: Mapping[str, object] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        """`model_type` of config.json, or "" when it declares none."""
        value = self.config.get("model_type", "")
        return value if isinstance(value, str) else ""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a target or drafter can do. The engine reads these flags, never names."""

    batch: bool = True  # more than one row per lane; a target without it serves one request at a time
    sampling: bool = True  # drafts for sampled requests too (drafter); without it only greedy ones draft
    tree: bool = False  # drafts branch; refused when loading, since the engine verifies chains
    quantised_kv: bool = True  # works over (target) or reads (drafter) a quantised K/V state
    media: bool = False  # takes images, audio or video; for people and kits, a request here holds token ids only
    recurrent: bool = False  # holds a recurrent state
    conv: bool = False  # holds short-convolution windows
    window: bool = False  # holds sliding-window K/V
    history: Literal["none", "last", "all"] = "none"  # committed rows' taps a drafter must see


@dataclass(frozen=True, slots=True)
class DrafterCard:
    """What a drafter directory says about itself, read before its weights are loaded."""

    kind: DrafterKind
    model_type: str
    block_size: int | None = None  # L the drafter declares (anchor counted), None when it declares none
    vocab_size: int | None = None
    max_block_size: int | None = None  # L it can never exceed, None when unbounded
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class Draft:
    """A guess of at most K tokens per row.

    Attributes:
        tokens: (B, K) int32, may be lazy; entries at and past `counts[b]` are ignored.
        counts: drafted tokens per row, 0..K; None means K for every row.
        probs: (B, K, V) float32, the distribution each token was really drawn from; None means a
            point mass (n-gram and argmax drafters).
        confidence: (B, K) float32 advice for the governor, never used by acceptance.
    """

    tokens: mx.array
    counts: Sequence[int] | None = None
    probs: mx.array | None = None
    confidence: mx.array | None = None


@dataclass(slots=True)
class Verification:
    """What the target says after each input row; row 0 belongs to the anchor.

    Attributes:
        logits: (B, L, V), raw (no temperature, no processors), model dtype or float32.
        taps: named intermediates asked for, e.g. {"hidden": (B, L, D)} (post-norm hidden state).
    """

    logits: mx.array
    taps: dict[str, mx.array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one row emits in one round: a accepted drafts, then one token of the target's own.

    `keep` counts kept verify rows, anchor first; it always equals len(tokens).
    """

    keep: int
    tokens: tuple[int, ...]
    accepted: int
    reason: str = ""  # "stop", "length", "error" or ""


@dataclass(slots=True)
class TapBlock:
    """Taps of one forward and how many leading rows of each lane row stay committed."""

    taps: dict[str, mx.array]  # name -> (B, L, ...)
    keep: list[int]


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One row's view of one round."""

    draft_ids: tuple[int, ...]
    accepted: int
    tokens: tuple[int, ...]
    block_size: int
    source: str = ""


@dataclass(slots=True)
class ExactnessReport:
    """How far a block verify is from single steps on this machine, per width L.

    Attributes:
        level: the level reached at `width`.
        width: widest L probed that reaches `level`; 1 when none does.
        asked_width: L the pair was going to run at.
        max_abs_diff, min_top2_gap, mismatches, rows: of the rows compared at `width`, or at the widest L when it is 1.
            A gap of 0 is a tie: two tokens share the highest logit, which rounding to bfloat16 makes common.
        first_layer: name of the first differing tap, "" when nothing differs.
        source: "probed" or "memo".
        widths: per width 2..asked: width, level, rows, unequal, mismatches, max_abs_diff, min_gap.
    """

    level: Level
    width: int
    asked_width: int
    max_abs_diff: float = 0.0
    min_top2_gap: float = float("inf")
    first_layer: str = ""
    mismatches: int = 0
    rows: int = 0
    source: str = "probed"
    reason: str = ""
    key: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    widths: list[dict[str, Any]] = field(default_factory=list)
