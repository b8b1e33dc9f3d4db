"""`spec doctor`: what it finds and what it makes of it."""

from __future__ import annotations

import json

import pytest

from mlx_spec.cli import doctor

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


def by_name(done) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_a_sound_installation_passes(spec):
    done = spec("doctor", "--json", MLX_SPEC_PREFILL_STEP="512")
    checks = by_name(done)
    assert done.returncode == 0, done.stdout
    assert {"python", "system", "cores", "memory", "mlx", "device", "blas", "mlx-lm", "tokenizers"} <= set(checks)
    assert checks["setting prefill_step"]["detail"] == "512 (MLX_SPEC_PREFILL_STEP)"
    assert checks["setting probe"]["detail"] == "True (default)"
    assert checks["cache folder"]["status"] == "ok"
    assert all(check["next_step"] for check in checks.values() if check["status"] != "ok")


def test_errors_exit_1_and_name_the_next_step(spec, site):
    site.install("bad-dist", "bad", "raise RuntimeError('x')\n")
    done = spec("doctor", MLX_SPEC_PROBE="perhaps", MLX_SPEC_PROBBE="1")
    assert done.returncode == 1
    assert "error plugin bad: " in done.stdout
    assert "error settings: Correct or unset MLX_SPEC_PROBE" in done.stdout


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
