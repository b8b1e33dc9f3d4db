"""How many cores this process may keep busy: its cpuset, and what its control groups grant."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def cpuset_cores() -> int:
    """Cores that this process is allowed to run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_cores(root: Path = ROOT) -> int:
    """Cores of the cpuset, and no more than the quota keeps busy, rounded up; at least 1."""
    quota = cpu_quota(root)
    return cpuset_cores() if quota is None else max(1, min(cpuset_cores(), math.ceil(quota)))


def cpu_quota(root: Path = ROOT) -> float | None:
    """Cores' worth of time granted by the tightest control group this process is in; None without a limit.

    Reads cpu.max (version 2) and cpu.cfs_quota_us (version 1) of the group and of all above it. Within a container
    the group's path may not be there; then what is mounted counts as the group itself.
    """
    limits = [limit for folder in _folders(root) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def _folders(root: Path) -> Iterator[Path]:
    """Folders of this process's CPU control groups, each with those above it."""
    mounted = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            bases = [mounted]
        elif "cpu" in controllers.split(","):
            bases = [mounted / controllers, mounted / "cpu"]
        else:
            continue
        group = PurePosixPath(path.strip()).relative_to("/") if path.startswith("/") else PurePosixPath()
        for base in bases:
            yield from (base / above for above in (group, *group.parents))


def _limit(folder: Path) -> float | None:
    """Quota over period of one group."""
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    try:
        granted, every = int(quota), int(period)
    except ValueError:  # "max", or no such file
        return None
    return granted / every if granted > 0 and every > 0 else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # no such control group here: no quota
        return ""
