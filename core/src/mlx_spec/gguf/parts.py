"""The parameters of a model: which tensor of the file each one is, and what was done to it there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .blocks import TYPES, type_name
from .container import Gguf, Tensor
from .metadata import Metadata
from .refusals import cannot, cut_short, damaged, missing, some, tensor_types, wrong

EMBEDDING, HEAD, FINAL_NORM, ROPE_FACTORS = (
    "token_embd.weight",
    "output.weight",
    "output_norm.weight",
    "rope_freqs.weight",
)
# What a model would need that these modules of mlx-lm do not compute.
_REFUSED = ("expert_count", "logit_scale", "attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter of the model.

    Attributes:
        module: path in mlx-lm's module, e.g. "model.layers.0.self_attn.q_proj".
        parameter: "weight" or "bias".
        shape: what the sizes in the metadata make of it.
        source: where it lies; None for a bias the file leaves out, which is zero.
        heads: its rows are so many heads whose rotary pairs lie side by side; 0 for rows in the order of mlx-lm.
        shift: what is added to each value.
    """

    module: str
    parameter: str
    shape: tuple[int, ...]
    source: Tensor | None = None
    heads: int = 0
    shift: float = 0.0

    @property
    def name(self) -> str:
        """Name in the checkpoint."""
        return f"{self.module}.{self.parameter}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that shapes are made of."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int


def check_tensors(file: Gguf) -> None:
    """Refuse types that cannot be converted, rows of broken blocks, data outside the file or overlapping."""
    others: dict[str, list[str]] = {}
    for tensor in file.tensors.values():
        if tensor.type not in TYPES:
            others.setdefault(type_name(tensor.type), []).append(tensor.name)
    if others:
        raise tensor_types(file.path, others, [kind.name for kind in TYPES.values()])
    end, before, cut = 0, "", ""
    for tensor in sorted(file.tensors.values(), key=lambda tensor: tensor.start):
        kind = TYPES[tensor.type]
        if tensor.shape[-1] % kind.weights:
            found = f"rows of {tensor.shape[-1]} in {tensor.name}"
            raise damaged(file.path, found, f"a multiple of {kind.weights} ({kind.name})")
        if tensor.start < end:
            raise damaged(file.path, f"{tensor.name} at byte {tensor.start}", f"byte {end}, where {before} ends")
        end, before = tensor.start + tensor.size // kind.weights * kind.nbytes, tensor.name
        cut = cut or (before if end > file.nbytes else "")
    if cut:
        raise cut_short(file.path, file.nbytes, end, cut)


