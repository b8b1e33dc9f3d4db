"""The compiled library: loaded once, checked against the MLX in use; no traceback when it cannot be."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from mlx_spec.errors import RefusedError
from mlx_spec.kernels import ROUNDED, rounded_form

REBUILD = "pip install --force-reinstall --no-deps ./plugins/cpu (make clean and make demo for a clone's .venv)"
# What the Python side calls in the library; native/bindings.cpp has the number of what it offers.
INTERFACE = 14


def ready() -> tuple[bool, str]:
    """(True, instruction set in use) or (False, why the library cannot be used and what to do)."""
    module, reason = _library()
    return (module is not None, reason if module is None else str(module.kernels()))


def library() -> Any:
    """The library. Raises RefusedError when it cannot be used."""
    module, reason = _library()
    if module is None:
        raise RefusedError(
            "kernel library of mlx-spec-cpu",
            found=reason,
            expected="one built for this version of the package and the MLX in use",
            next_step=f"Install a C++20 compiler, then in a clone: {REBUILD}",
            code="CP01",
        )
    return module


def use_kernels(name: str) -> None:
    """Choose an instruction set for the process, e.g. "avx2"; "avx2 int8" (or int16) rounds activations.

    RefusedError when it cannot run here.
    """
    module = library()
    if not module.use_kernels(name):
        raise RefusedError(
            "kernels",
            found=repr(name),
            expected=f"one of {module.kernel_names()}, with {' or '.join(map(repr, ROUNDED))} behind it or nothing",
            next_step="Choose one of these",
            code="CP02",
        )


@cache
def _library() -> tuple[ModuleType | None, str]:
    """The checked module, or None and the reason."""
    try:
        import mlx.core as mx

        module = import_module("._native", __package__)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and str(error.name).endswith("_native")
        return None, "no library: it was installed without a C++ compiler" if missing else f"{error}"
    reason = mismatch(str(getattr(module, "built_for", "")), mx.__version__)
    if not reason and getattr(module, "interface", None) != INTERFACE:
        reason = "a compiled library that belongs to another version of the package; reinstall mlx-spec-cpu"
    if not reason:
        try:
            module.linear(mx.zeros((1, 4)), mx.zeros((1, 4)))
        except TypeError:  # another nanobind: mlx's arrays are strangers to the library
            reason = "a library that does not know this MLX's arrays"
    if reason:
        return None, reason
    module.set_threads(_threads())
    if form := rounded_form():
        module.use_kernels(f"{module.kernels()} {form}")
    return module, ""


def mismatch(built_for: str, found: str) -> str:
    """What is wrong about the two MLX versions, "" when their major and minor numbers agree."""
    if built_for.split(".")[:2] == found.split(".")[:2]:
        return ""
    return f"a library built for MLX {built_for}, while MLX {found} runs"


def _threads() -> int:
    """MLX_SPEC_THREADS within the cpuset; without it every core that the CPU quota keeps busy."""
    from mlx_spec.cores import cpuset_cores, usable_cores
    from mlx_spec.settings import get_settings

    asked = get_settings().threads
    return usable_cores() if asked is None else min(asked, cpuset_cores())
