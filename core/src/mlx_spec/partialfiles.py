"""Parts of a checkpoint whose other files need not be there; the index says what is where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .errors import LoadError
from .tensorfiles import TensorInfo, read_header, stale_index, tensor_index, weight_files, weight_map


def listed_files(path: Path, stem: str = "model") -> list[Path]:
    """Weight files of a folder as `weight_files` names them, but those that are missing are no error."""
    listed = sorted(set(weight_map(path, stem).values()))
    return [path / name for name in listed] if listed else weight_files(path, stem)


def select_index(path: Path, wanted: Callable[[str], bool], stem: str = "model") -> dict[str, TensorInfo]:
    """As `tensor_index`, of chosen names alone: only files that the index lists for them have to be there.

    Without an index file all weight files are looked at.
    """
    index = weight_map(path, stem)
    listed = {name: shard for name, shard in index.items() if wanted(name)}
    if not index:
        return {name: info for name, info in tensor_index(path, stem).items() if wanted(name)}
    headers = {shard: read_header(_present(path, shard, stem)) for shard in sorted(set(listed.values()))}
    for name, shard in listed.items():
        if name not in headers[shard]:
            raise stale_index(path, stem, name, shard, "but it is not there")
    return {name: headers[shard][name] for name, shard in listed.items()}


def _present(path: Path, shard: str, stem: str) -> Path:
    if not (path / shard).exists():
        raise LoadError(
            f"weights in {path}",
            found=f"no file {shard}",
            expected=f"every file that {stem}.safetensors.index.json lists for the tensors wanted here",
            next_step="Download the missing file",
            code="L11",
        )
    return path / shard
