"""Cores a process may keep busy: cpuset and the quotas of control groups, both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlx_spec import cores


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """function(groups, files) -> root of a machine with these control groups; its cpuset has 8 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)

    def make(groups: str, **files: str) -> Path:
        content = {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}
        for name, text in content.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


V1 = "4:cpuset:/x\n3:cpu,cpuacct:/box/a\n1:name=systemd:/box\n"


@pytest.mark.parametrize(
    ("groups", "files", "quota", "usable"),
    [
        ("0::/\n", {}, None, 8),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None, 8),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5, 3),
        ("0::/\n", {"cpu.max": "5000 100000\n"}, 0.05, 1),
        ("0::/\n", {"cpu.max": "9900000 100000\n"}, 99, 8),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "400000 100000\n"}, 4, 4),
        ("0::/a/b\n", {"a/b/cpu.max": "200000 100000\n", "a/cpu.max": "400000 100000\n"}, 2, 2),
        ("0::/docker/1234\n", {"cpu.max": "150000 100000\n"}, 1.5, 2),
        (
            V1,
            {"cpu,cpuacct/box/a/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/box/a/cpu.cfs_period_us": "100000\n"},
            None,
            8,
        ),
        (V1, {"cpu,cpuacct/box/cpu.cfs_quota_us": "50000\n", "cpu,cpuacct/box/cpu.cfs_period_us": "25000\n"}, 2, 2),
        (V1, {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5, 1),
        (V1, {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "0\n"}, None, 8),
        ("0::/\n", {"cpu.max": "nonsense"}, None, 8),
        ("nonsense\n0::\n5\n", {"cpu.max": "300000 100000"}, 3, 3),
        ("", {"cpu.max": "300000 100000"}, None, 8),
    ],
)
def test_the_tightest_group_counts(machine, groups: str, files: dict[str, str], quota: float | None, usable: int):
    root = machine(groups, **files)
    assert cores.cpu_quota(root) == quota
    assert cores.usable_cores(root) == usable


def test_a_machine_without_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert cores.cpu_quota(tmp_path) is None
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert cores.usable_cores(tmp_path) == os.cpu_count()


def test_this_machine_answers():
    assert 1 <= cores.usable_cores() <= cores.cpuset_cores() <= (os.cpu_count() or 1)
