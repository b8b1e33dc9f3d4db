"""What a directory is: a target, a drafter, or another kind with the reason it cannot be loaded."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .errors import LoadError

if TYPE_CHECKING:
    from .tensorfiles import TensorInfo

Kind = Literal[
    "target", "drafter", "speculators", "adapter", "gguf", "pytorch", "tokenizer", "embedding", "empty", "unknown"
]

GGUF = ".gguf"
_DRAFTER_TYPE = re.compile(r"_(assistant|mtp|draft|drafter|dflash|dspark|eagle\d?|medusa)$")
_DRAFTER_ARCH = re.compile(r"Draft|DFlash|DSpark|Assistant|Eagle|Medusa|Speculator")
_DRAFTER_KEYS = ("dflash_config", "backbone_hidden_size", "eagle_config")


@dataclass(frozen=True, slots=True)
class Identity:
    """Kind of a directory and, in words, what says so."""

    kind: Kind
    reason: str


def identify(path: Path, config: Mapping[str, Any] | None, drafter_types: Collection[str] = ()) -> Identity:
    """Tell what `path` is from its file names and config.json (None: there is none); opens no weights.

    drafter_types: model_types that plugins registered for drafters.
    """
    names = sorted(entry.name for entry in path.iterdir())
    weights = [n for n in names if n.endswith(".safetensors") and not n.startswith("adapter")]
    other = _other_format(names, weights, config)
    if other is not None:
        return other
    if config is None:
        unread = "config.json" in names
        return Identity("unknown", "its config.json cannot be used" if unread else "it has no config.json")
    if "speculators_model_type" in config or "speculators_config" in config:
        return Identity("speculators", "its config.json has a speculators section")
    sign = drafter_sign(config, drafter_types)
    if sign:
        return Identity("drafter", sign)
    if "modules.json" in names or "config_sentence_transformers.json" in names:
        return Identity("embedding", "it holds a sentence-embedding model (modules.json)")
    held = " with safetensors weights" if weights else ", but no weights"
    return Identity("target", f"model_type {config.get('model_type')!r}{held}")


def drafter_sign(config: Mapping[str, Any], drafter_types: Collection[str] = ()) -> str:
    """What in config.json marks a drafter, in words; "" when nothing does."""
    model_type = str(config.get("model_type", ""))
    if model_type in drafter_types or _DRAFTER_TYPE.search(model_type):
        return f"model_type {model_type!r}"
    architectures = config.get("architectures")
    for name in architectures if isinstance(architectures, list) else [architectures]:
        if isinstance(name, str) and _DRAFTER_ARCH.search(name):
            return f"architecture {name!r}"
    return next((f"{key} in config.json" for key in _DRAFTER_KEYS if key in config), "")


def _other_format(names: list[str], weights: list[str], config: Mapping[str, Any] | None) -> Identity | None:
    """Directories without usable safetensors weights; not a model's whose weights are missing."""
    if not names:
        return Identity("empty", "it is empty")
    has_adapter = "adapter_config.json" in names or any(n.startswith("adapter") for n in names)
    if has_adapter and (config is None or not weights):
        return Identity("adapter", "it holds an adapter (adapter_config.json), not a whole model")
    if weights:
        return None
    if ggufs := [n for n in names if n.endswith(GGUF)]:
        more = f" and {len(ggufs) - 1} more" if len(ggufs) > 1 else ""
        return Identity("gguf", f"it holds GGUF files only: {ggufs[0]}{more}")
    if any(n.endswith((".bin", ".pt", ".pth")) for n in names):
        return Identity("pytorch", "it holds PyTorch weights (.bin) only")
    if config is not None and config.get("model_type"):
        return None
    if any(n.startswith("tokenizer") for n in names):
        return Identity("tokenizer", "it holds a tokenizer and no weights")
    return Identity("unknown", "it holds no weights")


_NEXT_STEPS: Mapping[Kind, str] = {
    "drafter": "It is a drafter: pass it as --draft-model and give the full model to -m",
    "speculators": "Use the model it was made for as -m; this packaging needs a plugin that reads it",
    "adapter": "Fuse it into its base model with `mlx_lm.fuse` and give the fused directory",
    "pytorch": "Convert it with `mlx_lm.convert --hf-path` and give the result",
    "tokenizer": "Give the directory that also holds the weights",
    "embedding": "Give a model that generates text",
    "empty": "Check the path, or download the model again",
    "unknown": "Check the path, or download the model again",
}


def refuse_other_kind(path: Path, config: Mapping[str, Any] | None, drafter_types: Collection[str] = ()) -> None:
    """LoadError unless `path` holds something a target can be loaded from."""
    identity = identify(path, config, drafter_types)
    if identity.kind != "target":
        raise other_kind(path, identity)


def other_kind(path: Path, identity: Identity) -> LoadError:
    """The error for a directory of another kind, with the step that fits the kind."""
    what = "a drafter" if identity.kind == "drafter" else "another kind of directory"
    step = _NEXT_STEPS.get(identity.kind, "Check the path")
    if identity.kind == "gguf":
        step = f"Make a safetensors checkpoint of it: spec convert {min(path.glob('*' + GGUF))} -o DIR"
    return LoadError(
        f"model {path}",
        found=f"{what} ({identity.reason})",
        expected="a causal language model with config.json and safetensors weights",
        next_step=step,
        code="L05",
    )


def carries_embedding(config: Mapping[str, Any], index: Mapping[str, TensorInfo]) -> bool:
    """False when no tensor has a row per vocabulary entry: a head that borrows its target's table."""
    text = config.get("text_config")
    vocab = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    if type(vocab) is not int:
        return True
    return any(len(info.shape) == 2 and info.shape[0] >= vocab for info in index.values())
