"""`spec doctor`: what it finds and what it makes of it."""

from __future__ import annotations

import json
import os
import time

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_spec import speed
from mlx_spec.cli import doctor
from mlx_spec.cores import cpuset_cores, usable_cores
from mlx_spec.speed import LayerTime

MAPS = """\
7f00-7f01 r-xp 00000000 08:01 11   /usr/lib/mlx_cpu.libs/{name}
7f01-7f02 r--p 00000000 08:01 12   /usr/lib/numpy.libs/libscipy_openblas64_-x.so
7f02-7f03 rw-p 00000000 00:00 0
7f03-7f04 r--p 00000000 08:01 13   /usr/lib/libmlx.so
7f04-7f05 r--p 00000000 08:01 14   /home/a b/liblapack.so.3
"""


@pytest.mark.parametrize(
    "name, status, text",
    [
        ("libblas-bd8a.so.3.10.0", "warn", "reference BLAS"),
        ("libopenblas.so.0", "ok", "OpenBLAS"),
        ("libmkl_rt.so.2", "ok", "Intel MKL"),
        ("libz.so.1", "warn", "no BLAS"),
    ],
)
def test_blas_is_judged_by_the_mapped_libraries(name, status, text):
    libraries = doctor.mapped_libraries(MAPS.format(name=name))
    assert not any("numpy" in path or "libmlx" in path for path in libraries)
    assert "/home/a b/liblapack.so.3" in libraries
    check = doctor.judge_blas(libraries)
    assert check.status == status and text in check.detail
    assert bool(check.next_step) is (status == "warn")


def test_reference_blas_is_no_worry_where_kernels_run():
    check = doctor.judge_blas(doctor.mapped_libraries(MAPS.format(name="libblas.so.3")), kernels=True)
    assert check.status == "ok" and "layers on kernels do without it" in check.detail and not check.next_step


def test_the_cost_is_said_with_and_without_kernels():
    own, kernels = LayerTime((6.9, 21.0)), LayerTime((0.15, 0.2944))
    layer = "a 4-bit layer of 2048 x 2048 takes"
    assert doctor.describe_cost(own, None) == (
        f"{layer} 6.9 ms for 1 row and 21 ms for 4 on mlx's own operations; "
        "0.342 GB/s of weights read from memory, so each billion 4-bit weights cost about 1.65 s a token"
    )
    assert doctor.describe_cost(own, kernels) == (
        f"{layer} 0.15 ms for 1 row and 0.294 ms for 4 on the kernels, 6.9 ms for 1 row and 21 ms for 4 on mlx's own "
        "operations; 15.7 GB/s of weights read from memory, so each billion 4-bit weights cost about 35.8 ms a token"
    )


def test_the_read_rate_says_what_it_is_beside_the_cost():
    told = f"31.8 GB/s read by {usable_cores()} cores out of 128 MiB: the most a layer can reach"
    assert doctor.describe_read(31.84e9) == told


@pytest.mark.parametrize(
    ("ms", "text"), [(0.1504, "0.15 ms"), (999.4, "999 ms"), (999.6, "1 s"), (19200.0, "19.2 s"), (4.2e6, "4200 s")]
)
def test_times_are_in_units_people_count_in(ms, text):
    assert doctor.duration(ms) == text


def test_the_cost_is_measured():
    """Of a layer as it is, of one that a kernel replaces, and of memory."""

    run = []  # addresses of the weights, in the order of the runs

    class Never(nn.QuantizedLinear):
        def __call__(self, x):
            run.append(np.array(self.weight, copy=False).ctypes.data)
            return mx.zeros((*x.shape[:-1], speed.SIZE), x.dtype)

    def swap(module):
        if type(module) is not nn.QuantizedLinear:
            return None
        new = Never.__new__(Never)
        nn.Module.__init__(new)
        dict.update(new, module)
        new.__dict__.update(module.__dict__)
        return new

    start = time.perf_counter()
    own, replaced = speed.layer_time(), speed.layer_time([swap])
    assert 0 < replaced.ms[0] < own.ms[0] and replaced.ms[1] < own.ms[1]
    assert own.ms_per_billion == pytest.approx(own.ms[0] * 238.4, rel=1e-3)
    ring = len(set(run))  # what is read twice has been pushed out of every cache by then
    assert ring * speed.BYTES >= speed.MEBIBYTES << 20 and all(a == b for a, b in zip(run, run[ring:], strict=False))
    first = next(module for module in speed._layers(()))
    assert sum(value.nbytes for value in first.parameters().values()) == speed.BYTES
    assert own.read_rate == pytest.approx(speed.BYTES / own.ms[0] * 1e3)
    assert 1e8 < speed.read_rate() < 1e13
    assert time.perf_counter() - start < 20  # under a second on an idle machine


