"""Kernels that plugins bring, put into the models that load: which run here, and why not the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import UsageError

if TYPE_CHECKING:
    from .registry import Kernel, Registry

ROUNDED = ("int16", "int8")  # of MLX_SPEC_ACTIVATIONS; a kernel's path that rounds ends so
log = logging.getLogger("mlx_spec.load")

Swap = Callable[[Any], "Any | None"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One kernel of one plugin, and whether it can run on this device.

    Attributes:
        ok: True when it can.
        detail: what runs, e.g. "avx2", or why it cannot run.
        fits: False for a kernel made for other devices than this one.
    """

    owner: str
    kernel: Kernel
    ok: bool
    detail: str
    fits: bool = True


@dataclass(slots=True)
class KernelUse:
    """What runs in the place of mlx's own operations.

    Attributes:
        layers: "owner detail" -> op -> number of layers that were replaced.
        reason: why mlx's own operations run where nothing was replaced; "" when there is nothing to say.
    """

    layers: dict[str, dict[str, int]] = field(default_factory=dict)
    reason: str = ""

    def line(self) -> str:
        """One line: "cpu avx2 (linear 57, rms-norm 29)", or "mlx" and the reason."""
        if not self.layers:
            return f"mlx ({self.reason})" if self.reason else "mlx"
        parts = (
            f"{path} ({', '.join(f'{op} {n}' for op, n in sorted(ops.items()))})" for path, ops in self.layers.items()
        )
        return "; ".join(parts)

    def merged(self, other: KernelUse) -> KernelUse:
        """Both models of a pair in one."""
        layers = {path: dict(ops) for path, ops in self.layers.items()}
        for path, ops in other.layers.items():
            into = layers.setdefault(path, {})
            for op, n in ops.items():
                into[op] = into.get(op, 0) + n
        return KernelUse(layers, self.reason or other.reason)


def device_kind() -> str:
    """Kind of mlx's default device: "cpu", "metal" or "cuda"."""
    import mlx.core as mx

    if mx.default_device().type != mx.DeviceType.gpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def candidates(registry: Registry, device: str, only: tuple[str, ...] | None = None) -> list[Candidate]:
    """Kernels for `device` that replace layers, and whether they can run; `only` names the ops wanted.

    Raises UsageError for a name that no plugin brings.
    """
    return [judge(owner, kernel, device) for owner, kernel in _wanted(registry, device, only)]


def check_kernels() -> None:
    """UsageError for a name in MLX_SPEC_KERNELS that no plugin brings for this device, or a bad variable."""
    from .plugins import get_manager
    from .settings import check_variables

    settings = check_variables()
    if settings is not None and settings.kernels:
        get_manager().check_asked()
        _wanted(get_manager().registry, device_kind(), settings.kernels)


def _wanted(registry: Registry, device: str, only: tuple[str, ...] | None) -> list[tuple[str, Kernel]]:
    """(owner, kernel) of those for `device` that replace layers; `only` names the ops wanted."""
    found = [(owner, kernel) for owner, kernel in registry.kernels() if kernel.swap and device in kernel.backends]
    known = sorted({kernel.op for _, kernel in found})
    unknown = [name for name in only or () if name not in known]
    if unknown:
        inner = any(kernel.op == unknown[0] and not kernel.swap for _, kernel in registry.kernels())
        raise UsageError(
            "MLX_SPEC_KERNELS",
            found=f"{unknown[0]}, a part of other kernels that is not chosen by itself" if inner else unknown[0],
            expected=" | ".join(["on", "off", *known]),
            next_step="Correct or unset MLX_SPEC_KERNELS",
            code="U05",
        )
    return [(owner, kernel) for owner, kernel in found if only is None or kernel.op in only]


def judge(owner: str, kernel: Kernel, device: str) -> Candidate:
    """Ask the kernel whether it can run on `device`; a question that fails is an answer too."""
    if device not in kernel.backends:
        made = f"made for {'/'.join(kernel.backends)}, while MLX runs on {device}"
        return Candidate(owner, kernel, False, made, fits=False)
    try:
        ok, detail = kernel.ready() if kernel.ready is not None else (True, "")
    except Exception as error:  # the plugin's own code
        ok, detail = False, f"{type(error).__name__}: {error}"
    return Candidate(owner, kernel, ok, detail)


