"""Kernels of plugins in loaded models: which are asked, what is replaced, what is said."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_spec.errors import UsageError
from mlx_spec.kernels import KernelUse, candidates, check_kernels, device_kind, swap_modules, use_kernels
from mlx_spec.registry import Kernel, Register, Registry


class Doubled(nn.Linear):
    """Stands for a layer on a kernel."""


def doubled(module: nn.Module) -> nn.Module | None:
    if type(module) is not nn.Linear:
        return None
    new = Doubled(1, 1)
    new.weight = module.weight
    return new


def kernel(op: str = "linear", device: str = "cpu", **fields: Any) -> Kernel:
    return Kernel(op, (device,), "bitwise", lambda: print, print, **{"swap": doubled, **fields})


def registry(*kernels: Kernel) -> Registry:
    register, found = Register("own", "dist-own"), Registry()
    for record in kernels:
        register.kernel(record)
    found.add(register)
    return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.again = self.first
        self.rest = [nn.Linear(2, 2), (nn.Linear(4, 2), nn.GELU()), {"last": nn.Linear(5, 2)}]


def test_modules_are_replaced_in_attributes_lists_tuples_and_dicts():
    model = Model()
    weights = [model.first.weight, model.rest[0].weight, model.rest[1][0].weight, model.rest[2]["last"].weight]
    assert swap_modules(model, doubled) == (model, 4)
    layers = [model.first, model.rest[0], model.rest[1][0], model.rest[2]["last"]]
    assert all(type(layer) is Doubled for layer in layers) and model.again is model.first
    assert all(layer.weight is weight for layer, weight in zip(layers, weights, strict=True))
    assert type(model.rest[1][1]) is nn.GELU
    assert swap_modules(model, doubled) == (model, 0)


def test_a_lone_layer_is_returned_anew():
    layer = nn.Linear(3, 2)
    new, count = swap_modules(layer, doubled)
    assert type(new) is Doubled and new.weight is layer.weight and count == 1


def test_kernels_are_for_a_device_and_for_layers():
    found = registry(
        kernel("a"), kernel("b", "metal"), kernel("c", swap=None), kernel("d", ready=lambda: (True, "fast"))
    )
    assert [(c.kernel.op, c.owner, c.ok, c.detail) for c in candidates(found, "cpu")] == [
        ("a", "own", True, ""),
        ("d", "own", True, "fast"),
    ]
    assert [c.kernel.op for c in candidates(found, "cpu", ("d",))] == ["d"]
    with pytest.raises(UsageError, match=r"MLX_SPEC_KERNELS: found b, expected on \| off \| a \| d"):
        candidates(found, "cpu", ("a", "b"))


def test_a_question_that_fails_is_an_answer():
    def broken() -> tuple[bool, str]:
        raise OSError("no such library")

    (candidate,) = candidates(registry(kernel(ready=broken)), "cpu")
    assert not candidate.ok and candidate.detail == "OSError: no such library"


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Any:
    """function(value, *kernels): what the next model is loaded with."""

    def choose(value: str, *kernels: Kernel) -> None:
        from mlx_spec import plugins, settings

        class Manager:
            registry = globals()["registry"](*kernels)

            def check_asked(self) -> None:
                """Nothing was asked for by name."""

        monkeypatch.setattr(plugins, "get_manager", Manager)
        monkeypatch.setenv("MLX_SPEC_KERNELS", value)
        settings.reset_settings()

    return choose


def test_what_runs_is_said_in_one_line(plugins: Any) -> None:
    ready = kernel(ready=lambda: (True, "wide"))
    missing = kernel("norm", ready=lambda: (False, "no library"))
    other = replace(kernel("rope"), swap=lambda module: None)
    cases = {
        ("on", (ready,)): "own wide (linear 4)",
        ("off", (ready,)): "mlx (MLX_SPEC_KERNELS=off)",
        ("on", (missing,)): "mlx (plugin own: no library)",
        ("linear", (ready, missing)): "own wide (linear 4)",
        ("on", ()): f"mlx (no kernels for {device_kind()})",
        ("on", (other,)): f"mlx (no layers that suit kernels for {device_kind()})",
        ("rope", (ready, other)): f"mlx (no layers that suit kernels for {device_kind()}: MLX_SPEC_KERNELS=rope)",
    }
    for (value, kernels), line in cases.items():
        plugins(value, *kernels)
        model = Model()
        assert use_kernels(model).line() == line
        assert (type(model.first) is Doubled) is line.startswith("own")


def test_the_variable_that_keeps_kernels_out_is_named(plugins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins("on")
    monkeypatch.setenv("MLX_SPEC_PLUGINS", "gemma4,own")
    line = f"mlx (no kernels for {device_kind()}: MLX_SPEC_PLUGINS lets in only gemma4, own)"
    assert use_kernels(Model()).line() == line


def test_both_models_of_a_pair_in_one_line():
    one, two = KernelUse({"a x": {"linear": 3}}), KernelUse({"a x": {"linear": 2, "norm": 1}, "b": {"rope": 1}})
    assert one.merged(two).line() == "a x (linear 5, norm 1); b (rope 1)"
    assert one.layers == {"a x": {"linear": 3}}
    assert KernelUse().merged(KernelUse(reason="off")).line() == "mlx (off)"


def test_the_device_is_one_of_the_kinds_kernels_name():
    assert device_kind() in ("cpu", "metal", "cuda")
    assert mx.default_device().type != mx.DeviceType.gpu or device_kind() != "cpu"


def test_a_name_nobody_brings_is_refused_before_a_kernel_is_asked(plugins: Any) -> None:
    asked = kernel(ready=lambda: pytest.fail("asked"))
    elsewhere = kernel("far", "metal" if device_kind() == "cpu" else "cpu")
    for name in ("foo", "linear,foo", "far"):
        plugins(name, asked, elsewhere)
        with pytest.raises(
            UsageError, match=r"expected on \| off \| linear\. Correct or unset MLX_SPEC_KERNELS"
        ) as caught:
            check_kernels()
        assert caught.value.code == "U05" and caught.value.found == name.split(",")[-1]
    for name in ("on", "off", "linear"):
        plugins(name, asked, elsewhere)
        check_kernels()


def test_a_part_of_other_kernels_is_told_from_a_name_nobody_brings(plugins: Any) -> None:
    plugins("inner", kernel(), replace(kernel("inner"), swap=None))
    part = "found inner, a part of other kernels that is not chosen by itself, expected on | off | linear. Correct"
    with pytest.raises(UsageError, match=re.escape(part)):
        check_kernels()
