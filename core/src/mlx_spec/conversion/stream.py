"""Lazy mlx arrays into safetensors files, one array in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import LoadError
from ..tensorwriter import Entry, SafetensorsWriter
from .staging import Staging

if TYPE_CHECKING:
    import mlx.core as mx

SHARD_BYTES = 5 << 30  # as mlx-lm's
CLEAR_BYTES = 256 << 20  # freed buffers are given back after this much
_NAMES = {
    "bool_": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "complex64": "C64",
}  # fmt: skip

Tick = Callable[[int], None]  # told how many more bytes are done


class Arrays:
    """Named lazy arrays, given away one by one: what was taken is no longer held here."""

    def __init__(self, arrays: Mapping[str, mx.array]):
        self._arrays = dict(arrays)
        self.entries = [entry_of(name, array) for name, array in arrays.items()]

    def take(self, name: str) -> mx.array:
        """The array of that name; a second call for it is a KeyError."""
        return self._arrays.pop(name)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(entry.nbytes for entry in self.entries)


def entry_of(name: str, array: mx.array) -> Entry:
    """What a lazy array will be in a file; computes nothing."""
    return Entry(name, _NAMES[str(array.dtype).removeprefix("mlx.core.")], tuple(array.shape))


def plan_shards(entries: Sequence[Entry], limit: int = SHARD_BYTES) -> dict[str, list[Entry]]:
    """File name -> its tensors, in order; a tensor larger than `limit` has a file of its own."""
    runs: list[list[Entry]] = []
    size = 0
    for entry in entries:
        if not runs or size + entry.nbytes > limit:
            runs.append([])
            size = 0
        runs[-1].append(entry)
        size += entry.nbytes
    if len(runs) == 1:
        return {"model.safetensors": runs[0]}
    return {f"model-{i:05d}-of-{len(runs):05d}.safetensors": run for i, run in enumerate(runs, 1)}


def write_file(path: Path, arrays: Arrays, entries: Sequence[Entry], metadata: Mapping[str, str], tick: Tick) -> None:
    """One file; every array is computed, written and let go before the next one.

    Raises LoadError for a value that is not finite.
    """
    import mlx.core as mx

    done = 0
    with SafetensorsWriter(path, entries, metadata) as writer:
        for entry in entries:
            _write(writer, entry, arrays.take(entry.name))
            tick(entry.nbytes)
            done += entry.nbytes
            if done > CLEAR_BYTES:
                mx.clear_cache()
                done = 0
    mx.clear_cache()


def _write(writer: SafetensorsWriter, entry: Entry, array: mx.array) -> None:
    import mlx.core as mx
    import numpy as np

    flat = array.reshape(-1)
    finite = mx.isfinite(flat).all() if mx.issubdtype(flat.dtype, mx.floating) else mx.array(True)
    try:
        mx.eval(flat, finite)
    except RuntimeError as error:  # all that mlx raises: a file that changed or shrank, no memory, no kernel
        raise LoadError(
            f"tensor {entry.name}",
            found=str(error).splitlines()[0] if str(error) else "an error of mlx",
            expected="a tensor that can be read and computed",
            next_step="Check the source and the free memory, and run the same command again",
            code="L60",
        ) from error
    if not finite.item():
        raise LoadError(
            f"tensor {entry.name}",
            found="NaN or infinite values",
            expected="finite numbers",
            next_step="The source is damaged, or too large for the dtype: download it again, or choose another dtype",
            code="L18",
        )
    if entry.nbytes:
        writer.write(entry.name, np.asarray(flat.view(mx.uint8)))


def write_shards(
    staging: Staging, arrays: Arrays, metadata: Mapping[str, str], tick: Tick, limit: int, told: Callable[[str], None]
) -> dict[str, str]:
    """All arrays as model*.safetensors, those files left out that are there already; tensor name -> file.

    told: hears the name of each file that is complete.
    """
    shards = plan_shards(arrays.entries, limit)
    for name, entries in shards.items():
        if staging.has(name):
            tick(sum(entry.nbytes for entry in entries))
            for entry in entries:
                arrays.take(entry.name)
            continue
        with staging.file(name) as path:
            write_file(path, arrays, entries, metadata, tick)
        told(name)
    return {entry.name: name for name, entries in shards.items() for entry in entries}


def bytes_left(staging: Staging, arrays: Arrays, limit: int) -> int:
    """Bytes of the files that are not there yet."""
    shards = plan_shards(arrays.entries, limit)
    return sum(entry.nbytes for name, run in shards.items() if not staging.has(name) for entry in run)
