"""Exact speculative decoding on MLX: a drafter proposes, the target verifies.

Names are imported on first use, so `import mlx_spec` loads neither mlx nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "load": "api",
    "generate": "api",
    "stream": "api",
    "Engine": "engine",
    "Handle": "engine",
    "Request": "request",
    "Result": "request",
    "Event": "request",
    "Timings": "request",
    "SpeculationReport": "request",
    "TokenLogprob": "request",
    "Pair": "pair",
    "Plan": "pair",
    "Device": "device",
    "Sampling": "sampling",
    "Target": "models",
    "Drafter": "models",
    "GenericTarget": "generic_target",
    "DraftState": "draft_state",
    "Lane": "lane",
    "Acceptance": "types",
    "Capabilities": "types",
    "Draft": "types",
    "DrafterCard": "types",
    "ExactnessReport": "types",
    "Level": "types",
    "ProbePlan": "probe",
    "ModelRef": "types",
    "RoundRecord": "types",
    "Side": "types",
    "TapBlock": "types",
    "Verdict": "types",
    "Verification": "types",
    "Kernel": "registry",
    "Register": "registry",
    "hookimpl": "hookspecs",
    "hookspec": "hookspecs",
    "SpecError": "errors",
    "UsageError": "errors",
    "RefusedError": "errors",
    "LoadError": "errors",
    "NoEmbeddedMtpHead": "errors",
    "PairError": "errors",
    "PluginError": "errors",
    "ExactnessError": "errors",
    "RequestError": "errors",
    "Finding": "errors",
}

__all__ = [
    "Acceptance",
    "Capabilities",
    "Device",
    "Draft",
    "DraftState",
    "Drafter",
    "DrafterCard",
    "Engine",
    "Event",
    "ExactnessError",
    "ExactnessReport",
    "Finding",
    "GenericTarget",
    "Handle",
    "Kernel",
    "Lane",
    "Level",
    "LoadError",
    "ModelRef",
    "NoEmbeddedMtpHead",
    "Pair",
    "PairError",
    "Plan",
    "PluginError",
    "ProbePlan",
    "RefusedError",
    "Register",
    "Request",
    "RequestError",
    "Result",
    "RoundRecord",
    "Sampling",
    "Side",
    "SpecError",
    "SpeculationReport",
    "TapBlock",
    "Target",
    "Timings",
    "TokenLogprob",
    "UsageError",
    "Verdict",
    "Verification",
    "__version__",
    "generate",
    "hookimpl",
    "hookspec",
    "load",
    "stream",
]

if TYPE_CHECKING:
    from .api import generate, load, stream
    from .device import Device
    from .draft_state import DraftState
    from .engine import Engine, Handle
    from .errors import (
        ExactnessError,
        Finding,
        LoadError,
        NoEmbeddedMtpHead,
        PairError,
        PluginError,
        RefusedError,
        RequestError,
        SpecError,
        UsageError,
    )
    from .generic_target import GenericTarget
    from .hookspecs import hookimpl, hookspec
    from .lane import Lane
    from .models import Drafter, Target
    from .pair import Pair, Plan
    from .probe import ProbePlan
    from .registry import Kernel, Register
    from .request import Event, Request, Result, SpeculationReport, Timings, TokenLogprob
    from .sampling import Sampling
    from .types import (
        Acceptance,
        Capabilities,
        Draft,
        DrafterCard,
        ExactnessReport,
        Level,
        ModelRef,
        RoundRecord,
        Side,
        TapBlock,
        Verdict,
        Verification,
    )


def __getattr__(name: str) -> Any:
    """Import the module behind a public name on its first use."""
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'mlx_spec' has no attribute {name!r}")
    from .device import importing

    with importing():
        value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
