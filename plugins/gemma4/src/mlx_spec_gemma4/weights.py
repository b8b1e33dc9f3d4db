"""Tensors of Gemma 4 checkpoints: what the text path drops, and how an assistant is loaded.

Target names are mlx-lm's business (its `sanitize`); this file only takes away what it would stumble over.
"""

# mypy: disable-error-code="misc, no-any-return"
# mlx.nn is untyped to mypy: its classes and calls are Any.

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4, gemma4_text

from mlx_spec.checkpoint import check_finite, load_tensors, tensor_index
from mlx_spec.errors import LoadError

from .config import AssistantConfig, TextConfig
from .inventory import ORDERING, check_inventory, quantised_modules, unused

if TYPE_CHECKING:
    from .drafter import Gemma4Assistant

_STACK = r"(model\.)?(language_model\.)?(model\.)?"
BUNDLED = re.compile(_STACK + r"mtp\.")
"""Names under which some bundles carry an assistant inside the target's files."""
HEAD = re.compile(_STACK + r"lm_head\.")
"""Names of an output head, which is a copy of the embedding when the two are tied."""
MEDIA = ("vision_tower", "multi_modal_projector", "audio_tower", "embed_audio", "embed_vision", "vision_embedder")
"""Prefixes (after an optional `model.`) of towers and projections for other media."""
_SHARED = re.compile(r"\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")

Classes = Callable[..., tuple[type, type]]


# -- target --------------------------------------------------------------------------------------------


class _Kept:
    """Mixin for mlx-lm's models: drop what the text path cannot use, and remember its names."""

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        stack: Any = getattr(self, "language_model", self)
        args = stack.args
        foreign = [BUNDLED, HEAD] if args.tie_word_embeddings else [BUNDLED]
        known = {name: value for name, value in weights.items() if not any(f.match(name) for f in foreign)}
        kept: dict[str, mx.array] = super().sanitize(known)  # type: ignore[misc]
        first_shared = args.num_hidden_layers - args.num_kv_shared_layers
        self._dropped = sorted(n for n in weights if n not in known or _is_unused(n, first_shared))
        return kept


class TextModel(_Kept, gemma4_text.Model):
    """A text-only checkpoint (`model.layers...`)."""


class WrappedModel(_Kept, gemma4.Model):
    """A checkpoint whose text stack sits in `language_model`, beside towers for other media."""


def _is_unused(name: str, first_shared: int) -> bool:
    """True for tensors mlx-lm's own sanitising drops: other media, and K/V of layers that share."""
    if name.removeprefix("model.").startswith(MEDIA):
        return True
    layer = _SHARED.search(name)
    return layer is not None and int(layer[1]) >= first_shared


def target_classes(text: TextConfig, wrapped: bool) -> Classes:
    """What mlx-lm's loader asks for: (model class, arguments class), built from the checked configuration."""

    class Arguments:
        @staticmethod
        def from_dict(config: dict[str, Any]) -> Any:
            if not wrapped:
                return gemma4_text.ModelArgs.from_dict(text.mlx_lm_args())
            return gemma4.ModelArgs(config["model_type"], text.mlx_lm_args(), text.vocab_size)

    def classes(config: dict[str, Any]) -> tuple[type, type]:
        return (WrappedModel if wrapped else TextModel), Arguments

    return classes


# -- assistant -----------------------------------------------------------------------------------------


def load_assistant(path: Path, config: AssistantConfig) -> Gemma4Assistant:
    """Build and fill an assistant. Raises LoadError naming missing, unexpected or misshapen tensors."""
    from .drafter import Gemma4Assistant

    index = tensor_index(path)
    problems = check_inventory(config, index)
    if problems:
        first = problems[0]
        raise LoadError(
            f"assistant {path}: {first.subject}",
            found=first.found,
            expected=first.expected,
            next_step="Use a complete assistant checkpoint whose config.json belongs to its weights",
            code="GM02",
        )
    model = Gemma4Assistant(config)
    stored = quantised_modules(config, index)
    nn.quantize(model, class_predicate=lambda name, _: stored[name].as_dict() if name in stored else False)
    weights = load_tensors(path, lambda name: not unused(name, config))
    if ORDERING in weights:
        weights[ORDERING] = _permutation(weights[ORDERING], path)
    check_finite(weights, f"weights of assistant {path}")
    model.load_weights(list(weights.items()), strict=True)
    model.eval()
    return model


def _permutation(ordering: mx.array, path: Path) -> mx.array:
    """token_ordering as int32; LoadError unless every id occurs once."""
    size = ordering.size
    ordering = ordering.astype(mx.int32)
    if not mx.array_equal(mx.sort(ordering), mx.arange(size)).item():
        raise LoadError(
            f"{ORDERING} of assistant {path}",
            found="ids that repeat or lie outside the vocabulary",
            expected=f"a permutation of 0 to {size - 1}",
            next_step="The file is damaged or was converted wrongly: download or convert it again",
            code="GM03",
        )
    return ordering
