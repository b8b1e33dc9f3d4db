"""What makes a DFlash drafter and a target fit, from config.json and tensor headers; no mlx here.

The codes QW40 to QW59 are explained in `codes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mlx_spec.checkpoint import tensor_index
from mlx_spec.errors import Finding
from mlx_spec.types import ModelRef

from .config import TextConfig, target_config
from .dflash_config import COMPLETE, DFlashConfig, Problem, inconsistencies, is_dspark, parsed
from .packed import Shape, disagreements, packed_modules, stored_shapes

if TYPE_CHECKING:
    from mlx_spec.checkpoint import TensorInfo

OTHER_PAIR = "Pair the target with a drafter trained for it, or the drafter with its own target"
BORROWED = ("lm_head", "embed_tokens")
"""Modules a drafter borrows from its target."""
CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")


def refuse_dspark(drafter: ModelRef) -> list[Finding]:
    """The finding about a DSpark directory that no plugin reads; [] for other directories."""
    if not is_dspark(drafter.config):
        return []
    return [
        Finding(
            "QW54",
            "error",
            f"drafter {drafter.name}",
            "a DSpark drafter (projector_type or markov_rank in its dflash_config)",
            "a DFlash or DFlash2 drafter, whose rows do not wait for each other",
            "Install the plugin that brings DSpark for this target, or use a DFlash drafter",
        )
    ]


def validate(target: ModelRef, drafter: ModelRef, target_types: tuple[str, ...]) -> list[Finding]:
    """Every finding about the pair. Raises LoadError for an unusable config.json of the target."""
    if target.model_type not in target_types:
        return [
            Finding(
                "QW41",
                "error",
                f"pair of target {target.name} and drafter {drafter.name}",
                f"target model_type {target.model_type!r} with a DFlash drafter",
                f"a target of model_type {', '.join(target_types)}",
                OTHER_PAIR,
            )
        ]
    config = parsed(drafter.config)
    if not isinstance(config, DFlashConfig):
        return [_own(drafter, problem) for problem in config]
    text = target_config(target.config, target.path)
    problems = [*inconsistencies(config), *tensor_problems(config, tensor_index(drafter.path))]
    return [*_sizes(target, drafter, text, config), *(_own(drafter, problem) for problem in problems)]


def _own(drafter: ModelRef, problem: Problem) -> Finding:
    """A problem of the drafter alone."""
    subject = f"{problem.subject} of drafter {drafter.name}"
    return Finding(problem.code, "error", subject, problem.found, problem.expected, COMPLETE)


def _sizes(target: ModelRef, drafter: ModelRef, text: TextConfig, config: DFlashConfig) -> Iterator[Finding]:
    """What must be equal: embedding, output head and layer outputs are the target's."""
    pair = f"of drafter {drafter.name} and target {target.name}"
    equal = [
        ("QW42", "hidden_size", config.hidden_size, text.hidden_size),
        ("QW43", "vocab_size", config.vocab_size, text.vocab_size),
    ]
    if config.num_target_layers is not None:
        equal.append(("QW44", "num_target_layers", config.num_target_layers, text.num_hidden_layers))
    for code, key, mine, theirs in equal:
        if mine != theirs:
            found, expected = f"{mine} in the drafter", f"{theirs}, as in the target"
            yield Finding(code, "error", f"{key} {pair}", found, expected, OTHER_PAIR)
    ids = config.target_layer_ids
    if config.num_target_layers is None and max(ids) >= text.num_hidden_layers:
        expected = f"numbers below {text.num_hidden_layers}, the target's layers"
        yield Finding("QW44", "error", f"target_layer_ids {pair}", str(ids), expected, OTHER_PAIR)
    if config.max_position_embeddings < text.max_position_embeddings:
        yield Finding(
            "QW58",
            "warning",
            f"max_position_embeddings {pair}",
            f"{config.max_position_embeddings} in the drafter",
            f"{text.max_position_embeddings}, as in the target",
            "Nothing has to be done: past that position fewer drafts may be accepted",
        )


# -- tensors -------------------------------------------------------------------------------------------


def canonical(name: str) -> str:
    """A tensor's name as the network has it: without `model.`, codebooks with `.weight`."""
    plain = name.removeprefix("model.")
    return f"{plain}.weight" if plain in CODEBOOKS else plain


def shapes(config: DFlashConfig) -> dict[str, Shape]:
    """Tensor name -> shape of an unquantised drafter."""
    h, D = config.hidden_size, config.head_dim
    out: dict[str, Shape] = {
        "fc.weight": (h, len(config.target_layer_ids) * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for i in range(config.num_hidden_layers):
        out |= {f"layers.{i}.{name}": shape for name, shape in _layer(config).items()}
    if config.second:
        V, R = config.vocab_size, config.selector_rank
        out |= {f"{name}.weight": (V, R) for name in CODEBOOKS}
        out["candidate_selector.hidden_projection.weight"] = (R, h)
    out |= {f"layers.{i}.self_attn.{n}_norm.weight": (D,) for i in range(config.num_hidden_layers) for n in "qk"}
    return out


def _layer(config: DFlashConfig) -> dict[str, Shape]:
    h, F = config.hidden_size, config.intermediate_size
    Q, KV = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    out: dict[str, Shape] = {
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (Q, h),
        "self_attn.k_proj.weight": (KV, h),
        "self_attn.v_proj.weight": (KV, h),
        "self_attn.o_proj.weight": (h, Q),
        "mlp.gate_proj.weight": (F, h),
        "mlp.up_proj.weight": (F, h),
        "mlp.down_proj.weight": (h, F),
    }
    if config.second and config.conv_group_size:
        Kd, groups = config.conv_kernel_size, h // config.conv_group_size
        for name in ("attention_conv", "mlp_conv"):
            out[f"{name}.base_kernel"] = (2, Kd, h)
            out[f"{name}.kernel_projection.weight"] = (2 * Kd * groups, h)
    return out


def tensor_problems(config: DFlashConfig, index: Mapping[str, TensorInfo]) -> list[Problem]:
    """Everything that is missing, unexpected or of another shape; empty for a sound drafter."""
    named = {canonical(name): info for name, info in index.items()}
    own = sorted({name.split(".")[0] for name in named if name.startswith(tuple(f"{part}." for part in BORROWED))})
    if own:
        expected = "none: a DFlash drafter uses its target's embedding and output head"
        return [Problem("QW50", "file", f"an own {' and '.join(own)}", expected)]
    dense = shapes(config)
    packed = packed_modules(dense, named, config.quantization)
    wanted = stored_shapes(dense, packed)
    missing, extra = sorted(wanted.keys() - named.keys()), sorted(named.keys() - wanted.keys())
    problems = []
    if missing:
        problems.append(Problem("QW51", "tensors", f"no {_listed(missing)}", f"{len(wanted)} tensors, by config.json"))
    if extra:
        problems.append(Problem("QW51", "tensors", f"unexpected {_listed(extra)}", "only those of the drafter"))
    if len(named) < len(index):
        twice = sorted(name for name in index if canonical(name) != name and canonical(name) in index)
        problems.append(Problem("QW51", "tensors", f"{_listed(twice)} under two names", "one name each"))
    for name in sorted(wanted.keys() & named.keys()):
        if named[name].shape != wanted[name]:
            problems.append(Problem("QW52", f"tensor {name}", str(list(named[name].shape)), str(list(wanted[name]))))
    for module, found, expected in disagreements(packed, config.quantization):
        problems.append(Problem("QW53", f"module {module}", found, expected))
    return problems


def _listed(names: list[str], limit: int = 4) -> str:
    rest = f" (and {len(names) - limit} more)" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
