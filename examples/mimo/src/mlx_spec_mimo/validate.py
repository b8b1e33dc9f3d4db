"""What makes a head usable and fit its target, from config.json and headers alone; no mlx here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mlx_spec import DrafterCard, Finding, ModelRef
from mlx_spec.checkpoint import tensor_index

PREFIX = "model.mtp_layers.0."
SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "rope_theta",
    "rms_norm_eps",
)
"""Keys of config.json that tell one MiMo from another; the head is of its model's shape throughout."""
OWN_MODEL = "Pair the head with the MiMo model it belongs to"
COMPLETE = "Use the original checkpoint, complete; conversion by mlx-lm drops the head"


def head_card(ref: ModelRef) -> DrafterCard | None:
    """The card of the head in `ref`, None when its files hold no tensor of one."""
    if not any(name.startswith(PREFIX) for name in tensor_index(ref.path)):
        return None
    vocab = ref.config.get("vocab_size")
    return DrafterCard("mtp", ref.model_type, vocab_size=vocab if isinstance(vocab, int) else None)


def validate(target: ModelRef, drafter: ModelRef) -> list[Finding]:
    """Every finding about the pair, all at once."""
    pair = f"drafter {drafter.name} and target {target.name}"
    if target.model_type != drafter.model_type:
        found, expected = f"target model_type {target.model_type!r}", f"{drafter.model_type!r}"
        return [Finding("MM10", "error", pair, found, expected, OWN_MODEL)]
    return [*_shape(target, drafter, pair), *_tensors(drafter)]


def _shape(target: ModelRef, drafter: ModelRef, pair: str) -> Iterator[Finding]:
    """A head of another model reads hidden states it was not trained on, even where all sizes fit."""
    for key in SHAPE:
        mine, theirs = drafter.config.get(key), target.config.get(key)
        if mine != theirs:
            found, expected = f"{mine} in the drafter", f"{theirs}, as in the target"
            yield Finding("MM11", "error", f"{key} of {pair}", found, expected, OWN_MODEL)


def _tensors(drafter: ModelRef) -> Iterator[Finding]:
    """The head's tensors against its own config.json; packed ones are checked when they are loaded."""
    index = {n.removeprefix(PREFIX): i for n, i in tensor_index(drafter.path).items() if n.startswith(PREFIX)}
    packed = {name.removesuffix(".scales") for name in index if name.endswith(".scales")}
    companions = {f"{module}.{part}" for module in packed for part in ("scales", "biases")}
    expected = shapes(drafter.config)
    for name in sorted(expected.keys() - index.keys()):
        yield Finding(
            "MM12", "error", f"head of {drafter.name}", f"no {PREFIX}{name}", "every tensor of the layer", COMPLETE
        )
    for name in sorted(index.keys() - expected.keys() - companions):
        yield Finding("MM12", "error", f"head of {drafter.name}", PREFIX + name, "tensors of the layer only", COMPLETE)
    for name in sorted(expected.keys() & index.keys()):
        shape = index[name].shape
        if shape != expected[name] and name.removesuffix(".weight") not in packed:
            step = "config.json belongs to another checkpoint: take it from this one's source"
            yield Finding("MM13", "error", PREFIX + name, f"shape {shape}", f"{expected[name]}, by config.json", step)


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor name, without its prefix, -> shape of an unquantised head."""
    D, F = config["hidden_size"], config["intermediate_size"]
    width = D // config["num_attention_heads"]
    Q, KV = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    norms = ("token_layernorm", "hidden_layernorm", "input_layernorm", "post_attention_layernorm", "final_layernorm")
    matrices = {
        "input_proj": (D, 2 * D),
        "self_attn.q_proj": (Q, D),
        "self_attn.k_proj": (KV, D),
        "self_attn.v_proj": (KV, D),
        "self_attn.o_proj": (D, Q),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }
    biases = {f"self_attn.{name}_proj.bias": matrices[f"self_attn.{name}_proj"][:1] for name in "qkv"}
    return {**{f"{n}.weight": (D,) for n in norms}, **{f"{n}.weight": s for n, s in matrices.items()}, **biases}
