"""Small JSON files kept between runs (learned costs, probe memos). Never fatal: a miss is a miss.

A cache that cannot be read or written costs time, not correctness, so every fault is said once per
process and place, and the run goes on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("mlx_spec.cache")
MAX_BYTES = 4 << 20  # nothing kept here comes near; a larger file is not ours
_said: set[tuple[str, str]] = set()


def entry_path(area: str, key: str, directory: Path | None = None) -> Path:
    """File of one entry: <cache dir>/<area>/<key>.json, with characters a file name may not have replaced."""
    if directory is None:
        from .settings import get_settings

        directory = get_settings().cache_dir
    return directory / area / (re.sub(r"[^A-Za-z0-9._-]", "_", key)[:120] + ".json")


def read_entry(area: str, key: str, directory: Path | None = None) -> dict[str, Any] | None:
    """The stored object, or None when there is none or it cannot be used."""
    path = entry_path(area, key, directory)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES} bytes")
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError(f"holds a {type(value).__name__}, not an object")
    except FileNotFoundError:  # nothing was stored yet
        return None
    except (OSError, ValueError, RecursionError) as error:
        _say("read", path, error, "It is ignored and written anew.")
        return None
    return value


def write_entry(area: str, key: str, value: Mapping[str, Any], directory: Path | None = None) -> bool:
    """Replace the stored object in one step; False when that was not possible."""
    path = entry_path(area, key, directory)
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem[:40], suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file, sort_keys=True)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):  # the write failed, which is said below; this only tidies up
                Path(temporary).unlink(missing_ok=True)
        _say("written", path.parent, error, "What is learned now is kept for this run only.")
        return False
    return True


def remove_entry(area: str, key: str, directory: Path | None = None) -> bool:
    """Remove the stored object; True when there was one and it is gone."""
    path = entry_path(area, key, directory)
    try:
        path.unlink()
    except FileNotFoundError:  # there was none
        return False
    except OSError as error:
        _say("removed", path, error, "It stays in use.")
        return False
    return True


def _say(verb: str, path: Path, error: Exception, effect: str) -> None:
    """One warning per process, verb and place."""
    if (verb, str(path)) in _said:
        return
    _said.add((verb, str(path)))
    reason = getattr(error, "strerror", None) or str(error)
    log.warning("cache %s could not be %s: %s. %s", path, verb, reason, effect)
