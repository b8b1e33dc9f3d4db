"""A target directory that carries a drafter of its own: how it is recognised, asked for and refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import tinymodels

from mlx_spec.errors import NoEmbeddedMtpHead, UsageError
from mlx_spec.inspection import inspect
from mlx_spec.loading import DrafterChoice, choose_drafter, load_target, open_ref

PLUGIN = """
from mlx_spec import DrafterCard, hookimpl
from mlx_spec.checkpoint import tensor_index

def detect(ref):
    return DrafterCard("mtp", "llama") if "mtp.fc.weight" in tensor_index(ref.path) else None

@hookimpl
def spec_register(register):
    register.target("llama")
    register.drafter("mtp", model_types=["llama"], detect=detect, options=["depth"])
"""


@pytest.fixture
def folder(site, tmp_path):
    """folder(name, head=...): a tiny llama or gemma3 directory, with the plugin installed that reads such heads."""
    site.install("fake-heads", "heads", PLUGIN)

    def write(name: str, head: bool = True, config: str = "llama") -> Path:
        import mlx.core as mx

        path = tinymodels.write_model(tmp_path / name, config)
        if head:
            weights = mx.load(str(path / "model.safetensors"))
            weights["mtp.fc.weight"] = mx.zeros((3, 5))
            tinymodels.write_weights(path, weights)
        return path

    return write


def choose(target: Path, drafter: Path | None, kind: str | None) -> DrafterChoice | None:
    return choose_drafter(str(drafter) if drafter else None, kind, {}, open_ref(str(target)))


def test_a_kind_without_a_directory_means_the_targets_own_head(folder):
    target = folder("a")
    choice = choose(target, None, "mtp")
    assert (choice.kind, choice.ref.path, choice.owner, choice.decided_by) == ("mtp", target, "heads", "--draft-kind")


@pytest.mark.parametrize("kind", [None, "mtp"])
def test_the_same_directory_twice_means_the_same(folder, kind):
    target = folder("a")
    choice = choose(target, target, kind)
    assert (choice.kind, choice.ref.path, choice.owner) == ("mtp", target, "heads")


def test_the_head_of_another_checkpoint_serves_a_converted_target(folder):
    target, original = folder("converted", head=False), folder("original")
    choice = choose(target, original, None)
    assert (choice.kind, choice.ref.path) == ("mtp", original)


def test_a_whole_model_can_still_be_a_full_model_drafter(folder):
    whole, other = folder("whole"), folder("other", head=False, config="gemma3")
    assert choose(folder("target"), whole, "full-model").kind == "full-model"
    assert choose(other, whole, None).kind == "full-model"  # the head belongs to another family
    assert choose(other, whole, "mtp").kind == "mtp"  # asked for by name: left to spec_validate_pair


def test_without_head_tensors_the_error_says_so(folder):
    target = folder("a", head=False)
    for drafter in (None, target):
        with pytest.raises(NoEmbeddedMtpHead, match="no head tensors, expected a head that an installed plugin reads"):
            choose(target, drafter, "mtp")


def test_the_error_says_what_was_promised_and_what_to_do(folder):
    import json

    target = folder("a", head=False)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 2}))
    with pytest.raises(NoEmbeddedMtpHead) as caught:
        choose(target, None, "mtp")
    assert "config.json declares 2 layers" in str(caught.value)
    for step in ("spec convert --keep-mtp", "spec split-mtp", "--draft-model"):
        assert step in caught.value.next_step


def test_extracting_a_head_is_advised_only_where_there_can_be_one(folder):
    """By what the installed plugins read: of other families no checkpoint has a head that could be used."""
    steps = []
    for target in (folder("a", head=False), folder("b", head=False, config="gemma3")):
        with pytest.raises(NoEmbeddedMtpHead) as caught:
            choose(target, None, "mtp")
        steps.append(caught.value.next_step)
    assert "spec split-mtp" in steps[0]
    assert steps[1] == (
        "No installed plugin drafts for model_type gemma3_text with a head: choose the kind prompt-lookup, which "
        "needs no files, or give --draft-model DIR of a smaller model with the same tokenizer"
    )


@pytest.mark.parametrize("stem", ["model-mtp-head", "mtp"])
@pytest.mark.parametrize("prefix", ["mtp.", ""])
def test_a_head_in_a_file_of_its_own_is_no_part_of_the_model(folder, stem, prefix):
    import mlx.core as mx

    from mlx_spec.checkpoint import fingerprint, head_index, tensor_index

    target = folder("a", head=False)
    before = tensor_index(target).keys(), fingerprint(target)
    mx.save_safetensors(str(target / f"{stem}.safetensors"), {f"{prefix}fc.weight": mx.zeros((3, 5))})
    assert tensor_index(target).keys() == before[0] and list(head_index(target)) == [f"{prefix}fc.weight"]
    assert fingerprint(target) != before[1]
    assert load_target(open_ref(str(target))).vocab_size == 131
    (head,) = inspect(str(target)).heads
    assert (head.prefix, head.tensors) == ("mtp", 1)
    with pytest.raises(NoEmbeddedMtpHead, match="tensors under mtp"):  # the plugin here looks into the shards only
        choose(target, None, "mtp")


def test_options_a_drafter_does_not_read_are_refused(folder):
    ref = open_ref(str(folder("a")))
    assert choose_drafter(None, "mtp", {"depth": 3}, ref).card.extra == {"depth": 3}
    with pytest.raises(UsageError, match="option min_n: found 4 for a drafter of kind mtp, expected .*: depth"):
        choose_drafter(None, "mtp", {"min_n": 4}, ref)
    assert choose_drafter(None, "prompt-lookup", {"min_n": 4}, ref).card.extra == {"min_n": 4}
    with pytest.raises(UsageError, match="for a drafter of kind full-model, expected one that this kind reads: none"):
        choose_drafter(str(ref.path), "full-model", {"min_n": 4}, ref)


def test_head_tensors_nobody_reads_are_named(tmp_path):
    import mlx.core as mx

    path = tinymodels.write_model(tmp_path / "a", "gemma3")
    weights = mx.load(str(path / "model.safetensors")) | {"model.mtp.fc.weight": mx.zeros((3, 5))}
    tinymodels.write_weights(path, weights)
    with pytest.raises(NoEmbeddedMtpHead, match=r"tensors under model\.mtp, which no installed plugin reads"):
        choose(path, None, "mtp")


def test_other_kinds_still_need_a_directory(folder):
    with pytest.raises(UsageError, match="one for --draft-kind full-model"):
        choose(folder("a"), None, "full-model")


def test_inspect_calls_it_a_target_and_says_how_to_use_the_head(folder):
    report = inspect(str(folder("a")))
    assert (report.kind, report.owner, report.embedded, report.card) == ("target", "heads", "mtp", None)
    fit = next(f for f in report.drafters if f.source.startswith("in this checkpoint"))
    assert fit.reason == "1 tensors; use it with --draft-kind mtp"
    assert inspect(str(folder("b", head=False))).embedded == ""


def test_it_still_loads_as_a_target(folder):
    assert load_target(open_ref(str(folder("b", head=False)))).vocab_size == 131


def test_a_drafter_name_that_means_nothing_is_told_by_its_flag(folder):
    ref = open_ref(str(folder("a")))
    for name in ("demo:nosuch", "https://host/a"):
        with pytest.raises(UsageError, match=r"^--draft-model: found .*" + name.split(":")[1]):
            choose_drafter(name, None, {}, ref)
        with pytest.raises(UsageError, match=r"^MLX_SPEC_DRAFT_MODEL: found "):
            choose_drafter(name, None, {}, ref, name_from="MLX_SPEC_DRAFT_MODEL")
