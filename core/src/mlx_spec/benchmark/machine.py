"""What a figure belongs to: machine, device, versions, the pair's files. Names no person, no path."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..pair import Pair
    from ..types import ModelRef

PACKAGES = ("mlx", "mlx-metal", "mlx-cpu", "mlx-lm", "mlx-vlm", "mlx-spec", "mlx-spec-gemma4")


def describe_machine() -> dict[str, Any]:
    """System, processor, memory, the device mlx computes on, and how busy the machine is."""
    import mlx.core as mx

    return {
        "system": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory(),
        "device": str(mx.default_device()),
        "device_info": {name: value for name, value in _device_info().items() if isinstance(value, str | int | float)},
        "load_average": load_average(),
    }


def load_average() -> list[float]:
    """Runnable processes over 1, 5 and 15 minutes; empty where the system does not tell."""
    try:
        return [round(x, 2) for x in os.getloadavg()]
    except OSError:  # the system does not tell
        return []


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):  # a system that does not know these names
        return None


def _device_info() -> dict[str, Any]:
    import mlx.core as mx

    try:
        return dict(mx.device_info())
    except RuntimeError:  # a back end without one
        return {}


def versions() -> dict[str, str]:
    """Installed versions of everything that may move a figure."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # not installed, so it moves no figure
            continue
    return found


def describe_pair(pair: Pair) -> dict[str, Any]:
    """The pair and how it runs: names, weights' fingerprints, kind, width, exactness, state and dtype."""
    plan = pair.plan
    report = plan.exactness
    return {
        "target": _model(pair.target_ref, pair.target),
        "drafter": None if pair.drafter_ref is None else _model(pair.drafter_ref, pair.drafter),
        "kind": plan.requested,
        "active": plan.active,
        "reason": plan.reason,
        "notes": list(plan.notes),
        "block_size": plan.block_size,
        "block_size_from": plan.block_size_from,
        "exactness": plan.level,
        "exactness_source": report.source if report is not None else "not probed",
        "kv_bits": plan.kv_bits,
        "kv_group_size": plan.kv_group_size,
        "prefill_step": plan.prefill_step,
    }


def _model(ref: ModelRef, model: Any) -> dict[str, Any]:
    from ..checkpoint import fingerprint

    return {
        "name": display_name(ref),
        "model_type": ref.model_type,
        "dtype": dtypes(model),
        "fingerprint": fingerprint(ref.path),
    }


def dtypes(model: Any) -> str:
    """Element types of a model's weights, largest share first: "uint32+bfloat16"; "" without weights."""
    from mlx.utils import tree_flatten

    module = getattr(model, "model", None)
    if module is None:
        return ""
    sizes: dict[str, int] = {}
    for _, array in tree_flatten(module.parameters()):
        name = str(array.dtype).removeprefix("mlx.core.")
        sizes[name] = sizes.get(name, 0) + array.nbytes
    return "+".join(sorted(sizes, key=lambda name: -sizes[name]))


def display_name(ref: ModelRef) -> str:
    """A hub id as it is, a directory by its last two names: where someone keeps files is theirs."""
    if Path(ref.name).expanduser().is_dir():
        return "/".join(Path(ref.path).resolve().parts[-2:])
    return ref.name
