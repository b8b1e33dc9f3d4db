"""Errors of conversions that several modules raise."""

from __future__ import annotations

import errno
from pathlib import Path

from ..errors import RefusedError, UsageError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def taken(
    out: Path, inside: list[str], overwrite: bool | None, checkpoint: bool, replaced: str = "a checkpoint to replace"
) -> UsageError:
    """Something is where the output is to be; `overwrite` as in `staging.check_output`, of `replaced`."""
    advice = ", or pass --overwrite" if checkpoint and overwrite is False else ""
    return UsageError(
        f"folder {out}",
        found=f"something there already ({', '.join(inside[:4])})" if out.is_dir() else "a file",
        expected="a new folder" + (f", or {replaced}" if overwrite else ""),
        next_step="Choose another folder with -o" + advice,
        code="U65",
    )


def inside_source(out: Path, source: Path) -> UsageError:
    """The output is the source, or a folder in it."""
    return UsageError(
        f"folder {out}",
        found="the source itself" if out == source else f"a folder inside the source {source}",
        expected="a folder apart from the checkpoint that is read",
        next_step="Choose another folder with -o",
        code="U66",
    )


def inside_checkpoint(out: Path, checkpoint: Path) -> UsageError:
    """The output is a folder in some other checkpoint, which would be replaced and removed with it."""
    return UsageError(
        f"folder {out}",
        found=f"a folder inside the checkpoint {checkpoint}",
        expected="a folder apart from other checkpoints",
        next_step="Choose another folder with -o",
        code="U69",
    )


def unwritable(out: Path, reason: str) -> UsageError:
    """The output cannot be written."""
    return UsageError(
        f"folder {out}",
        found=reason,
        expected="a place that can be written to",
        next_step="Choose another folder with -o, or correct its permissions",
        code="U83",
    )


def no_room(out: Path, needed: str, free: str, kept: str) -> RefusedError:
    """The disk is full, or would be; `kept` says what a next run finds, "" when nothing was written."""
    return RefusedError(
        f"room for {out}",
        found=free,
        expected=needed,
        next_step=f"Make room and run the same command again{kept}, or choose another disk with -o",
        code="R40",
    )


def running(out: Path, folder: Path) -> RefusedError:
    """Another process writes the same output."""
    return RefusedError(
        f"conversion to {out}",
        found=f"another process at work in {folder}",
        expected="one process per output",
        next_step="Wait for it, stop it, or choose another folder with -o",
        code="R41",
    )
