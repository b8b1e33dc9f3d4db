"""Where an MTP head is, and in which form its norms are stored. Reads headers and norms; no mlx here.

A head is found as `mtp.*`, `model.mtp.*` or `language_model.mtp.*` in the shards of its target, in a file of its own
beside them (`model-mtp-head.safetensors`, `mtp.safetensors`), or in a drafter directory of model_type `qwen3_5_mtp`.
Published files store w - 1 for all seven kinds of norm, converted ones store w; the same names occur with both, so
the file decides (`norm_form`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mlx_spec.checkpoint import TensorInfo, head_index, read_metadata, tensor_index
from mlx_spec.errors import LoadError
from mlx_spec.partialfiles import select_index
from mlx_spec.types import ModelRef

EXTERNAL = "qwen3_5_mtp"
"""model_type of a directory that holds a head alone."""
PREFIX = re.compile(r"(?:(?:model|language_model)\.)*mtp\.")
"""What the names of a head begin with inside a whole checkpoint."""
LAYER = re.compile(r"layers\.(\d+)\.")
Place = Literal["shards", "file", "directory"]
Form = Literal["weights", "deltas"]
_QK = re.compile(r"layers\.\d+\.self_attn\.[qk]_norm\.weight")
_OTHER = re.compile(r"layers\.\d+\.(input|post_attention)_layernorm\.weight|pre_fc_norm_(embedding|hidden)\.weight")
NORMS = re.compile(rf"norm\.weight|{_QK.pattern}|{_OTHER.pattern}")
"""The seven kinds of norm of a head."""
LARGEST_QK_DELTA, LARGEST_OTHER_DELTA = 1.25, 0.5
"""Means below which norms are taken for deltas where the file has no label; deltas of trained heads lie below, weights
above (the rule MTPLX 2.12 documents)."""


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """The tensors of one head.

    Attributes:
        place: "shards" of the target, a "file" beside them, or a drafter "directory".
        index: bare name (without `mtp.` and what is before it) -> where and what the tensor is.
        stored: bare name -> the name in the file.
        depth: number of layers, by the tensors.
    """

    place: Place
    index: Mapping[str, TensorInfo]
    stored: Mapping[str, str]

    @property
    def depth(self) -> int:
        return len({m[1] for m in map(LAYER.match, self.index) if m is not None})

    @property
    def prefixed(self) -> bool:
        """Whether the names say `mtp.`, as inside a whole checkpoint."""
        return any(bare != name for bare, name in self.stored.items())


@dataclass(frozen=True, slots=True)
class NormForm:
    """How the norms are stored and what says so.

    Attributes:
        form: "weights": as used; "deltas": 1 less.
        reason: what decided.
        doubt: what speaks against it, "" when nothing does.
    """

    form: Form
    reason: str
    doubt: str = ""


def find_head(ref: ModelRef) -> HeadFiles | None:
    """The head in a directory, None when it has none. LoadError for broken files, or two heads in one.

    Inside a checkpoint only the files that hold a tensor of it have to be there.
    """
    if ref.model_type == EXTERNAL:
        return _collect(ref, "directory", tensor_index(ref.path))
    inside = select_index(ref.path, lambda name: PREFIX.match(name) is not None)
    if inside:
        return _collect(ref, "shards", inside)
    beside = head_index(ref.path)
    return _collect(ref, "file", beside) if beside else None


def _collect(ref: ModelRef, place: Place, tensors: Mapping[str, TensorInfo]) -> HeadFiles:
    stored: dict[str, str] = {}
    for name in tensors:
        bare = PREFIX.sub("", name, count=1)
        if bare in stored:
            raise LoadError(
                f"MTP head of {ref.name}",
                found=f"{stored[bare]} and {name}",
                expected="each tensor once",
                next_step="Remove the copy that does not belong to this checkpoint",
                code="QW21",
            )
        stored[bare] = name
    return HeadFiles(place, {bare: tensors[name] for bare, name in stored.items()}, stored)


# -- norms ---------------------------------------------------------------------------------------------


def norm_form(files: HeadFiles) -> NormForm:
    """How the head's norms are stored: by the files' own label, else by their values."""
    labels = {read_metadata(info.file).get("format", "") for info in files.index.values()}
    values = form_of_values(files)
    if files.place == "directory" and not files.prefixed:
        said = NormForm("weights", "a head that was extracted holds them as they are used")
    elif labels == {"mlx"}:
        said = NormForm("weights", "its files are labelled as converted for MLX")
    elif "" not in labels and "mlx" not in labels:
        said = NormForm("deltas", f"its files are as published (labelled {', '.join(sorted(labels))})")
    elif values is None:
        return NormForm("weights", "nothing says otherwise")
    else:
        return NormForm(values, f"its files have no label, and the values look like {values}")
    doubt = f"the values look like {values}" if values not in (None, said.form) else ""
    return NormForm(said.form, said.reason, doubt)


def form_of_values(files: HeadFiles) -> Form | None:
    """What the stored norms look like; None without any to look at."""
    qk = [mean for name, mean in _means(files) if _QK.fullmatch(name)]
    other = [mean for name, mean in _means(files) if _OTHER.fullmatch(name)]
    if not qk or not other:
        return None
    return "deltas" if max(qk) < LARGEST_QK_DELTA and min(other) < LARGEST_OTHER_DELTA else "weights"


def _means(files: HeadFiles) -> Iterable[tuple[str, float]]:
    for name, info in files.index.items():
        if NORMS.fullmatch(name) and info.size:
            values = _read(info)
            if values is not None:
                yield name, float(values.mean())


def _read(info: TensorInfo) -> np.ndarray | None:
    """A small tensor as float32; None for a dtype no norm is stored in."""
    kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}.get(info.dtype)
    if kind is None:
        return None
    with info.file.open("rb") as stream:
        stream.seek(info.offset)
        data: np.ndarray = np.frombuffer(stream.read(info.nbytes), kind)
    if info.dtype == "BF16":  # the upper half of a float32
        data = (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)
