"""What makes an assistant and a target fit, from config.json and tensor headers alone; no mlx here.

The codes GM10 to GM25 are explained in `codes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlx_spec.checkpoint import tensor_index
from mlx_spec.errors import Finding, Severity
from mlx_spec.types import ModelRef

from .config import SLIDING, AssistantConfig, TextConfig, assistant_config, target_config
from .inventory import check_inventory

PARTNERS = {
    "gemma4_assistant": ("gemma4", "gemma4_text"),
    "gemma4_unified_assistant": ("gemma4_unified", "gemma4_unified_text"),
}
OTHER_PAIR = "Pair the target with the assistant released for it, or the assistant with its own target"
COMPLETE = "Use a complete assistant checkpoint whose config.json belongs to its weights"
PACKING = "GM22"
_PROBLEM_CODES = {"tensors": "GM20", "shape": "GM21", "quantisation": PACKING, "not an assistant": "GM23"}


def validate(target: ModelRef, drafter: ModelRef) -> list[Finding]:
    """Every finding about the pair, all at once. Raises LoadError for an unusable config.json."""
    allowed = PARTNERS[drafter.model_type]
    if target.model_type not in allowed:
        return [
            Finding(
                "GM10",
                "error",
                f"pair of target {target.name} and drafter {drafter.name}",
                f"target model_type {target.model_type!r} with drafter model_type {drafter.model_type!r}",
                f"a target of model_type {' or '.join(allowed)}",
                OTHER_PAIR,
            )
        ]
    pair = _Pair(
        target.name,
        drafter.name,
        target_config(target.config, target.path),
        assistant_config(drafter.config, drafter.path),
    )
    return [*pair.sizes(), *pair.layers(), *pair.form(), *pair.centroids(), *_tensors(drafter, pair.assistant)]


def _tensors(drafter: ModelRef, config: AssistantConfig) -> Iterator[Finding]:
    """The assistant's tensors against its own config.json."""
    for problem in check_inventory(config, tensor_index(drafter.path)):
        code = _PROBLEM_CODES[problem.kind]
        subject = f"drafter {drafter.name}, {problem.subject}"
        yield Finding(code, "error", subject, problem.found, problem.expected, COMPLETE)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Both names and both configurations; each method yields one group of findings."""

    target_name: str
    drafter_name: str
    target: TextConfig
    assistant: AssistantConfig

    def _differ(self, code: str, what: str, found: object, expected: object, severity: Severity = "error") -> Finding:
        return Finding(
            code,
            severity,
            f"{what} of drafter {self.drafter_name} and target {self.target_name}",
            f"{found} in the drafter",
            f"{expected}, as in the target",
            OTHER_PAIR,
        )

    def sizes(self) -> Iterator[Finding]:
        """Widths and tables that must be equal."""
        target, text = self.target, self.assistant.text
        if self.assistant.backbone_hidden_size != target.hidden_size:
            found = f"backbone_hidden_size {self.assistant.backbone_hidden_size}"
            yield self._differ("GM11", "hidden size", found, f"hidden_size {target.hidden_size}")
        if text.vocab_size != target.vocab_size:
            yield self._differ("GM12", "vocab_size", text.vocab_size, target.vocab_size)
        if text.max_position_embeddings < target.max_position_embeddings:
            limits = text.max_position_embeddings, target.max_position_embeddings
            yield self._differ("GM24", "max_position_embeddings", *limits, "warning")

    def layers(self) -> Iterator[Finding]:
        """What the drafter's layers read must be what the target's layers store."""
        for kind in dict.fromkeys(self.assistant.text.layer_types):
            if kind not in self.target.sources:
                stored = " and ".join(self.target.sources)
                yield self._differ(
                    "GM13", "layer_types", f"a {kind} layer", f"only {stored} layers with K/V of their own"
                )
                continue
            yield from self._geometry(kind)
        if SLIDING in self.assistant.text.layer_types and SLIDING in self.target.sources:
            window = self.assistant.text.sliding_window
            if window != self.target.sliding_window:
                yield self._differ("GM17", "sliding_window", window, self.target.sliding_window)

    def _geometry(self, kind: str) -> Iterator[Finding]:
        target, text = self.target, self.assistant.text
        if text.width(kind) != target.width(kind):
            yield self._differ("GM14", f"head width ({kind})", text.width(kind), target.width(kind))
        if text.num_attention_heads % target.kv_heads(kind):
            found = f"{text.num_attention_heads} query heads"
            yield self._differ("GM15", f"heads ({kind})", found, f"a multiple of {target.kv_heads(kind)} K/V heads")
        mine, theirs = text.rope_parameters[kind].rotation, target.rope_parameters[kind].rotation
        for key in dict.fromkeys([*mine, *theirs]):
            if mine.get(key) != theirs.get(key):
                yield self._differ("GM16", f"{key} ({kind})", mine.get(key, "nothing"), theirs.get(key, "nothing"))

    def form(self) -> Iterator[Finding]:
        """What every assistant has in common; other values have no tensors to go with them."""
        text = self.assistant.text
        fixed = {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "enable_moe_block": False,
            "use_double_wide_mlp": False,
            "num_kv_shared_layers": text.num_hidden_layers,
        }
        for key, expected in fixed.items():
            found = getattr(text, key)
            if found != expected:
                subject = f"text_config.{key} of drafter {self.drafter_name}"
                yield Finding("GM18", "error", subject, str(found), f"{expected} in an assistant", COMPLETE)
        cap = text.final_logit_softcapping
        if cap is not None:
            yield Finding(
                "GM25",
                "warning",
                f"text_config.final_logit_softcapping of drafter {self.drafter_name}",
                f"{cap:g}, which is ignored",
                "null: an assistant's logits are used as its head gives them",
                "Nothing has to be done: the reply is the target's own either way",
            )

    def centroids(self) -> Iterator[Finding]:
        """The centroid head must split the vocabulary evenly."""
        config = self.assistant
        if not config.use_ordered_embeddings:
            return
        C, V, k = config.num_centroids, config.text.vocab_size, config.centroid_intermediate_top_k
        subject = f"centroid head of drafter {self.drafter_name}"
        if V % C:
            expected = f"a divisor of vocab_size {V}"
            yield Finding("GM19", "error", subject, f"num_centroids {C}", expected, COMPLETE)
        if k > C:
            expected = f"at most num_centroids {C}"
            yield Finding("GM19", "error", subject, f"centroid_intermediate_top_k {k}", expected, COMPLETE)
