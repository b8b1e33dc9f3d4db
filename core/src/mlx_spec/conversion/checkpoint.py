"""A safetensors checkpoint as mlx-lm would convert it, written tensor by tensor into a new folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint import fingerprint, read_config, tensor_index
from ..heads import find_heads, whole_index
from ..tensorfiles import read_metadata
from ..types import ModelRef
from .head import HEAD_FILE, PACKING, head_tensors, keep, settings_with_head
from .quantise import Made, Quantisation, make
from .staging import Staging, check_output
from .stream import SHARD_BYTES, Arrays, bytes_left, write_shards
from .trunk import source_metadata

FORMAT = 1  # of what is written under a plan; another number starts anew
SKIPPED = ("config.json", "model.safetensors.index.json")
SMALL = (".json", ".jinja", ".txt", ".model", ".tiktoken")
"""Endings of files that come along: tokenizer, chat template, generation settings."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a conversion is asked to do.

    Attributes:
        quantisation: None leaves weights as floats (or as they are packed).
        dtype: of floats; None takes the one config.json declares, as mlx-lm does.
        keep_heads: write the drafter heads beside the model.
    """

    quantisation: Quantisation | None = None
    dtype: str | None = None
    keep_heads: bool = False


@dataclass(slots=True)
class Progress:
    """Who is told what: bytes done of all, files that are complete."""

    on_bytes: Callable[[int, int], None] = lambda done, total: None
    on_file: Callable[[str], None] = lambda name: None
    done: int = 0
    total: int = 0

    def tick(self, nbytes: int) -> None:
        """So many more bytes are done."""
        self.done += nbytes
        self.on_bytes(self.done, self.total)


@dataclass(slots=True)
class Converted:
    """What was written.

    Attributes:
        resumed: True when complete files of an interrupted run were kept.
        quantised: bits -> number of modules.
        head: name of the file that holds the heads, "" without one.
        left_out: prefixes of heads that the source has and the output has not.
    """

    source: Path
    out: Path
    model_type: str
    dtype: str
    files: int = 0
    nbytes: int = 0
    resumed: bool = False
    quantised: dict[int, int] = field(default_factory=dict)
    head: str = ""
    left_out: list[str] = field(default_factory=list)


def convert(
    ref: ModelRef,
    out: Path,
    options: Options | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Converted:
    """Write the checkpoint of `ref` to the folder `out`: all of it, or nothing.

    An interrupted run leaves a hidden folder beside `out`; the same call goes on after its last complete file.

    Raises LoadError for a checkpoint that cannot be converted, UsageError for an output that cannot be, RefusedError
    when the disk is full or another process writes the same output.
    """
    options, progress = options or Options(), progress or Progress()
    out = check_output(ref.path, out, overwrite)
    read_config(ref.path)
    index = whole_index(ref.path, tensor_index(ref.path))  # every file whole, before anything is built
    heads = sum(info.nbytes for info in head_tensors(ref).values()) if options.keep_heads else 0
    made = make(ref, options.quantisation, options.dtype)
    arrays = Arrays(made.arrays)
    bits = _bits(made)
    result = Converted(ref.path, out, ref.model_type, made.dtype, nbytes=arrays.nbytes, quantised=bits)
    with Staging(out, _plan(ref, options, arrays, shard_bytes)) as staging:
        made.arrays.clear()  # the one reference left is in `arrays`
        result.resumed = staging.resumed
        staging.check_room(bytes_left(staging, arrays, shard_bytes) + heads)
        progress.total = arrays.nbytes + heads
        if options.keep_heads:
            keep(ref, staging, options.quantisation, made.dtype or None, progress.tick)
            made.config = settings_with_head(
                made.config, json.loads(read_metadata(staging.folder / HEAD_FILE)[PACKING])
            )
            result.head = HEAD_FILE
        else:
            result.left_out = [head.prefix for head in find_heads(ref.config, index)]
        files = write_shards(staging, arrays, source_metadata(ref), progress.tick, shard_bytes, progress.on_file)
        result.files = len(set(files.values()))
        write_settings(staging, ref, made, files, result.nbytes)
        staging.finish()
    return result


def _plan(ref: ModelRef, options: Options, arrays: Arrays, shard_bytes: int) -> dict[str, Any]:
    """Everything the contents depend on: what differs makes another output."""
    import mlx.core as mx
    from mlx_lm import __version__ as mlx_lm

    how = options.quantisation
    return {
        "format": FORMAT,
        "source": fingerprint(ref.path),
        "quantisation": how.as_dict() if how is not None else None,
        "dtype": options.dtype,
        "keep_heads": options.keep_heads,
        "shard_bytes": shard_bytes,
        "entries": [[e.name, e.dtype, list(e.shape)] for e in arrays.entries],
        "versions": [mx.__version__, mlx_lm],
    }


def _bits(made: Made) -> dict[int, int]:
    """Bits -> number of packed modules."""
    settings = made.config.get("quantization")
    if not isinstance(settings, dict):
        return {}
    counts: dict[int, int] = {}
    for name in made.arrays:
        path, _, part = name.rpartition(".")
        if part == "scales":
            own = settings.get(path)
            bits = int({**settings, **(own if isinstance(own, dict) else {})}["bits"])
            counts[bits] = counts.get(bits, 0) + 1
    return counts


def write_settings(staging: Staging, ref: ModelRef, made: Made, files: dict[str, str], nbytes: int) -> None:
    """config.json, the index, and the small files that come along from the source."""
    from mlx_lm.utils import save_config

    staging.write_with("config.json", lambda to: save_config(dict(made.config), to, keep_vision_config=made.vision))
    index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(files.items()))}
    staging.write_json("model.safetensors.index.json", index)
    for path in sorted(ref.path.iterdir()):
        if path.is_file() and path.suffix in SMALL and path.name not in SKIPPED and not _an_index(path):
            staging.write_with(path.name, lambda to, source=path: shutil.copyfile(source, to))  # type: ignore[misc]


def _an_index(path: Path) -> bool:
    return path.name.endswith(".index.json")
