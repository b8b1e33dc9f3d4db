"""Drafter heads inside a checkpoint, and contradictions between config.json and the tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import Finding

if TYPE_CHECKING:
    from .tensorfiles import TensorInfo

HEAD_KIND = "mtp"  # drafters that are heads, which a target's own checkpoint may carry
PROMISES = (
    "mtp_num_hidden_layers",
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "mtp_num_layers",
)  # config keys that count the layers of a head
KEEP_HEAD = (
    "Without it the model runs undrafted: convert the original with `spec convert --keep-mtp`, extract its head with "
    "`spec split-mtp` and pass that directory as --draft-model, or use another drafter"
)
_HEAD = re.compile(r"(?P<prefix>(?:[\w]+\.)*?(?:mtp|mtp_layers))\.(?:layers\.(?=\d)|(?=\d+\.))?(?P<layer>\d+)?\.?")
_LAYER = re.compile(r"(?P<prefix>(?:[\w]+\.)*?layers)\.(?P<layer>\d+)\.(?P<rest>.+)")


@dataclass(frozen=True, slots=True)
class Head:
    """Tensors of one drafter head: where they are and how many layers they make."""

    prefix: str
    layers: tuple[int, ...]
    tensors: int
    nbytes: int


def text_section(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with text_config's keys on top, as the language model reads it."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else dict(config)


def find_heads(config: Mapping[str, Any], index: Mapping[str, TensorInfo]) -> list[Head]:
    """Heads by prefix: `*mtp.`, `*mtp_layers.`, and layers numbered past the last one of the model."""
    last = text_section(config).get("num_hidden_layers")
    groups: dict[str, list[tuple[int | None, TensorInfo]]] = {}
    for name, info in index.items():
        head, layer = _HEAD.match(name), _LAYER.fullmatch(name)
        if head is not None:
            number = head["layer"]
            groups.setdefault(head["prefix"], []).append((int(number) if number else None, info))
        elif layer is not None and type(last) is int and int(layer["layer"]) >= last:
            groups.setdefault(f"{layer['prefix']}.{layer['layer']}", []).append((int(layer["layer"]), info))
    return [
        Head(
            prefix,
            tuple(sorted({number for number, _ in members if number is not None})),
            len(members),
            sum(info.nbytes for _, info in members),
        )
        for prefix, members in sorted(groups.items())
    ]


def is_head(name: str, layers: object = None) -> bool:
    """Whether a tensor of this name belongs to a head; `layers`: num_hidden_layers, if declared."""
    layer = _LAYER.fullmatch(name)
    past_the_last = layer is not None and type(layers) is int and int(layer["layer"]) >= layers
    return _HEAD.match(name) is not None or past_the_last


def whole_index(path: Path, index: Mapping[str, TensorInfo] | None = None) -> dict[str, TensorInfo]:
    """Tensors of a model folder, with those of a separate head file under names a head has inside a model.

    index: `tensor_index(path)`, when it was read already.
    """
    from .tensorfiles import head_index, tensor_index

    apart = {name if _HEAD.match(name) else f"mtp.{name}": info for name, info in head_index(path).items()}
    return {**apart, **(tensor_index(path) if index is None else index)}


def promised_layers(config: Mapping[str, Any]) -> int:
    """Head layers config.json declares, 0 when it declares none."""
    section = text_section(config)
    return max((section[k] for k in PROMISES if type(section.get(k)) is int), default=0)


def counted(layers: int) -> str:
    """ "1 layer", "2 layers"."""
    return f"{layers} layer" + "s" * (layers != 1)


def contradictions(config: Mapping[str, Any], index: Mapping[str, TensorInfo]) -> list[Finding]:
    """What config.json says and the tensors do not bear out."""
    return [*_about_heads(config, index), *_about_sizes(config, index), *_about_quantisation(config, index)]


def _about_heads(config: Mapping[str, Any], index: Mapping[str, TensorInfo]) -> Iterator[Finding]:
    """A promised head that is missing or not whole, and a head nobody promised."""
    promised, heads = promised_layers(config), find_heads(config, index)
    found = len({(head.prefix, layer) for head in heads for layer in head.layers})
    subject = "embedded drafter head"
    if promised and not heads:
        yield Finding(
            "C01", "warning", subject, "no head tensors", f"{counted(promised)}, as config.json declares",
            KEEP_HEAD,
        )  # fmt: skip
    elif heads and not promised:
        names = ", ".join(head.prefix for head in heads)
        yield Finding(
            "C02", "warning", subject, f"tensors under {names}", f"one of {', '.join(PROMISES)} in config.json",
            "Add the key from the original config.json; without it a head may stay unused",
        )  # fmt: skip
    elif promised and found != promised:
        yield Finding(
            "C03", "error", subject, counted(found), f"{counted(promised)}, as config.json declares",
            "The checkpoint is not whole: download it again",
        )  # fmt: skip
    for absent in _missing_in_heads(config, index):
        yield Finding(
            "C03", "error", subject, f"no {absent}", "the tensors every layer of this model has",
            "The checkpoint is not whole: download it again",
        )  # fmt: skip


def _missing_in_heads(config: Mapping[str, Any], index: Mapping[str, TensorInfo]) -> list[str]:
    """First tensor each head layer lacks, measured against the model layer it resembles most."""
    last = text_section(config).get("num_hidden_layers")
    model: dict[int, set[str]] = {}
    heads: dict[str, set[str]] = {}
    for name in index:
        layer = _LAYER.fullmatch(name)
        if layer is None or type(last) is not int:
            continue
        number, inside = int(layer["layer"]), "mtp" in layer["prefix"].split(".")
        if inside or number >= last:
            heads.setdefault(f"{layer['prefix']}.{number}", set()).add(layer["rest"])
        else:
            model.setdefault(number, set()).add(layer["rest"])
    gaps = []
    for prefix, names in sorted(heads.items()):
        lacking = [sorted(_whole(layer) - _whole(names)) for layer in model.values()]
        fewest = min(lacking, key=len, default=[])
        if fewest:
            gaps.append(f"{prefix}.{fewest[0]}")
    return gaps


def _whole(names: set[str]) -> set[str]:
    """Weight names without the companions of quantisation: a head may be stored in another precision."""
    apart = (".experts.", ".switch_mlp.")  # one tensor per expert, or all of them in one
    return {n for n in names if not n.endswith((".scales", ".biases")) and not any(part in n for part in apart)}


def _about_sizes(config: Mapping[str, Any], index: Mapping[str, TensorInfo]) -> Iterator[Finding]:
    """Layers, vocabulary rows and hidden width."""
    section = text_section(config)
    layers = {int(m["layer"]) for m in map(_LAYER.fullmatch, index) if m is not None and "mtp" not in m["prefix"]}
    declared = section.get("num_hidden_layers")
    if layers and type(declared) is int and max(layers) + 1 < declared:
        yield _size("layers", f"{max(layers) + 1} in the tensors", f"num_hidden_layers {declared}")
    for key, suffix in (("vocab_size", "embed_tokens.weight"), ("hidden_size", "model.norm.weight")):
        value = section.get(key)
        rows = {
            info.shape[0] for name, info in index.items() if name.endswith(suffix) and info.shape and "mtp" not in name
        }
        if rows and type(value) is int and value not in rows:
            yield _size(f"{suffix} rows", ", ".join(map(str, sorted(rows))), f"{key} {value}")


def _size(subject: str, found: str, expected: str) -> Finding:
    return Finding(
        "C04",
        "error",
        subject,
        found,
        f"{expected} (config.json)",
        "config.json belongs to another checkpoint: take it from this one's source",
    )


def _about_quantisation(config: Mapping[str, Any], index: Mapping[str, TensorInfo]) -> Iterator[Finding]:
    """Quantised tensors without a setting, or a setting without quantised tensors."""
    declared = any(
        key in section for section in (config, text_section(config)) for key in ("quantization", "quantization_config")
    )
    packed = any(name.endswith(".scales") for name in index)
    if packed and not declared:
        yield Finding(
            "C05", "error", "quantisation", "tensors with .scales", "quantization in config.json",
            "Add the key from the original config.json",
        )  # fmt: skip
    if declared and "quantization" in config and not packed:
        yield Finding(
            "C05", "warning", "quantisation", "no tensor with .scales", "quantised tensors, as config.json declares",
            "The weights are used as they are",
        )  # fmt: skip
