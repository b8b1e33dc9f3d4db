"""`spec doctor`: is this installation able to do its work, and if not, what to do next."""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import click

from .. import __version__
from ..cores import cpu_quota, cpuset_cores, usable_cores
from ..discovery import distribution_version
from ..errors import SpecError, UsageError
from ..kernels import Candidate
from ..speed import MEBIBYTES, LayerTime
from ..speed import ROWS as SPEED_ROWS
from ..speed import SIZE as SPEED_SIZE
from .output import print_json, print_table
from .plugins import settled_records

Status = Literal["ok", "warn", "error"]
MAPS = Path("/proc/self/maps")
FAST_BLAS = {"openblas": "OpenBLAS", "mkl": "Intel MKL", "blis": "BLIS", "flexiblas": "FlexiBLAS", "armpl": "ArmPL"}


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: what was looked at, how it is, what was seen, what to do; the code of an error."""

    name: str
    status: Status
    detail: str
    next_step: str = ""
    code: str = ""

    def advice(self) -> str:
        """The next step under the table, behind what it is about."""
        begin = f"{self.status} {self.code}:" if self.code else self.status
        return f"{begin} {self.name}: {self.next_step}"


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Check Python, MLX, plugins, settings and folders; exit 1 when something cannot work."""
    settled_records(ctx)
    checks = run_checks()
    failed = any(check.status == "error" for check in checks)
    if as_json:
        print_json({"ok": not failed, "version": __version__, "checks": checks})
    else:
        print_table(("check", "status", "found"), [(c.name, c.status, c.detail) for c in checks])
        for check in checks:
            if check.next_step:
                print(check.advice())
    if failed:
        ctx.exit(1)


def run_checks() -> list[Check]:
    """All checks, in the order they are shown; one that breaks becomes an error of its own.

    A variable that stands in the way of several is an error of the settings alone.
    """
    checks: list[Check] = []
    for group in (_system, _mlx, _blas, _kernels, _cost, _libraries, _plugins, _settings):
        checks += _guarded(group)
    return checks


def _guarded(group: Callable[[], Iterator[Check]]) -> list[Check]:
    name = group.__name__.strip("_").replace("_", " ")
    try:
        return list(group())
    except SpecError as error:
        if isinstance(error, UsageError) and group is not _settings:  # all that is used here are variables
            return [Check(name, "warn", f"not looked at: see {error.what} under settings")]
        return [_refused(name, error)]
    except Exception as error:  # the doctor reports, whatever the patient does
        detail = f"{type(error).__name__}: {error}"
        return [Check(name, "error", detail, "Set MLX_SPEC_LOG_LEVEL=debug and run spec doctor again")]


def _refused(name: str, error: SpecError) -> Check:
    detail = f"{error.what}: found {error.found}, expected {error.expected}"
    return Check(name, "error", detail, error.next_step, error.code)