def read_sizes(file: Gguf, own: Metadata) -> Sizes:
    """Sizes from the metadata of the architecture, and the vocabulary from the embedding's rows."""
    table = file.tensors.get(EMBEDDING)
    if table is None or len(table.shape) != 2:
        raise missing(file.path, [f"{EMBEDDING} of two axes"])
    hidden, heads = own.size("embedding_length"), own.size("attention.head_count")
    head = own.size("attention.key_length", max(hidden // heads, 1))
    if own.size("attention.value_length", head) != head:
        raise cannot(file.path, f"values and keys of different sizes ({own.prefix}attention.value_length)", f"{head}")
    if own.size("rope.dimension_count", head) != head or head % 2:
        raise cannot(file.path, "rotary positions over a part of each head", f"over all {head} values of it")
    for key in filter(own.get, _REFUSED):
        raise cannot(file.path, f"{own.prefix}{key} {own.get(key)}", "a model without it")
    layers = own.size("block_count")
    if layers > len(file.tensors):
        raise own.wrong("block_count", layers, f"no more layers than the file has tensors ({len(file.tensors)})")
    return Sizes(
        layers=layers,
        hidden=hidden,
        inner=own.size("feed_forward_length"),
        heads=heads,
        kv_heads=own.size("attention.head_count_kv", heads),
        head=head,
        vocabulary=table.shape[0],
    )


def read_parts(
    file: Gguf, sizes: Sizes, norms: Mapping[str, str], *, interleaved: bool, shift: float, biases: bool
) -> list[Part]:
    """Every parameter, in the order of the file.

    Raises LoadError for a tensor too many, too few, or of another shape.

    norms: name in a block -> module in a layer. interleaved: rows of q and k are. shift: of norm weights.
    biases: linear layers may have them.
    """
    wanted = _top(sizes, shift) | _layers(sizes, norms, interleaved, shift)
    if HEAD in file.tensors:
        wanted[HEAD] = Part("lm_head", "weight", (sizes.vocabulary, sizes.hidden))
    if biases:
        wanted |= _biases(file, wanted)
    known = wanted.keys() | ({ROPE_FACTORS} if interleaved else set())
    unknown = [name for name in file.tensors if name not in known]
    if unknown:
        raise cannot(file.path, f"tensors {some(unknown)}", "only those of mlx-lm's module for this architecture")
    absent = [name for name, part in wanted.items() if name not in file.tensors and part.parameter == "weight"]
    if absent:
        raise missing(file.path, absent)
    parts = [_found(file, name, part) for name, part in wanted.items()]
    return sorted(parts, key=lambda part: part.source.start if part.source is not None else file.nbytes)


def _found(file: Gguf, name: str, part: Part) -> Part:
    """The part with its tensor, whose shape is checked."""
    tensor = file.tensors.get(name)
    if tensor is not None and tensor.shape != part.shape:
        raise wrong(
            file.path, f"tensor {name}", f"shape {list(tensor.shape)}", f"{list(part.shape)}, as the metadata says"
        )
    return replace(part, source=tensor)


def _top(sizes: Sizes, shift: float) -> dict[str, Part]:
    return {
        EMBEDDING: Part("model.embed_tokens", "weight", (sizes.vocabulary, sizes.hidden)),
        FINAL_NORM: Part("model.norm", "weight", (sizes.hidden,), shift=shift),
    }


def _layers(sizes: Sizes, norms: Mapping[str, str], interleaved: bool, shift: float) -> dict[str, Part]:
    """Name in the file -> part, of all layers."""
    q, kv = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
    q_heads, k_heads = (sizes.heads, sizes.kv_heads) if interleaved else (0, 0)
    linears = {
        "attn_q": ("self_attn.q_proj", (q, sizes.hidden), q_heads),
        "attn_k": ("self_attn.k_proj", (kv, sizes.hidden), k_heads),
        "attn_v": ("self_attn.v_proj", (kv, sizes.hidden), 0),
        "attn_output": ("self_attn.o_proj", (sizes.hidden, q), 0),
        "ffn_gate": ("mlp.gate_proj", (sizes.inner, sizes.hidden), 0),
        "ffn_up": ("mlp.up_proj", (sizes.inner, sizes.hidden), 0),
        "ffn_down": ("mlp.down_proj", (sizes.hidden, sizes.inner), 0),
    }
    found = {}
    for i in range(sizes.layers):
        for name, (module, shape, heads) in linears.items():
            found[f"blk.{i}.{name}.weight"] = Part(f"model.layers.{i}.{module}", "weight", shape, heads=heads)
        for name, module in norms.items():
            width = sizes.head if module.startswith("self_attn.") else sizes.hidden
            found[f"blk.{i}.{name}.weight"] = Part(f"model.layers.{i}.{module}", "weight", (width,), shift=shift)
    return found


def _biases(file: Gguf, wanted: Mapping[str, Part]) -> dict[str, Part]:
    """Biases of all linear layers of attention, of mlp, where the file has any: mlx-lm has all or none."""
    kinds = [kind for kind in ("attn_", "ffn_") if any(f".{kind}" in n and n.endswith(".bias") for n in file.tensors)]
    return {
        name.removesuffix("weight") + "bias": replace(part, parameter="bias", shape=part.shape[:1])
        for name, part in wanted.items()
        if len(part.shape) == 2 and any(f".{kind}" in name for kind in kinds)
    }
