"""A target over any causal LM of mlx-lm whose caches roll back; serves model_types no plugin claims."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from .checkpoint import check_finite, load_mlx_lm
from .errors import LoadError, RefusedError, SpecError
from .models import Target
from .types import Capabilities, ModelRef, Verification

if TYPE_CHECKING:
    import mlx.core as mx

    from .state import StateGroup

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
UNDECLARED_CONTEXT = 1 << 20  # positions; a config that declares none leaves the limit to memory


class GenericTarget(Target):
    """mlx-lm's module, run on states that can return to a mark.

    Taps: "hidden" (B, L, D), post-norm, when the module is a trunk `model` followed by `lm_head` or a tied
    embedding and nothing else; this is checked by running both ways once and comparing bytes.
    """

    def __init__(self, ref: ModelRef, config: Mapping[str, Any], model: Any):
        self.ref, self.model = ref, model
        self.model_type = str(config.get("model_type", ""))
        text = config.get("text_config")
        self._config = {**config, **text} if isinstance(text, dict) else dict(config)
        self.hidden_size = int(self._need("hidden_size"))
        self.context = declared_context(config) or UNDECLARED_CONTEXT
        self._need("vocab_size")
        self.vocab_size, self.dtype = self._logits_width()
        self.capabilities = self._read_capabilities()

    @classmethod
    def load(
        cls,
        ref: ModelRef,
        config: Mapping[str, object] | None = None,
        get_model_classes: Callable[..., tuple[type, type]] | None = None,
    ) -> Self:
        """Load `ref` with mlx-lm; LoadError for bad files, NaN weights, a cache that cannot roll back.

        get_model_classes: as in mlx_lm.utils.load_model, for a model_type mlx-lm builds from another one's module.
        """
        from mlx.utils import tree_flatten

        from .linear import hold_transposes

        model, used = load_mlx_lm(ref, get_model_classes)
        target = cls(ref, used, model)
        check_finite(dict(tree_flatten(model.parameters())), f"weights of {ref.name}")
        hold_transposes(model)
        return target

    def make_states(self, kv_bits: int | None = None, kv_group_size: int = 64) -> StateGroup:
        """Empty state for one row, from the kinds of cache the module asks for."""
        from .state import from_mlx_lm

        return from_mlx_lm(self.model, kv_bits, kv_group_size)

    def forward(self, tokens: mx.array, states: StateGroup, taps: Sequence[str] = ()) -> Verification:
        """Run tokens (B, L) int32 on `states`; logits (B, L, V) in the module's own dtype."""
        if not taps:
            return Verification(self.model(tokens, cache=states))
        unknown = [name for name in taps if name not in self.tap_names]
        if unknown:
            raise self._refuse(f"tap {unknown[0]!r}", self._trunk_reason or f"taps {', '.join(self.tap_names)}")
        hidden = self._trunk(tokens, cache=states)
        return Verification(self._project(hidden), {"hidden": hidden})

    @property
    def tap_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """("hidden",) when the module has the plain shape."""
        return () if self._trunk_reason else ("hidden",)

    def embed(self, tokens: mx.array) -> mx.array:
        """tokens (...,) int32 -> (..., D) as the first layer receives them. RefusedError when that is hidden."""
        if self._trunk_reason:
            raise self._refuse("the input embedding", self._trunk_reason)
        try:
            rows = self._entrance(tokens.reshape(1, -1), cache=[None] * len(self._trunk.layers))
        except Exception as error:  # the module's own code, run without its layers
            raise self._refuse("the input embedding", f"{type(error).__name__}: {error}") from error
        if rows.shape != (1, tokens.size, self.hidden_size):
            raise self._refuse("the input embedding", f"shape {rows.shape}")
        shaped: mx.array = rows.reshape(*tokens.shape, self.hidden_size)
        return shaped

    def head(self, hidden: mx.array) -> mx.array:
        """Post-norm hidden (..., D) -> logits (..., V). RefusedError when the module does more than project."""
        if self._trunk_reason:
            raise self._refuse("the output head", self._trunk_reason)
        return self._project(hidden)

    # -- structure -------------------------------------------------------------------------------------

    @property
    def _trunk(self) -> Any:
        return self.model.model

    def _project(self, hidden: mx.array) -> mx.array:
        own = getattr(self.model, "lm_head", None)
        logits: mx.array = own(hidden) if own is not None else self._trunk.embed_tokens.as_linear(hidden)
        return logits

    @cached_property
    def _trunk_reason(self) -> str:
        """Why trunk and head cannot be told apart; "" when they can, proved on two tokens."""
        import mlx.core as mx

        trunk = getattr(self.model, "model", None)
        parts = ("layers", "norm", "embed_tokens")
        if trunk is None or not all(hasattr(trunk, part) for part in parts):
            return "its module is not a trunk of " + ", ".join(parts)
        tokens = mx.array([[0, self.vocab_size - 1]])
        try:
            whole = self.model(tokens, cache=self.make_states())
            parted = self._project(self._trunk(tokens, cache=self.make_states()))
            same = whole.shape == parted.shape and mx.array_equal(whole, parted).item()
        except Exception as error:  # the module's own code, called part by part
            return f"its parts do not run alone ({type(error).__name__}: {error})"
        return "" if same else "it changes logits after its head"

    @cached_property
    def _entrance(self) -> Any:
        """The trunk without layers and norm: what is left is what the first layer receives."""
        from mlx import nn

        entrance = copy.copy(self._trunk)
        entrance.layers, entrance.norm = [], nn.Identity()
        return entrance

    def _logits_width(self) -> tuple[int, Any]:
        """(V, activation dtype), from shapes alone: nothing is computed."""
        import mlx.core as mx

        states = self.make_states()  # refuses caches that cannot roll back
        try:
            logits = self.model(mx.array([[0]]), cache=states)
            table = getattr(getattr(self.model, "model", None), "embed_tokens", None)
            dtype = table(mx.array([0])).dtype if table is not None else logits.dtype
        except SpecError:
            raise
        except Exception as error:  # the module's own code
            raise LoadError(
                f"model {self.ref.name}",
                found=f"{type(error).__name__}: {error}",
                expected="a module that maps token ids to logits",
                next_step="Check that config.json belongs to these weights",
                code="L08",
            ) from error
        return int(logits.shape[-1]), dtype

    def _read_capabilities(self) -> Capabilities:
        from .state import WindowState

        windows = any(isinstance(s, WindowState) for s in self.make_states())
        return replace(self.capabilities, window=windows)  # the other flags are a subclass's to declare

    def _need(self, key: str) -> int:
        value = self._config.get(key)
        if type(value) is not int:
            raise LoadError(
                f"config.json of {self.ref.path}",
                found=f"no {key}",
                expected=f"{key} as a positive integer",
                next_step="Add the key from the original model, or download config.json again",
                code="L04",
            )
        return value

    def _refuse(self, what: str, reason: str) -> RefusedError:
        return RefusedError(
            f"{what} of {self.ref.name} (model_type {self.model_type})",
            found=reason,
            expected="a module that core can take apart, or a plugin that owns this model_type",
            next_step="Use a drafter that needs no taps (full-model, prompt-lookup), or install the family's plugin",
            code="L07",
        )


def declared_context(config: Mapping[str, Any]) -> int | None:
    """Positions the model was made for, from config.json or its text_config; None when it declares none."""
    text = config.get("text_config")
    sections = [text, config] if isinstance(text, dict) else [config]
    for section in sections:
        for key in CONTEXT_KEYS:
            value = section.get(key)
            if type(value) is int and value > 0:
                return value
    return None
