"""The conformance kit: contracts that plugins are tested with, scripted drafters, tiny checkpoints.

    # pyproject.toml of a plugin: addopts = "-p mlx_spec.testing.plugin"
    from mlx_spec.testing import DrafterContract

    class TestMine(DrafterContract):
        family = "myfamily"
        capabilities = {"batch", "sampling"}

Names are imported on first use; the contracts need pytest (extra `testing`), nothing else here does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "CAPABILITIES": "contracts.base",
    "DrafterContract": "contracts.drafter",
    "KernelContract": "contracts.kernel",
    "Mutation": "contracts.pair",
    "PairContract": "contracts.pair",
    "PluginContract": "contracts.plugin",
    "StateContract": "contracts.state",
    "TargetContract": "contracts.target",
    "expected_failure": "contracts.whole",
    "BrokenDrafter": "drafters",
    "ScriptedDrafter": "drafters",
    "ContractFault": "faults",
    "Attention": "feed",
    "GatedDeltas": "feed",
    "TinyPair": "writers",
    "families": "writers",
    "write_tiny": "writers",
    "check_options": "tiny",
    "write_model": "tiny",
    "write_weights": "tiny",
    "write_byte_tokenizer": "tokenizer",
}

__all__ = [
    "CAPABILITIES",
    "Attention",
    "BrokenDrafter",
    "ContractFault",
    "DrafterContract",
    "GatedDeltas",
    "KernelContract",
    "Mutation",
    "PairContract",
    "PluginContract",
    "ScriptedDrafter",
    "StateContract",
    "TargetContract",
    "TinyPair",
    "check_options",
    "expected_failure",
    "families",
    "write_byte_tokenizer",
    "write_model",
    "write_tiny",
    "write_weights",
]

if TYPE_CHECKING:
    from .contracts.base import CAPABILITIES
    from .contracts.drafter import DrafterContract
    from .contracts.kernel import KernelContract
    from .contracts.pair import Mutation, PairContract
    from .contracts.plugin import PluginContract
    from .contracts.state import StateContract
    from .contracts.target import TargetContract
    from .contracts.whole import expected_failure
    from .drafters import BrokenDrafter, ScriptedDrafter
    from .faults import ContractFault
    from .feed import Attention, GatedDeltas
    from .tiny import check_options, write_model, write_weights
    from .tokenizer import write_byte_tokenizer
    from .writers import TinyPair, families, write_tiny


def __getattr__(name: str) -> Any:
    """Import the module behind a public name on its first use."""
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'mlx_spec.testing' has no attribute {name!r}")
    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
