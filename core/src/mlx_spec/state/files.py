"""Saved state: one safetensors file, written beside its place and moved there when it is whole."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import LoadError

META_KEY = "mlx_spec_state"
FORMAT = 1


def write_state(path: Path, tensors: Mapping[str, mx.array], meta: Mapping[str, Any]) -> None:
    """Write tensors and meta to `path`; a reader sees the old file or the whole new one, never half of it."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.safetensors")
    text = json.dumps({"format": FORMAT, **meta})
    try:
        mx.save_safetensors(str(beside), dict(tensors), {META_KEY: text})
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read_state(path: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Tensors, already read into memory, and meta of a file that `write_state` wrote.

    Raises LoadError when it is missing, cut short, damaged or something else.
    """
    meta = (_header(path).get("__metadata__") or {}).get(META_KEY)
    if meta is None:
        raise _refused(path, "no state description", "a file written by StateGroup.save")
    try:
        parsed = json.loads(meta)
    except ValueError as error:
        raise _refused(path, "a damaged state description", "json") from error
    if parsed.pop("format", None) != FORMAT:
        raise _refused(path, "another format version", f"version {FORMAT}")
    tensors: Any = mx.load(str(path), format="safetensors")
    mx.eval(tensors)  # reads now, so that the file may be replaced or deleted afterwards
    return tensors, parsed


def _header(path: Path) -> dict[str, Any]:
    """The safetensors header, checked against the size of the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(min(length, size)))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except OSError as error:
        raise _refused(path, error.strerror or "an unreadable file", "a readable file") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refused(path, "a damaged header", "a safetensors file") from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise _refused(path, f"{size} bytes", f"{expected} bytes")
    return header


def _refused(path: Path, found: str, expected: str) -> LoadError:
    return LoadError(
        f"saved state {path}", found=found, expected=expected, next_step="Delete it, it can be rebuilt", code="L31"
    )
