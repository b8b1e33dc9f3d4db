"""The folder an output grows in: beside it, resumed by a run of the same plan, then renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..errors import LoadError
from ..tensorfiles import read_header
from .refusals import NO_ROOM, inside_checkpoint, inside_source, no_room, running, taken, unwritable

PLAN = ".mlx-spec-plan.json"
UNFINISHED = ".part"
SPARE_BYTES = 1 << 20  # config.json, tokenizer and what a file system needs besides


def check_output(source: Path, out: Path, overwrite: bool | None = None) -> Path:
    """`out` made absolute; UsageError unless it is new or empty, or a checkpoint and `overwrite`.

    None for `overwrite` is False where nobody can ask for it.
    """
    try:
        out, source = out.expanduser().resolve(), source.resolve()
        if out.is_relative_to(source):
            raise inside_source(out, source)
        refuse_inside_checkpoint(out)
        inside = [out.name] if out.exists() and not out.is_dir() else _names(out)
    except (OSError, RuntimeError) as error:
        raise unwritable(out, getattr(error, "strerror", None) or str(error)) from error
    checkpoint = (out / "config.json").is_file() and not source.is_relative_to(out)
    if inside and not (overwrite and checkpoint):
        raise taken(out, inside, overwrite, checkpoint)
    return out


def refuse_inside_checkpoint(out: Path) -> None:
    """UsageError for an output inside a folder with config.json and weights."""
    for folder in out.resolve().parents:
        try:
            found = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
        except OSError:  # one that cannot be looked into is no checkpoint that anybody loads
            continue
        if found:
            raise inside_checkpoint(out, folder)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


class Staging:
    """One output in the making; used as a context manager.

    A folder that an earlier run of the same plan left is taken up, one of another plan is emptied. The folder stays
    when the run ends early, so that the next one goes on; `finish` gives it its name.

    Args:
        out: from `check_output`.
        plan: everything the contents depend on, json-able; None for an output that is made anew each time.
    """

    def __init__(self, out: Path, plan: Mapping[str, Any] | None):
        self.out, self.folder = out, out.parent / f".{out.name}.mlx-spec-partial"
        self.resumed = False
        self._plan = json.loads(json.dumps(plan))
        self._lock = -1

    def __enter__(self) -> Self:
        with self._faults():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._take()
            try:
                self._resume()
            except BaseException:  # the lock must not outlive a failed start
                self._release()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        fault = self._fault(error) if isinstance(error, OSError) else None
        if error is not None:
            self.discard_if_fresh()
        self._release()
        if fault is not None:
            raise fault from error

    # -- files -----------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """True when an earlier run completed this weight file."""
        file = self.folder / name
        try:
            return file.exists() and bool(read_header(file))
        except LoadError:  # cut short in a way a rename cannot be: written again
            return False

    @contextmanager
    def file(self, name: str) -> Iterator[Path]:
        """A path to write; it gets its name when the block ends well, and is removed otherwise."""
        unfinished = self.folder / (name + UNFINISHED)
        try:
            yield unfinished
            unfinished.replace(self.folder / name)
        except BaseException:  # Ctrl-C too: half a file is no file
            unfinished.unlink(missing_ok=True)
            raise

    def write_json(self, name: str, content: object) -> None:
        """One small JSON file, on the disk when this returns."""
        self.write_with(name, lambda path: path.write_text(dumps(content), encoding="utf-8"))

    def write_with(self, name: str, write: Callable[[Path], object]) -> None:
        """One small file made by `write(path)`, on the disk when this returns."""
        with self.file(name) as path:
            write(path)
            _sync(path)

    def check_room(self, needed: int) -> None:
        """RefusedError when the disk has not `needed` bytes, and a little, free."""
        needed += SPARE_BYTES
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise no_room(self.out, f"{_mib(needed)} free", f"{_mib(free)} free", "")

    def discard_if_fresh(self) -> None:
        """Remove the folder when nothing in it is worth keeping."""
        if self._plan is None or not any(name.endswith(".safetensors") for name in _names(self.folder)):
            shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self) -> None:
        """Give the complete folder its name; what had it before is replaced in one step, or comes back."""
        aside = self.folder.with_name(self.folder.name + "-before")
        (self.folder / PLAN).unlink()
        _sync(self.folder)
        if self.out.exists():
            shutil.rmtree(aside, ignore_errors=True)
            self.out.rename(aside)
        try:
            self.folder.rename(self.out)
        except BaseException:  # Ctrl-C too: the old folder comes back
            if aside.exists():
                aside.rename(self.out)
            raise
        _sync(self.out.parent)
        shutil.rmtree(aside, ignore_errors=True)

    # -- inner -----------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Keep complete weight files of the same plan; remove everything else."""
        plan = self.folder / PLAN
        try:
            self.resumed = self._plan is not None and json.loads(plan.read_text(encoding="utf-8")) == self._plan
        except (OSError, ValueError):  # none, or cut short: then nothing was written under it
            self.resumed = False
        for path in self.folder.iterdir():
            keep = self.resumed and path.suffix == ".safetensors" and path.is_file()
            if not keep and path != plan:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        self.resumed = self.resumed and len(_names(self.folder)) > 1
        self.write_json(PLAN, self._plan)

    def _take(self) -> None:
        """Hold the folder until this process ends, however it ends."""
        import fcntl

        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._release()
            raise running(self.out, self.folder) from error
        except OSError:  # a file system without locks: two runs at once are then the user's care
            return

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._fault(error) from error

    def _fault(self, error: OSError) -> Exception:
        """What a failing system call means to the user; files that were completed stay for the next run."""
        reason = error.strerror or str(error)
        if error.errno in NO_ROOM:
            kept = [name for name in _names(self.folder) if name.endswith(".safetensors") and self._plan is not None]
            after = f", which goes on after the {len(kept)} complete files in {self.folder}" if kept else ""
            return no_room(self.out, "room for all files", reason, after)
        return unwritable(self.out, reason)


def dumps(content: object) -> str:
    """JSON as checkpoints have it."""
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"


def _sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
