"""A GGUF file into a checkpoint directory of mlx-lm's, a few million weights at a time.

Codes, scales and minima are the file's own; what has to be rounded to the dtype asked for is counted and reported.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ..conversion.refusals import NO_ROOM, no_room, taken, unwritable
from ..conversion.staging import refuse_inside_checkpoint
from ..tensorfiles import unreadable
from ..tensorwriter import Entry, SafetensorsWriter
from .blocks import GROUP, TYPES, Affine, Floats, TensorType, pack, type_name
from .container import Gguf, Tensor, read_gguf
from .families import Model, read_model
from .metadata import Metadata
from .parts import Part
from .refusals import damaged, not_finite
from .rounding import DTYPES, as_dtype, as_float32
from .vocabulary import Vocabulary, read_vocabulary

CHUNK = 1 << 22
"""Weights decoded at a time; the largest arrays in memory are a few times as many bytes."""
SHARD_BYTES = 4 << 30
"""Tensors go into a new file when the one before would be larger than this."""


@dataclass(slots=True)
class Conversion:
    """What was written.

    Attributes:
        types: GGUF type -> number of tensors.
        quantised: bits -> number of layers, of group size 32.
        widened: tensors of a quantised type that MLX has no layout for, written as floats.
        rounded: tensors in which something had to be rounded to `dtype` -> error, as a share of the largest value.
    """

    source: Path
    out: Path
    model_type: str
    dtype: str
    types: dict[str, int]
    files: int = 0
    nbytes: int = 0
    tokens: int = 0
    quantised: dict[int, int] = field(default_factory=dict)
    widened: list[str] = field(default_factory=list)
    rounded: dict[str, float] = field(default_factory=dict)


def convert_gguf(
    source: Path,
    out: Path,
    dtype: str = "float32",
    overwrite: bool = False,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
    shard_bytes: int = SHARD_BYTES,
) -> Conversion:
    """Write the checkpoint of `source` to the folder `out`: all of it, or nothing.

    Args:
        dtype: of scales and of what is not quantised: "float32" keeps every value of the file, "float16" and
            "bfloat16" may round and are what GPUs are fast at.
        overwrite: replace `out` when it holds a checkpoint.
        on_bytes: told how many bytes of the tensors are done, and of how many.

    Raises LoadError for a file that cannot be converted, UsageError for a folder that cannot be written,
    RefusedError for a disk without room.
    """
    out = out.resolve()
    check_folder(source, out, overwrite)
    file = read_gguf(source)
    model = read_model(file)
    vocabulary = read_vocabulary(Metadata(source, file.metadata), model.config["vocab_size"])
    done = Conversion(
        source=source,
        out=out,
        model_type=model.config["model_type"],
        dtype=dtype,
        types=dict(Counter(type_name(tensor.type) for tensor in file.tensors.values())),
        tokens=vocabulary.tokens,
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".mlx-spec-convert-", dir=out.parent) as scratch:
            folder = Path(scratch) / "model"
            folder.mkdir()
            _Weights(file, model, done, on_bytes, shard_bytes).write(folder)
            _write_settings(folder, model, vocabulary, done)
            _put_in_place(folder, out, Path(scratch) / "before")
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in NO_ROOM:
            raise no_room(out, "room for the checkpoint", reason, "") from error
        raise unwritable(out, reason) from error
    return done


def check_folder(source: Path, out: Path, overwrite: bool) -> None:
    """UsageError unless `out` is new, empty, or a checkpoint to replace; never inside another."""
    refuse_inside_checkpoint(out)
    if not out.exists():
        return
    inside = sorted(path.name for path in out.iterdir()) if out.is_dir() else [out.name]
    if not inside:
        return
    checkpoint = (out / "config.json").is_file() and not source.resolve().is_relative_to(out)
    if not (overwrite and checkpoint):
        raise taken(out, inside, overwrite, checkpoint, "a checkpoint that does not hold the file")


def _put_in_place(folder: Path, out: Path, aside: Path) -> None:
    """Give a finished folder its name; what had it before goes aside, and comes back when that fails."""
    if out.exists():
        out.rename(aside)
    try:
        folder.rename(out)
    except BaseException:  # Ctrl-C too: the old folder comes back
        if aside.exists():
            aside.rename(out)
        raise


# -- weights ---------------------------------------------------------------------------------------------


class _Weights:
    """Writes the safetensors files of one checkpoint and their index."""

    def __init__(self, file: Gguf, model: Model, done: Conversion, on_bytes: Callable[[int, int], None], limit: int):
        self._file, self._parts, self._done = file, model.parts, done
        self._on_bytes, self._limit = on_bytes, limit
        self._dtype = DTYPES[done.dtype]
        self._taken, self._total = 0, sum(_bytes(part.source) for part in model.parts)

    def write(self, folder: Path) -> None:
        """All files; `done` learns what was written."""
        shards = _shards([(part, self._entries(part)) for part in self._parts], self._limit)
        names: dict[str, str] = {}
        with ExitStack() as stack:
            stream = stack.enter_context(_open(self._file.path))
            for number, shard in enumerate(shards, 1):
                name = (
                    f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
                )
                entries = [entry for _, own in shard for entry in own]
                with SafetensorsWriter(folder / name, entries) as writer:
                    for part, _ in shard:
                        self._write_part(stream, writer, part)
                names |= {entry.name: name for entry in entries}
                self._done.nbytes += sum(entry.nbytes for entry in entries)
        self._done.files = len(shards)
        index = {"metadata": {"total_size": self._done.nbytes}, "weight_map": dict(sorted(names.items()))}
        write_json(folder / "model.safetensors.index.json", index)

    def _entries(self, part: Part) -> list[Entry]:
        """What one parameter becomes: its weight alone, or packed codes, scales and biases."""
        bits = _bits(part)
        if not bits:
            return [Entry(part.name, self._dtype, part.shape)]
        rows, columns = part.shape
        groups = (rows, columns // GROUP)
        return [
            Entry(part.name, "U32", (rows, columns * bits // 32)),
            Entry(f"{part.module}.scales", self._dtype, groups),
            Entry(f"{part.module}.biases", self._dtype, groups),
        ]

    def _write_part(self, stream: BinaryIO, writer: SafetensorsWriter, part: Part) -> None:
        if part.source is None:
            writer.write(part.name, as_dtype(np.zeros(part.shape, np.float32), self._dtype))
            return
        kind, bits = TYPES[part.source.type], _bits(part)
        if bits:
            self._done.quantised[bits] = self._done.quantised.get(bits, 0) + 1
        elif kind.weights > 1:
            self._done.widened.append(part.source.name)
        for values in self._pieces(stream, part, kind):
            if isinstance(values, Affine):
                writer.write(part.name, pack(values.codes, bits))
                writer.write(f"{part.module}.scales", self._store(part.source, values.scales))
                writer.write(f"{part.module}.biases", self._store(part.source, values.biases))
            else:
                writer.write(part.name, self._store(part.source, values))

    def _pieces(self, stream: BinaryIO, part: Part, kind: TensorType) -> Iterator[Affine | Floats]:
        """A parameter in runs of rows, rows in mlx-lm's order; groups of a run have the rows as first axis."""
        tensor = part.source
        if tensor is None:
            return
        rows = part.shape[0] if len(part.shape) > 1 else tensor.size
        columns = tensor.size // rows
        unit = rows // part.heads if part.heads else 1  # rows that have to stay together
        step = max(CHUNK // (columns * unit), 1) * unit
        stream.seek(tensor.start)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            nbytes = count * columns // kind.weights * kind.nbytes
            data = self._read(stream, nbytes, tensor.name)
            with np.errstate(all="ignore"):  # what is not finite is refused when it is stored
                values = kind.decode(np.frombuffer(data, np.uint8).reshape(-1, kind.nbytes))
                if kind.bits and not _bits(part):  # a vector
                    values = values.codes * values.scales[:, None] + values.biases[:, None]
            if isinstance(values, Affine):
                yield Affine(*(_halves(array.reshape(count, -1), unit, part.heads) for array in values))
            else:
                floats = _halves(values.reshape(count, -1), unit, part.heads)
                yield floats + np.float32(part.shift) if part.shift else floats
            self._on_bytes(self._taken, self._total)

    def _read(self, stream: BinaryIO, nbytes: int, name: str) -> bytes:
        """The next bytes of a tensor."""
        try:
            data = stream.read(nbytes)
        except OSError as error:
            raise unreadable(self._file.path, error) from error
        if len(data) < nbytes:
            raise damaged(self._file.path, f"the end of the file in {name}", "a file that stays as it is")
        self._taken += nbytes
        return data

    def _store(self, tensor: Tensor, values: Floats) -> npt.NDArray[np.generic]:
        """Values in the dtype of the checkpoint; remembers what was rounded, refuses what is not finite."""
        stored = as_dtype(values, self._dtype)
        back = as_float32(stored, self._dtype)
        if not (np.isfinite(values).all() and np.isfinite(back).all()):
            raise not_finite(self._file.path, tensor.name, self._done.dtype)
        error = np.abs(back - values).max()
        if error:
            relative = float(error / np.abs(values).max())
            self._done.rounded[tensor.name] = max(relative, self._done.rounded.get(tensor.name, 0.0))
        return stored


def _bits(part: Part) -> int:
    """Bits of the packed layout of a parameter; 0 for floats."""
    return TYPES[part.source.type].bits if part.source is not None and len(part.shape) == 2 else 0


def _bytes(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    kind = TYPES[tensor.type]
    return tensor.size // kind.weights * kind.nbytes


def _halves(rows: npt.NDArray[Any], unit: int, heads: int) -> npt.NDArray[Any]:
    """Rows (N, ...) of whole heads of `unit` rows: rotary pairs side by side become two halves.

    As they are when `heads` is 0.
    """
    if not heads:
        return rows
    pairs = rows.reshape(-1, unit // 2, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _shards(items: Sequence[tuple[Part, list[Entry]]], limit: int) -> list[list[tuple[Part, list[Entry]]]]:
    """Parts in runs of at most `limit` bytes; one that is larger alone has a run of its own."""
    runs: list[list[tuple[Part, list[Entry]]]] = [[]]
    size = 0
    for part, entries in items:
        nbytes = sum(entry.nbytes for entry in entries)
        if runs[-1] and size + nbytes > limit:
            runs.append([])
            size = 0
        runs[-1].append((part, entries))
        size += nbytes
    return runs


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise unreadable(path, error) from error


# -- settings --------------------------------------------------------------------------------------------


def _write_settings(folder: Path, model: Model, vocabulary: Vocabulary, done: Conversion) -> None:
    """config.json, generation_config.json and the tokenizer."""
    ids = {
        "bos_token_id": vocabulary.start,
        "eos_token_id": list(vocabulary.ends) or None,
        "pad_token_id": vocabulary.padding,
    }
    ids = {key: value for key, value in ids.items() if value is not None}
    config = {**model.config, **ids, "torch_dtype": done.dtype}
    quantisation = quantisation_of(model.parts)
    if quantisation:
        config["quantization"] = quantisation
    write_json(folder / "config.json", {key: value for key, value in sorted(config.items()) if value is not None})
    write_json(folder / "generation_config.json", ids)
    write_json(folder / "tokenizer.json", vocabulary.tokenizer)
    limit = {"model_max_length": model.config["max_position_embeddings"]}
    write_json(folder / "tokenizer_config.json", vocabulary.config | limit)


def quantisation_of(parts: Sequence[Part]) -> dict[str, Any]:
    """The "quantization" of config.json: the most common bits, and an entry per layer that has others."""
    bits = {part.module: _bits(part) for part in parts if _bits(part)}
    if not bits:
        return {}
    usual = Counter(bits.values()).most_common(1)[0][0]
    others = {module: {"group_size": GROUP, "bits": own} for module, own in bits.items() if own != usual}
    return {"group_size": GROUP, "bits": usual, "mode": "affine", **others}


def write_json(file: Path, content: object) -> None:
    """One JSON file, flushed to the disk's own buffers so that a full disk is noticed here."""
    with file.open("w", encoding="utf-8") as stream:
        json.dump(content, stream, ensure_ascii=False, indent=1)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
