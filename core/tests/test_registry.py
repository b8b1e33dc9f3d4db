"""Claims and lookups."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_spec.errors import LoadError, PluginError
from mlx_spec.registry import CORE, Kernel, Register, Registry
from mlx_spec.types import DrafterCard, ModelRef


def registry(*registers: Register) -> Registry:
    made = Registry()
    for register in registers:
        made.add(register)
    return made


def ref(model_type: str) -> ModelRef:
    return ModelRef("x", Path("x"), {"model_type": model_type})


def card(kind: str, extra: str = "") -> DrafterCard:
    return DrafterCard(kind, extra)


def test_owner_of_each_claimed_model_type():
    a = Register("a", "dist-a")
    a.target("alpha", "alpha_text")
    found = registry(a)
    assert found.target_owner("alpha") == found.target_owner("alpha_text") == "a"
    assert found.target_owner("beta") is None
    assert found.model_types() == ("alpha", "alpha_text")


def test_a_contested_model_type_names_both_and_spares_the_rest():
    a, b = Register("a", "dist-a"), Register("b", "dist-b")
    a.target("shared", "mine")
    b.target("shared")
    found = registry(a, b)
    with pytest.raises(PluginError, match="dist-a, dist-b"):
        found.target_owner("shared")
    assert found.target_owner("mine") == "a"
    assert [str(e) for e in found.conflicts("a")] == [str(e) for e in found.conflicts("b")]
    assert len(found.conflicts("a")) == 1


def test_claiming_twice_oneself_is_harmless():
    a = Register("a", "dist-a")
    a.target("alpha", "alpha")
    found = registry(a)
    assert found.target_owner("alpha") == "a" and found.conflicts("a") == []


def test_plugins_share_a_kind_for_different_model_types():
    a, b = Register("a", "dist-a"), Register("b", "dist-b")
    a.drafter("mtp", ["alpha_assistant"])
    b.drafter("mtp", ["beta_assistant"])
    found = registry(a, b)
    assert found.drafter_for(ref("alpha_assistant")) == ("a", DrafterCard("mtp", "alpha_assistant"))
    assert found.drafter_for(ref("beta_assistant"))[0] == "b"
    assert found.drafter_for(ref("gamma")) is None
    assert found.kinds() == ("mtp",) and found.kind_owners("mtp") == ("a", "b")
    assert found.conflicts("a") == []


@pytest.mark.parametrize("second_kind", ["mtp", "dflash"])
def test_a_contested_drafter_model_type(second_kind):
    a, b = Register("a", "dist-a"), Register("b", "dist-b")
    a.drafter("mtp", ["shared"])
    b.drafter(second_kind, ["shared"])
    found = registry(a, b)
    with pytest.raises(PluginError, match="dist-a, dist-b"):
        found.drafter_for(ref("shared"))
    assert len(found.conflicts("b")) == 1


def test_a_contested_kind_without_directory():
    a, b = Register("a", "dist-a"), Register("b", "dist-b")
    a.drafter("lookup")
    b.drafter("lookup")
    with pytest.raises(PluginError, match="dist-a, dist-b"):
        registry(a, b).kind_owner("lookup")
    assert registry(a).kind_owner("lookup") == "a"
    assert registry(a).kind_owner("mtp") is None


def test_detect_decides_inside_its_model_types():
    a = Register("a", "dist-a")
    a.drafter("dflash", ["alpha"], lambda r: card("dflash", "seen") if r.name == "x" else None)
    found = registry(a)
    assert found.drafter_for(ref("alpha")) == ("a", card("dflash", "seen"))
    assert found.drafter_for(ModelRef("y", Path("y"), {"model_type": "alpha"})) is None
    assert found.drafter_for(ref("beta")) is None


def test_an_exact_claim_beats_a_detect_that_takes_everything():
    greedy, exact = Register("greedy", "dist-g"), Register("exact", "dist-e")
    greedy.drafter("mtp", detect=lambda r: card("mtp", "greedy"))
    exact.drafter("mtp", ["alpha"])
    found = registry(greedy, exact)
    assert found.drafter_for(ref("alpha"))[0] == "exact"
    assert found.drafter_for(ref("beta"))[0] == "greedy"


def test_two_detects_that_agree_on_a_directory_are_refused():
    a, b = Register("a", "dist-a"), Register("b", "dist-b")
    a.drafter("mtp", detect=lambda r: card("mtp"))
    b.drafter("dflash", detect=lambda r: card("dflash"))
    found = registry(a, b)
    with pytest.raises(PluginError, match="dist-a, dist-b"):
        found.drafter_for(ref("alpha"))
    assert found.drafter_for(ref("alpha"), kind="dflash") == ("b", card("dflash"))


def test_core_is_asked_last():
    core, a = Register(CORE, "mlx-spec"), Register("a", "dist-a")
    core.drafter("full-model", detect=lambda r: card("full-model"))
    a.drafter("mtp", detect=lambda r: card("mtp") if r.model_type == "alpha" else None)
    found = registry(core, a)
    assert found.drafter_for(ref("alpha"))[0] == "a"
    assert found.drafter_for(ref("beta"))[0] == CORE


def fails(error: Exception):
    def detect(_: ModelRef) -> DrafterCard | None:
        raise error

    return detect


def test_a_failing_detect_costs_nobody_else_and_is_logged_once(caplog):
    a, b = Register("a", "dist-a"), Register("b", "dist-b")
    a.drafter("mtp", detect=fails(ZeroDivisionError("boom")))
    b.drafter("dflash", detect=lambda r: card("dflash"))
    found = registry(a, b)
    assert [found.drafter_for(ref("alpha"))[0] for _ in range(3)] == ["b", "b", "b"]
    assert [r.getMessage().count("ZeroDivisionError: boom") for r in caplog.records] == [1]


def test_a_failing_detect_speaks_for_its_own_model_types():
    a = Register("a", "dist-a")
    a.drafter("mtp", ["alpha"], fails(ZeroDivisionError("boom")))
    a.drafter("mtp", ["gamma"], fails(LoadError("f", found="1", expected="2", next_step="Do")))
    found = registry(a)
    with pytest.raises(PluginError, match="dist-a"):
        found.drafter_for(ref("alpha"))
    with pytest.raises(LoadError):
        found.drafter_for(ref("gamma"))
    assert found.drafter_for(ref("beta")) is None


def test_kernels_keep_their_owner():
    a = Register("a", "dist-a")
    kernel = Kernel("rows", ("metal",), "bitwise", lambda: print, print)
    a.kernel(kernel)
    found = registry(a)
    assert found.kernels() == found.kernels("rows") == [("a", kernel)]
    assert found.kernels("other") == []


def test_demos_keep_their_owner():
    a = Register("a", "dist-a")
    a.demo("small", Path("t"), Path("d"))
    (demo,) = registry(a).demos()
    assert (demo.name, demo.owner, demo.target, demo.drafter) == ("small", "a", Path("t"), Path("d"))


def test_demos_are_sorted_by_plugin_and_keep_the_order_within_one():
    b, a = Register("b", "dist-b"), Register("a", "dist-a")
    b.demo("one", Path("t"), Path("d"))
    a.demo("z", Path("t"), Path("d"))
    a.demo("y", Path("t"), Path("d"))
    assert [demo.name for demo in registry(b, a).demos()] == ["z", "y", "one"]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda r: r.target(""),
        lambda r: r.target(None),
        lambda r: r.drafter("mtp", [3]),
        lambda r: r.drafter(""),
        lambda r: r.kernel(object()),
    ],
)
def test_wrong_claims_name_the_distribution(wrong):
    with pytest.raises(PluginError, match="dist-a"):
        wrong(Register("a", "dist-a"))


def test_one_model_type_as_a_plain_string_is_one_name():
    a = Register("a", "dist-a")
    a.drafter("mtp", "alpha")
    assert registry(a).drafter_for(ref("alpha"))[0] == "a"