def _system() -> Iterator[Check]:
    version = platform.python_version()
    yield Check("python", "ok", f"{version} at {sys.executable}")
    yield Check("system", "ok", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield Check("cores", "ok", describe_cores())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Check("memory", "ok", f"{memory / 2**30:.1f} GiB")


def describe_cores() -> str:
    """How many cores there are, and why not all of them are used."""
    quota = cpu_quota()
    limit = f", a CPU quota of {quota:.3g}" if quota is not None else ""
    return f"{usable_cores()} used of {os.cpu_count()}: a cpuset of {cpuset_cores()}{limit}"


def _mlx() -> Iterator[Check]:
    version = distribution_version("mlx")
    try:
        mx: Any = import_module("mlx.core")
    except ImportError as error:
        yield Check("mlx", "error", f"{version or 'not installed'}; import failed: {error}", _mlx_step())
        return
    yield Check("mlx", "ok", f"{version}, default device {mx.default_device()}")
    for kind in (mx.cpu, mx.gpu):
        for index in range(mx.device_count(kind)):
            yield Check("device", "ok", _describe_device(mx, mx.Device(kind, index)))


def _mlx_step() -> str:
    wanted = '"mlx[cpu]", or "mlx[cuda13]" with an NVIDIA GPU' if sys.platform == "linux" else "mlx"
    return f"pip install {wanted}"


def _describe_device(mx: Any, device: Any) -> str:
    info = mx.device_info(device)
    size = info.get("memory_size") or info.get("total_memory")
    memory = f", {size / 2**30:.1f} GiB" if isinstance(size, int) else ""
    return f"{device}: {info.get('device_name', 'unnamed')}{memory}"


def _blas() -> Iterator[Check]:
    """Which BLAS libmlx was linked to; on Linux its CPU matrix products run there."""
    if sys.platform == "darwin":
        yield Check("blas", "ok", "Accelerate")
        return
    import_module("mlx.core")  # maps the library MLX is linked to into this process
    libraries = mapped_libraries(MAPS.read_text()) if MAPS.is_file() else []
    yield judge_blas(libraries, any(candidate.ok for candidate in _candidates()))


def mapped_libraries(maps: str) -> list[str]:
    """File names of the BLAS and LAPACK libraries in a /proc/<pid>/maps text, sorted."""
    paths = {line.split(maxsplit=5)[5].strip() for line in maps.splitlines() if line.count(" ") >= 5 and "/" in line}
    pattern = re.compile(r"(?:blas|lapack|mkl_|blis|armpl)[\w.+-]*\.so", re.IGNORECASE)
    ours = [path for path in paths if pattern.search(Path(path).name) and "numpy" not in path]
    return sorted(ours)


def judge_blas(paths: list[str], kernels: bool = False) -> Check:
    """Reference BLAS is named as what it is: correct and slow; `kernels` run in its place."""
    names = ", ".join(Path(path).name for path in paths)
    for key, label in FAST_BLAS.items():
        if any(key in path.lower() for path in paths):
            return Check("blas", "ok", f"{label} ({names})")
    if any("blas" in Path(path).name.lower() for path in paths):
        if kernels:
            return Check("blas", "ok", f"reference BLAS ({names}): slow, but layers on kernels do without it")
        detail = f"reference BLAS ({names}): float32 matrix products are correct but slow, a block verify gains little"
        step = "Prefer bfloat16 or quantised weights on this CPU; MLX has kernels of its own there"
        return Check("blas", "warn", detail, step)
    return Check("blas", "warn", "no BLAS library found in this process", "Nothing to do if MLX runs on a GPU")


def _candidates() -> list[Candidate]:
    """Kernels wanted for the default device; none with MLX_SPEC_KERNELS=off."""
    from ..kernels import candidates, device_kind
    from ..plugins import get_manager
    from ..settings import get_settings

    only = get_settings().kernels
    return [] if only == () else candidates(get_manager().registry, device_kind(), only)


def _kernels() -> Iterator[Check]:
    """Every kernel, as `spec plugins` lists them, and which of them the settings leave out."""
    from ..kernels import device_kind, judge
    from ..plugins import get_manager
    from ..settings import get_settings

    device, asked, wanted = device_kind(), get_settings().kernels, _candidates()
    for owner, kernel in get_manager().registry.kernels():
        left_out = asked is not None and (asked == () or (kernel.swap is not None and kernel.op not in asked))
        yield _kernel(judge(owner, kernel, device), left_out)
    if asked == ():
        yield Check("kernels", "ok", "mlx's own (MLX_SPEC_KERNELS=off)")
    elif not wanted:
        slow = device == "cpu" and sys.platform == "linux"
        step = f"For kernels made for this CPU, {_rebuild('cpu')}" if slow else ""
        yield Check("kernels", "warn" if slow else "ok", f"mlx's own; no plugin brings any for {device}", step)


def _kernel(found: Candidate, left_out: bool) -> Check:
    """One kernel: what runs, or why not; a warning only for one that was to run here."""
    name, owner = f"kernel {found.kernel.op}", found.owner
    if not found.fits:
        return Check(name, "ok", f"{owner}: not used here: {found.detail}")
    if left_out:
        return Check(name, "ok", f"{owner}: left out by MLX_SPEC_KERNELS ({found.detail or 'ready'})")
    if found.ok:
        return Check(name, "ok", f"{owner}: {found.detail or 'ready'}")
    step = f"Everything works without it, more slowly. To use it, {_rebuild(owner)}"
    return Check(name, "warn", f"{owner}: not used here: {found.detail or 'the plugin does not say why'}", step)


def _cost() -> Iterator[Check]:
    """What the arithmetic of a model costs here, measured."""
    from .. import speed
    from ..kernels import device_kind

    own = speed.layer_time()
    swaps = [candidate.kernel.swap for candidate in _candidates() if candidate.ok and candidate.kernel.swap]
    kernels = speed.layer_time(swaps) if swaps else None
    if device_kind() == "cpu":
        yield Check("memory speed", "ok", describe_read(speed.read_rate()))
    yield Check("cost", "ok", describe_cost(own, kernels))


def describe_read(rate: float) -> str:
    """The read rate of memory, and what it is beside the cost of a layer."""
    return f"{rate / 1e9:.3g} GB/s read by {usable_cores()} cores out of {MEBIBYTES} MiB: the most a layer can reach"


def describe_cost(own: LayerTime, kernels: LayerTime | None) -> str:
    """Milliseconds of a layer and what they mean for a model."""
    one, block = SPEED_ROWS
    layer = f"a 4-bit layer of {SPEED_SIZE} x {SPEED_SIZE} takes"

    def rows(time: LayerTime) -> str:
        return f"{duration(time.ms[0])} for {one} row and {duration(time.ms[1])} for {block}"

    best = own if kernels is None else kernels
    weights = f"{best.read_rate / 1e9:.3g} GB/s of weights read from memory"
    means = f"{weights}, so each billion 4-bit weights cost about {duration(best.ms_per_billion)} a token"
    if kernels is None:
        return f"{layer} {rows(own)} on mlx's own operations; {means}"
    return f"{layer} {rows(kernels)} on the kernels, {rows(own)} on mlx's own operations; {means}"


def duration(ms: float) -> str:
    """Three digits in the unit people count in."""
    if ms < 999.5:
        return f"{ms:.3g} ms"
    return f"{ms / 1e3:.3g} s" if ms < 999.5e3 else f"{ms / 1e3:.0f} s"


def _rebuild(owner: str) -> str:
    """How the compiled part of a plugin comes to be."""
    if owner != "cpu":
        return f"do what plugin {owner} says about building it"
    return (
        "install a C++20 compiler (g++ or clang++), then in a clone: pip install --force-reinstall --no-deps "
        "./plugins/cpu (for a clone's .venv: make clean, then make demo)"
    )


def _libraries() -> Iterator[Check]:
    for name in ("mlx-lm", "transformers", "tokenizers", "huggingface_hub", "safetensors"):
        version = distribution_version(name)
        step = "" if version else f"pip install {name}"
        yield Check(name, "ok" if version else "error", version or "not installed", step)


def _plugins() -> Iterator[Check]:
    from ..plugins import get_manager

    records = get_manager().records
    for record in records:
        label = f"{record.distribution} {record.version}".strip() or "not installed"
        if not record.errors:
            yield Check(f"plugin {record.name}", "ok", label)
        for error in record.errors:
            yield Check(f"plugin {record.name}", "error", f"{label}: {error}", error.next_step, error.code)
    if not any(record.loaded and record.claims and record.claims.targets for record in records):
        step = "For a family of its own, install its plugin, e.g. in a clone: pip install ./plugins/gemma4"
        yield Check("plugins", "warn", "no plugin serves a model family; generic targets only", step)


def _settings() -> Iterator[Check]:
    from ..settings import get_settings, source, unknown_variables

    settings = get_settings()
    refused = _refused_kernels()
    for field in type(settings).model_fields:
        value = getattr(settings, field)
        shown = "off" if field == "kernels" and value == () else _shown(value)
        told = f"{shown} ({source(field)})"
        if field == "kernels" and refused is not None:
            yield Check("setting kernels", "warn", f"{told} cannot be used", "See settings")
        elif field == "threads" and value is not None and value > cpuset_cores():
            most = cpuset_cores()
            step = f"Unset it, or give at most {most}"
            yield Check("setting threads", "warn", f"{told}: no more than the {most} of the cpuset are used", step)
        else:
            yield Check(f"setting {field}", "ok", told)
    for name, close in unknown_variables():
        step = f"Did you mean {close}" if close else f"Unset {name}"
        yield Check("settings", "warn", f"{name} means nothing here", step)
    if refused is not None:
        yield _refused("settings", refused)
    yield _cache_folder(settings.cache_dir)


def _refused_kernels() -> UsageError | None:
    """What is wrong with the names in MLX_SPEC_KERNELS."""
    try:
        _candidates()
    except UsageError as error:
        return error
    except ImportError:  # without mlx no name of a kernel means anything; the check of mlx says so
        pass
    return None


def _shown(value: object) -> str:
    """A setting's value in words."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    return "not set" if value is None else str(value)


def _cache_folder(folder: Path) -> Check:
    """Whether probe memos and learned costs can be kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        step = "Make it writable or set MLX_SPEC_CACHE_DIR; without it every start probes and tunes again"
        return Check("cache folder", "warn", f"{folder}: {error.strerror or error}", step)
    return Check("cache folder", "ok", str(folder))
