"""What `spec inspect` says of an assistant: shapes, norms, quantisation; from files, no mlx here."""

from __future__ import annotations

from collections import Counter

from mlx_spec.checkpoint import tensor_index
from mlx_spec.head_stages import Stage
from mlx_spec.types import ModelRef

from .config import assistant_config
from .inventory import quantised_modules
from .validate import PACKING, validate


def assistant_stages(target: ModelRef, drafter: ModelRef) -> list[Stage]:
    """The three stages, in order. LoadError for an unusable config.json or unreadable files."""
    wrong = [finding for finding in validate(target, drafter) if finding.severity == "error"]
    packing = next((finding for finding in wrong if finding.code == PACKING), None)
    shapes = [finding for finding in wrong if finding.code != PACKING]
    text = assistant_config(drafter.config, drafter.path).text
    if shapes:
        more = f" (and {len(shapes) - 1} more)" if len(shapes) > 1 else ""
        first = shapes[0]
        found = f"{first.subject}: {first.found}, expected {first.expected} ({first.code}){more}"
        stages = [Stage("shapes", "no", found, first.next_step)]
    else:
        layers = f"{text.num_hidden_layers} layer{'s' * (text.num_hidden_layers > 1)} of width {text.hidden_size}"
        stages = [Stage("shapes", "ok", f"{layers}, reading the target's K/V")]
    stages.append(Stage("norms", "ok", "stored as they are used"))
    if packing is not None:
        found = f"{packing.subject}: {packing.found}, expected {packing.expected} ({packing.code})"
        return [*stages, Stage("quantisation", "no", found, packing.next_step)]
    return [*stages, Stage("quantisation", "ok", _stored(drafter))]


def _stored(drafter: ModelRef) -> str:
    """How the matrices are kept: the dtype of most tensors, or bits and group sizes."""
    index = tensor_index(drafter.path)
    packed = quantised_modules(assistant_config(drafter.config, drafter.path), index)
    if not packed:
        return f"{Counter(info.dtype for info in index.values()).most_common(1)[0][0]}; used as stored"
    counts = Counter(f"{how.bits} bits in groups of {how.group_size}" for how in packed.values())
    return ", ".join(f"{count} matrices in {how}" for how, count in counts.most_common())