def test_cores_are_said_with_what_limits_them(monkeypatch):
    monkeypatch.setattr(doctor, "cpu_quota", lambda: None)
    assert doctor.describe_cores() == f"{usable_cores()} used of {os.cpu_count()}: a cpuset of {cpuset_cores()}"
    monkeypatch.setattr(doctor, "cpu_quota", lambda: 1.5)
    assert doctor.describe_cores().endswith(", a CPU quota of 1.5")


def by_name(done) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_a_sound_installation_passes(spec):
    done = spec("doctor", "--json", MLX_SPEC_PREFILL_STEP="512")
    checks = by_name(done)
    assert done.returncode == 0, done.stdout
    assert {"python", "system", "cores", "memory", "mlx", "device", "blas", "mlx-lm", "tokenizers"} <= set(checks)
    assert {"memory speed", "cost"} <= set(checks) and "4-bit layer of 2048 x 2048 takes" in checks["cost"]["detail"]
    assert checks["setting prefill_step"]["detail"] == "512 (MLX_SPEC_PREFILL_STEP)"
    assert checks["setting probe"]["detail"] == "on (default)"
    assert checks["setting draft_kind"]["detail"] == "not set (default)"
    assert checks["setting trace"]["detail"] == "none (default)"
    assert checks["cache folder"]["status"] == "ok"
    assert all(check["next_step"] for check in checks.values() if check["status"] != "ok")


def test_errors_exit_1_and_name_the_next_step(spec, site):
    site.install("bad-dist", "bad", "raise RuntimeError('x')\n")
    done = spec("doctor", MLX_SPEC_PROBE="perhaps", MLX_SPEC_PROBBE="1")
    assert done.returncode == 1
    assert "error G07: plugin bad: " in done.stdout
    assert "error U03: settings: Correct or unset MLX_SPEC_PROBE" in done.stdout
    checks = by_name(spec("doctor", "--json", MLX_SPEC_PROBE="perhaps"))
    assert (checks["plugin bad"]["code"], checks["settings"]["code"], checks["python"]["code"]) == ("G07", "U03", "")


@pytest.mark.parametrize(
    ("name", "value", "code"), [("MLX_SPEC_THREADS", "many", "U03"), ("MLX_SPEC_KERNELS", "foo", "U05")]
)
def test_a_bad_variable_is_one_error_of_the_settings(spec, name, value, code):
    done = spec("doctor", **{name: value})
    assert done.returncode == 1 and done.stderr == ""
    told = [line for line in done.stdout.splitlines() if line.startswith("error ")]
    assert told == [f"error {code}: settings: Correct or unset {name}"]
    checks = by_name(spec("doctor", "--json", **{name: value}))
    assert [check["name"] for check in checks.values() if check["status"] == "error"] == ["settings"]
    for check in ("blas", "kernels", "cost"):
        assert checks[check]["status"] == "warn" and checks[check]["detail"].startswith("not looked at: see ")
        assert name in checks[check]["detail"]
    assert ("setting threads" in checks) is (code == "U05")  # the others are shown where they could be read
    if code == "U05":
        assert checks["setting kernels"]["status"] == "warn"
        assert checks["setting kernels"]["detail"] == "foo (MLX_SPEC_KERNELS) cannot be used"


def test_threads_that_have_no_core_are_told(spec):
    most = cpuset_cores()
    check = by_name(spec("doctor", "--json", MLX_SPEC_THREADS="4096"))["setting threads"]
    assert check["status"] == "warn" and check["next_step"] == f"Unset it, or give at most {most}"
    assert check["detail"] == f"4096 (MLX_SPEC_THREADS): no more than the {most} of the cpuset are used"
    check = by_name(spec("doctor", "--json", MLX_SPEC_THREADS=str(most)))["setting threads"]
    assert check["status"] == "ok" and check["detail"] == f"{most} (MLX_SPEC_THREADS)"


def test_misspelt_variables_and_unwritable_cache_are_warnings(spec, tmp_path):
    (tmp_path / "file").write_text("")
    done = spec("doctor", "--json", MLX_SPEC_PROBBE="1", MLX_SPEC_CACHE_DIR=str(tmp_path / "file" / "cache"))
    checks = by_name(done)
    assert done.returncode == 0
    assert checks["cache folder"]["status"] == "warn" and "MLX_SPEC_CACHE_DIR" in checks["cache folder"]["next_step"]
    assert checks["settings"]["status"] == "warn" and checks["settings"]["next_step"] == "Did you mean MLX_SPEC_PROBE"


def test_a_check_that_breaks_is_a_finding_not_a_crash(monkeypatch):
    def _odd():
        raise OSError("gone")
        yield

    assert doctor._guarded(_odd) == [
        doctor.Check("odd", "error", "OSError: gone", "Set MLX_SPEC_LOG_LEVEL=debug and run spec doctor again")
    ]
