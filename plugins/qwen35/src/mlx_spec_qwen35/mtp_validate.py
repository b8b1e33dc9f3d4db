"""What makes an MTP head and a target fit, from config.json and tensor headers alone; no mlx here.

The codes QW20 to QW39 are explained in `codes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mlx_spec.errors import Finding, Severity
from mlx_spec.types import DrafterCard, ModelRef

from .config import TextConfig, target_config
from .mtp_config import MOST_LAYERS, HeadConfig, head_config
from .mtp_files import HeadFiles, find_head, norm_form
from .mtp_inventory import check_inventory
from .plugin import TARGET_TYPES

TRUNK = (
    "num_hidden_layers",
    "full_attention_interval",
    "linear_num_value_heads",
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "rms_norm_eps",
    "num_experts",
)
"""Keys by which one Qwen 3.5 is told from another of the same width; a head's text_config is its target's."""
OTHER_PAIR = "Pair the head with the model it was trained on, or the model with its own head"
COMPLETE = "Use a complete head whose config.json belongs to its weights"
NORM_CODES, QUANTISATION_CODES = ("QW33",), ("QW30",)
"""Codes of findings about how a head is stored, which are no question of what it fits."""
_PROBLEM_CODES = {"tensors": "QW26", "shape": "QW27", "fc": "QW25", "quantisation": "QW30", "depth": "QW28"}
_PROBLEM_STEPS = {"quantisation": "Use the bfloat16 release, or a head quantised for MLX"}


def validate(target: ModelRef, drafter: ModelRef, card: DrafterCard) -> list[Finding]:
    """Every finding about the pair, all at once. Raises LoadError for an unusable config.json."""
    names = f"drafter {drafter.name} and target {target.name}"
    if target.model_type not in TARGET_TYPES:
        found = f"target model_type {target.model_type!r} with drafter model_type {drafter.model_type!r}"
        expected = f"a target of model_type {', '.join(TARGET_TYPES)}"
        return [Finding("QW22", "error", f"pair of {names}", found, expected, OTHER_PAIR)]
    config = head_config(drafter.config, drafter.path)
    findings = [*_own_terms(drafter, config)]
    if target.path != drafter.path:
        findings += _sizes(names, target_config(target.config, target.path), config.text)
        findings += _trunk(names, target, config)
    files = find_head(drafter)
    if files is not None:
        findings += _tensors(drafter, config, files)
        findings += _norms(drafter, files, card)
    return findings


def _differ(code: str, key: str, names: str, found: object, expected: object, severity: Severity = "error") -> Finding:
    subject = f"{key} of {names}"
    return Finding(code, severity, subject, f"{found} in the drafter", f"{expected}, as in the target", OTHER_PAIR)


def _own_terms(drafter: ModelRef, config: HeadConfig) -> Iterator[Finding]:
    """What no head may be, whatever its target."""
    if config.text.mtp_use_dedicated_embeddings:
        subject = f"mtp_use_dedicated_embeddings of drafter {drafter.name}"
        yield Finding("QW29", "error", subject, "True", "False: heads here borrow their target's embedding", OTHER_PAIR)
    if not 1 <= config.depth <= MOST_LAYERS:
        subject = f"mtp_num_hidden_layers of drafter {drafter.name}"
        yield Finding("QW28", "error", subject, str(config.depth), f"1 to {MOST_LAYERS} layers", COMPLETE)


def _sizes(names: str, target: TextConfig, text: TextConfig) -> Iterator[Finding]:
    """What the head borrows from its target, or shares with it."""
    if text.hidden_size != target.hidden_size:
        yield _differ("QW23", "hidden_size", names, text.hidden_size, target.hidden_size)
    if text.vocab_size != target.vocab_size:
        yield _differ("QW24", "vocab_size", names, text.vocab_size, target.vocab_size)
    mine, theirs = text.rope_parameters.model_dump(), target.rope_parameters.model_dump()
    for key in dict.fromkeys([*mine, *theirs]):
        if mine.get(key) != theirs.get(key):
            found, expected = mine.get(key, "nothing"), theirs.get(key, "nothing")
            yield _differ("QW31", f"rope_parameters.{key}", names, found, expected)
    if text.max_position_embeddings < target.max_position_embeddings:
        limits = text.max_position_embeddings, target.max_position_embeddings
        yield _differ("QW34", "max_position_embeddings", names, *limits, "warning")


def _trunk(names: str, target: ModelRef, config: HeadConfig) -> Iterator[Finding]:
    """A head carries the text_config of its target: another one means another model, if sizes fit or not."""
    inner = target.config.get("text_config")
    theirs: Mapping[str, Any] = inner if isinstance(inner, Mapping) else target.config
    for key in TRUNK:
        found, expected = config.section.get(key), theirs.get(key)
        if found is not None and expected is not None and found != expected:
            yield _differ("QW32", key, names, found, expected)
    mine, target_type = config.section.get("model_type"), theirs.get("model_type")
    if isinstance(mine, str) and isinstance(target_type, str) and _line(mine) != _line(target_type):
        yield _differ("QW22", "text model_type", names, mine, target_type)


def _line(model_type: str) -> str:
    """qwen3_5 or qwen3_5_moe, whichever spelling a wrapper or a text stack has."""
    return model_type.removesuffix("_text")


def _tensors(drafter: ModelRef, config: HeadConfig, files: HeadFiles) -> Iterator[Finding]:
    """The head's tensors against its own config.json."""
    for problem in check_inventory(config, files.index, files.depth):
        subject = f"head of {drafter.name}, {problem.subject}"
        step = _PROBLEM_STEPS.get(problem.kind, COMPLETE)
        yield Finding(_PROBLEM_CODES[problem.kind], "error", subject, problem.found, problem.expected, step)


def _norms(drafter: ModelRef, files: HeadFiles, card: DrafterCard) -> Iterator[Finding]:
    """A label that the values contradict, unless the user decided."""
    norms = norm_form(files)
    if norms.doubt and "mtp_norms" not in card.extra:
        subject = f"norms of the head of {drafter.name}"
        step = 'If hardly any draft is accepted, try the other reading: --spec-config \'{"mtp_norms": "%s"}\''
        other = "deltas" if norms.form == "weights" else "weights"
        found = f"{norms.doubt}, but {norms.reason}"
        yield Finding("QW33", "warning", subject, found, f"{norms.form}, which is what is used", step % other)