def use_kernels(*models: Any) -> KernelUse:
    """Replace what a kernel covers in loaded mlx module trees (or None), in place; weights are shared.

    MLX_SPEC_KERNELS=off leaves everything to mlx; names of ops use only those.
    """
    from .plugins import get_manager
    from .settings import get_settings, plugins_asked

    only = get_settings().kernels
    trees = [model for model in models if model is not None]
    if not trees:
        return KernelUse()
    if only == ():
        return KernelUse(reason="MLX_SPEC_KERNELS=off")
    use, device, usable = KernelUse(), device_kind(), False
    for candidate in candidates(get_manager().registry, device, only):
        if not candidate.ok:
            use.reason = use.reason or f"plugin {candidate.owner}: {candidate.detail}"
            continue
        usable = True
        count = sum(swap_modules(tree, candidate.kernel.swap)[1] for tree in trees)
        if count:
            path = f"{candidate.owner} {candidate.detail}".strip()
            use.layers.setdefault(path, {})[candidate.kernel.op] = count
    if not use.layers and not use.reason:
        asked = f"MLX_SPEC_KERNELS={','.join(only)}" if usable and only else plugins_asked()
        use.reason = f"no {'layers that suit ' if usable else ''}kernels for {device}{f': {asked}' if asked else ''}"
    log.info("kernels: %s", use.line())
    return use


def rounded_form() -> str:
    """What MLX_SPEC_ACTIVATIONS asks rows to be rounded to, "" for nothing."""
    from .settings import get_settings

    form = get_settings().activations
    return form if form in ROUNDED else ""


def unrounded(use: KernelUse, *models: Any) -> str:
    """Why MLX_SPEC_ACTIVATIONS changes nothing here, "" when it does or asks for nothing."""
    form = rounded_form()
    if not form:
        return ""
    asked = f"MLX_SPEC_ACTIVATIONS={form} changes nothing here: found"
    ops = [op for path, counts in use.layers.items() if path.endswith(f" {form}") for op in counts]
    if not {"linear", "experts"} & set(ops):
        return f"{asked} {use.line()}, expected kernels of mlx-spec-cpu for linear layers"
    modules = [module for model in models if model is not None for _, module in model.named_modules()]
    if any(getattr(m, "bits", None) in (4, 8) and getattr(m, "mode", "affine") == "affine" for m in modules):
        return ""
    return f"{asked} no affine weights of 4 or 8 bits (spec convert --q-bits 4 makes such)"


def swap_modules(root: Any, swap: Swap | None) -> tuple[Any, int]:
    """(root, count) after what `swap` returns for a module, if anything, took the place of it.

    A module held in several places is replaced by one and the same module. `root` itself is replaced too, and
    then what is returned is not what was given.
    """
    return _Swapper(swap).run(root) if swap is not None else (root, 0)


class _Swapper:
    """One walk over a module tree."""

    def __init__(self, swap: Swap):
        self.swap = swap
        self.made: dict[int, Any] = {}
        self.kept: list[Any] = []  # identities are only unique among things that live

    def run(self, root: Any) -> tuple[Any, int]:
        return self._module(root), sum(new is not old for new, old in zip(self.made.values(), self.kept, strict=True))

    def _module(self, module: Any) -> Any:
        """What stands in the place of a module; one that stays is searched."""
        if id(module) not in self.made:
            new = self.swap(module)
            self.made[id(module)] = module if new is None else new
            self.kept.append(module)
            if new is None:
                for name, value in list(module.items()):
                    changed = self._value(value)
                    if changed is not value:
                        setattr(module, name, changed)
        return self.made[id(module)]

    def _value(self, value: Any) -> Any:
        """A module or a container of modules with replacements in it; the same object when nothing changed."""
        from mlx import nn

        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, list | tuple):
            items = [self._value(item) for item in value]
            same = all(a is b for a, b in zip(items, value, strict=True))
            return value if same else type(value)(items)
        if isinstance(value, dict):
            entries = {key: self._value(item) for key, item in value.items()}
            return value if all(entries[key] is value[key] for key in entries) else entries
        return value
