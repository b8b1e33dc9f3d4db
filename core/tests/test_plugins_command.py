"""`spec plugins`: kernels that cannot run here are marked, with the reason."""

from __future__ import annotations

import json

from mlx_spec.kernels import device_kind

SOURCE = """
from mlx_spec import hookimpl
from mlx_spec.registry import Kernel

def broken():
    raise OSError("half a file")

@hookimpl
def spec_register(register):
    kernel = lambda op, device, ready: register.kernel(
        Kernel(op, (device,), "bitwise", lambda: print, print, lambda module: None, ready))
    kernel("works", "DEVICE", lambda: (True, "avx2"))
    kernel("absent", "DEVICE", lambda: (False, "no library"))
    kernel("missing", "DEVICE", lambda: (False, "no library"))
    kernel("broken", "DEVICE", broken)
    kernel("elsewhere", "OTHER", lambda: (True, ""))
"""


def test_kernels_that_cannot_run_here_are_marked_with_the_reason(site, spec):
    device = device_kind()
    other = "metal" if device == "cpu" else "cpu"
    site.install("own-dist", "own", SOURCE.replace("DEVICE", device).replace("OTHER", other))
    elsewhere = f"made for {other}, while MLX runs on {device}"
    rows = json.loads(spec("plugins", "--json").stdout)["plugins"]
    (row,) = [row for row in rows if row["name"] == "own"]
    assert {kernel["op"]: (kernel["runs"], kernel["detail"]) for kernel in row["kernels"]} == {
        "works": (True, "avx2"),
        "absent": (False, "no library"),
        "missing": (False, "no library"),
        "broken": (False, "OSError: half a file"),
        "elsewhere": (False, elsewhere),
    }
    done = spec("plugins")
    assert f"works ({device}), absent ({device}, not used here)" in " ".join(done.stdout.split())
    assert done.stdout.splitlines()[0].endswith("kernels")  # the longest column pads no other
    assert "note: plugin own: not used here: absent, missing: no library\n" in done.stdout
    assert "elsewhere (" in done.stdout and elsewhere not in done.stdout  # nothing is wrong with it
    assert "not used here: works" not in done.stdout and done.stderr == ""


def test_the_doctor_lists_the_kernels_that_the_plugins_bring(site, spec):
    """Every one, in one order and with one reason; the doctor adds which of them the settings leave out."""
    device = device_kind()
    source = SOURCE.replace("DEVICE", device).replace("OTHER", "metal" if device == "cpu" else "cpu")
    inside = f"    register.kernel(Kernel('inside', ('{device}',), 'bitwise', lambda: print, print))\n"
    site.install("own-dist", "own", source + inside)
    rows = json.loads(spec("plugins", "--json").stdout)["plugins"]
    brought = [(row["name"], kernel) for row in rows for kernel in row["kernels"]]
    assert {"works", "elsewhere", "inside"} <= {kernel["op"] for _, kernel in brought}
    for chosen in ("on", "off", "works"):
        checks = json.loads(spec("doctor", "--json", MLX_SPEC_KERNELS=chosen).stdout)["checks"]
        found = [check for check in checks if check["name"].startswith("kernel ")]
        assert [check["name"] for check in found] == [f"kernel {kernel['op']}" for _, kernel in brought]
        for check, (owner, kernel) in zip(found, brought, strict=True):
            assert check["detail"].startswith(f"{owner}: ") and (kernel["detail"] or "ready") in check["detail"]
            left = "left out by MLX_SPEC_KERNELS" in check["detail"]
            kept = chosen == "on" or (chosen == "works" and kernel["op"] in ("works", "inside"))
            assert owner != "own" or left is (kernel["fits"] and not kept)
            assert (check["status"] == "warn") is (kernel["fits"] and not kernel["runs"] and not left)


def test_the_doctor_says_how_a_kernel_comes_to_be(site, spec):
    site.install("own-dist", "own", SOURCE.replace("DEVICE", device_kind()).replace("OTHER", "metal"))
    done = spec("doctor", MLX_SPEC_KERNELS="on")
    step = "Everything works without it, more slowly. To use it, do what plugin own says about building it"
    assert f"warn kernel absent: {step}\n" in done.stdout


def test_the_doctor_says_how_the_cpu_kernels_are_rebuilt():
    from mlx_spec.cli.doctor import _rebuild

    assert "C++20 compiler" in _rebuild("cpu") and "--force-reinstall --no-deps ./plugins/cpu" in _rebuild("cpu")
