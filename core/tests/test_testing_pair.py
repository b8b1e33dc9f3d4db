"""PairContract on plugins that pair badly: each kind of sloppiness is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_spec.testing import ContractFault, Mutation, PairContract, TinyPair

PLUGIN = """
from mlx_spec import Finding, hookimpl
from mlx_spec.types import DrafterCard

@hookimpl
def spec_register(register):
    register.drafter("toy", model_types=("toy_head",))

@hookimpl
def spec_load_drafter(ref, card, target):
    from mlx_spec.testing import ScriptedDrafter
    return ScriptedDrafter(lambda tokens, k: [tokens[-1]] * k, kind="toy") if card.kind == "toy" else None

@hookimpl
def spec_validate_pair(target, drafter, card):
    if card.kind != "toy":
        return None
    out = []
    theirs, mine = target.config, drafter.config
    for key in CHECKED:
        if mine[key] != theirs[key]:
            out.append(Finding("T01", "error", key, SAY(mine[key]), SAY(theirs[key]), "Pair them otherwise"))
    if mine["layers"] > 4:
        out.append(Finding("T02", "warning", "layers", str(mine["layers"]), "at most 4", "Expect it to be slow"))
    BODY
    return out
"""
CONFIG = {
    "model_type": "toy_head",
    "hidden_size": 48,
    "vocab_size": 283,
    "rope": {"theta": 1e4},
    "layers": 2,
    "dtype": "float32",
}


class Toy(PairContract):
    """A drafter without weights: without its model_type it is nothing but an empty folder."""

    mutations = {
        "layers": Mutation(9, ("9", "at most 4"), severity="warning"),
        "model_type": Mutation("toy_other", ("no weights",)),
    }
    free = {"rope.*": "not read"}


@pytest.fixture
def pair(site, tmp_path: Path):
    """pair(checked fields, how values are said, body): the tiny llama and a toy head, with the plugin installed."""
    from mlx_spec.testing import write_tiny

    def make(checked: tuple[str, ...], say: str = "str", body: str = "pass") -> TinyPair:
        source = PLUGIN.replace("CHECKED", repr(checked)).replace("SAY", say).replace("BODY", body)
        site.install("mlx-spec-toy", "toy", source)
        head = tmp_path / "head"
        head.mkdir()
        (head / "config.json").write_text(json.dumps(CONFIG))
        return TinyPair(write_tiny("llama", tmp_path / "llama", 1).target, head)

    return make


def refused(folders: TinyPair, tmp_path: Path, contract: type[PairContract] = Toy) -> str:
    """What the contract says about changed fields, "" when all is well."""
    try:
        contract().test_every_changed_field_is_refused_by_both_values(folders, tmp_path / "changed")
    except ContractFault as fault:
        return str(fault)
    return ""


def test_a_careful_pairing_passes(pair, tmp_path: Path) -> None:
    folders = pair(("hidden_size", "vocab_size"))
    assert refused(folders, tmp_path) == ""
    Toy().test_a_sound_pair_has_no_errors(folders)
    Toy().test_declared_fields_exist(folders)


def test_a_field_nobody_compares_is_named(pair, tmp_path: Path) -> None:
    text = refused(pair(("hidden_size",)), tmp_path)
    assert "pairs with one wrong field in the drafter's config.json (1 of 4 fields)" in text
    assert "vocab_size: 566 instead of 283 was accepted" in text
    assert "A field that may differ goes into `free` with the reason" in text


def test_a_message_without_the_values_is_named(pair, tmp_path: Path) -> None:
    text = refused(pair(("hidden_size", "vocab_size"), say="(lambda value: 'another size')"), tmp_path)
    assert "hidden_size = 96: the message does not name 96 and 48" in text


def test_an_exception_instead_of_a_message_is_named(pair, tmp_path: Path) -> None:
    body = "len(None) if mine['vocab_size'] != 283 else None"
    text = refused(pair(("hidden_size",), body=body), tmp_path)
    assert "vocab_size: 566 instead of 283 was accepted" in text  # core logs it and goes on; nobody refused


def test_a_warning_that_is_not_given_is_named(pair, tmp_path: Path) -> None:
    class Strict(Toy):
        mutations = {**Toy.mutations, "layers": Mutation(3, ("3",), severity="warning")}

    text = refused(pair(("hidden_size", "vocab_size")), tmp_path, Strict)
    assert "layers = 3: the message does not name 3: nothing was said" in text


def test_a_sound_pair_that_is_refused_is_named(pair) -> None:
    folders = pair(("hidden_size",), body="out.append(Finding('T03', 'error', 'toy', 'it', 'another', 'Go away'))")
    with pytest.raises(Exception, match="toy: found it, expected another"):
        Toy().test_a_sound_pair_has_no_errors(folders)


def test_misspelt_and_unreasoned_declarations_are_named(pair) -> None:
    folders = pair(("hidden_size", "vocab_size"))

    class Misspelt(Toy):
        free = {"hiden_size": "a slip"}

    class Silent(Toy):
        free = {"layers": " "}

    with pytest.raises(ContractFault, match=r"field 'hiden_size' of .*no such field .*one of model_type, hidden_size"):
        Misspelt().test_declared_fields_exist(folders)
    with pytest.raises(ContractFault, match=r"no reason for \['layers'\]"):
        Silent().test_declared_fields_exist(folders)


def test_a_stranger_is_asked_for_unless_none_is_named() -> None:
    from mlx_spec.testing import DrafterContract
    from mlx_spec.testing.plugin import _gives

    class Anyone(Toy):
        stranger = None

    class Mine(DrafterContract):
        pass

    assert _gives(Toy, "stranger") and not _gives(Anyone, "stranger")
    assert not _gives(Mine, "reference_draft") and not _gives(Mine, "least_acceptance")
