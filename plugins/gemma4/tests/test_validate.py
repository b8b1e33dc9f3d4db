"""Every way a pair can be wrong is found from files, and the message names both sides and both values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gemma4_oracles.ours import open_ref

from mlx_spec.errors import Finding, LoadError
from mlx_spec.types import DrafterCard
from mlx_spec_gemma4 import plugin
from mlx_spec_gemma4.tiny import VARIANTS


def findings(dirs: tuple[Path, Path]) -> list[Finding]:
    """What the hook says about the pair in these directories."""
    target, drafter = map(open_ref, dirs)
    return plugin.spec_validate_pair(target=target, drafter=drafter, card=plugin.detect(drafter)) or []


@pytest.mark.parametrize(
    "options", [{}, {"ordered": True}, {"tied": False}, {"quantise": 4}, {"quantise": 8, "ordered": True}], ids=str
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_sound_pairs_have_no_findings(pair_dirs: Any, variant: str, options: Any) -> None:
    assert findings(pair_dirs(variant, **options)) == []


TEXT = "text_config."


def rope(full: dict[str, Any] | None = None, sliding: dict[str, Any] | None = None) -> dict[str, Any]:
    """Changed rotations of a drafter."""
    whole = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    window = {"rope_type": "default", "rope_theta": 1e4}
    return {
        TEXT + "rope_parameters": {
            "full_attention": {**whole, **(full or {})},
            "sliding_attention": {**window, **(sliding or {})},
        }
    }


# code, changes to the drafter's config.json, what it is about; that both values are named is in test_conformance.py
MUTATIONS = [
    ("GM11", {"backbone_hidden_size": 48}, "hidden size"),
    ("GM12", {TEXT + "vocab_size": 256}, "vocab_size"),
    ("GM14", {TEXT + "head_dim": 32}, "head width (sliding_attention)"),
    ("GM14", {TEXT + "global_head_dim": 64}, "head width (full_attention)"),
    ("GM15", {TEXT + "num_attention_heads": 5}, "heads (sliding_attention)"),
    ("GM16", rope(full={"rope_theta": 5e5}), "rope_theta (full_attention)"),
    ("GM16", rope(full={"partial_rotary_factor": 0.5}), "partial_rotary_factor (full_attention)"),
    ("GM16", rope(full={"rope_type": "default"}), "rope_type (full_attention)"),
    ("GM16", rope(sliding={"rope_theta": 2e4}), "rope_theta (sliding_attention)"),
    ("GM16", rope(full={"factor": 8.0}), "factor (full_attention)"),
    ("GM16", rope(full={"original_max_position_embeddings": 9}), "original_max_position_embeddings (full_attention)"),
    ("GM17", {TEXT + "sliding_window": 16}, "sliding_window"),
    ("GM24", {TEXT + "max_position_embeddings": 2048}, "max_position_embeddings"),
]


@pytest.mark.parametrize(("code", "changes", "what"), MUTATIONS, ids=[f"{m[0]}-{m[2]}" for m in MUTATIONS])
def test_a_field_that_does_not_fit_has_its_code_and_names_both_sides(
    edited: Any, code: str, changes: Any, what: str
) -> None:
    found = [f for f in findings(edited("E", drafter=changes)) if f.code == code]
    assert len(found) == (2 if code == "GM15" else 1)  # heads are one number for both layer types
    assert found[0].subject == f"{what} of drafter drafter and target target"
    assert found[0].severity == ("warning" if code == "GM24" else "error")


@pytest.mark.parametrize(
    "changes",
    [{"full": {"factor": 1}}, {"full": {"factor": 1.0, "mscale": None}}, {"sliding": {"factor": 8.0}}],
    ids=str,
)
def test_a_scaling_that_changes_nothing_is_no_difference(edited: Any, changes: dict[str, Any]) -> None:
    assert findings(edited("E", drafter=rope(**changes))) == []


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("hidden_size_per_layer_input", 8, "0"),
        ("vocab_size_per_layer_input", 320, "0"),
        ("enable_moe_block", True, "False"),
        ("use_double_wide_mlp", True, "False"),
        ("num_kv_shared_layers", 3, "4"),
    ],
)
def test_what_every_assistant_has_in_common(edited: Any, key: str, value: Any, expected: str) -> None:
    found = [f for f in findings(edited("E", drafter={TEXT + key: value})) if f.code == "GM18"]
    assert [(f.found, f.expected) for f in found] == [(str(value), f"{expected} in an assistant")]
    assert key in found[0].subject


def test_a_softcap_of_the_drafter_is_said_to_be_ignored(edited: Any) -> None:
    key = TEXT + "final_logit_softcapping"
    (found,) = findings(edited("E", drafter={key: 30.0}))
    assert (found.code, found.severity) == ("GM25", "warning")
    assert "30, which is ignored" in found.found and "drafter drafter" in found.subject
    for none in (None, 0.0, ...):
        assert findings(edited("E", drafter={key: none})) == []


def test_other_family_is_refused_by_both_names(pair_dirs: Any) -> None:
    (found,) = findings((pair_dirs("UNI")[0], pair_dirs("E")[1]))
    assert found.code == "GM10"
    assert "'gemma4_unified' with drafter model_type 'gemma4_assistant'" in found.found
    assert found.expected == "a target of model_type gemma4 or gemma4_text"
    (found,) = findings((pair_dirs("D31")[0], pair_dirs("UNI")[1]))
    assert found.expected == "a target of model_type gemma4_unified or gemma4_unified_text"


def test_a_layer_type_the_target_does_not_store(edited: Any) -> None:
    changes = {"layer_types": ["full_attention"] * 8}
    found = [f for f in findings(edited("E", target=changes)) if f.code == "GM13"]
    assert [f.found for f in found] == ["a sliding_attention layer in the drafter"]
    assert "only full_attention layers" in found[0].expected


@pytest.mark.parametrize(
    ("changes", "found", "expected"),
    [
        ({"num_centroids": 15}, "num_centroids 15", "a divisor of vocab_size 320"),
        ({"centroid_intermediate_top_k": 17}, "centroid_intermediate_top_k 17", "at most num_centroids 16"),
    ],
)
def test_centroid_head_must_split_the_vocabulary(edited: Any, changes: Any, found: str, expected: str) -> None:
    hits = [f for f in findings(edited("E", drafter=changes, ordered=True)) if f.code == "GM19"]
    assert [(f.found, f.expected) for f in hits] == [(found, expected)]


def test_tensors_are_checked_from_headers(edited: Any) -> None:
    found = findings(edited("E", drafter={"use_ordered_embeddings": True}))
    assert [f.code for f in found] == ["GM20"]
    assert "masked_embedding.centroids.weight" in found[0].found
    found = findings(edited("E", drafter={TEXT + "intermediate_size": 64}))
    assert {f.code for f in found} == {"GM21"}
    assert any("[48, 32]" in f.found and "[64, 32]" in f.expected for f in found)


def test_quantisation_must_be_the_declared_one(edited: Any) -> None:
    table = {"group_size": 32, "bits": 8, "mode": "affine"}
    found = findings(edited("E", drafter={"quantization": table}, quantise=4))
    assert found
    assert {f.code for f in found} == {"GM22"}
    assert "4 bit in groups of 32" in found[0].found
    assert "8 bit in groups of 32" in found[0].expected
    found = findings(edited("E", drafter={"quantization": ...}, quantise=4))
    assert {f.code for f in found} == {"GM22"}
    assert "a quantization entry" in found[0].expected


def test_an_unreadable_config_is_a_load_error(edited: Any) -> None:
    dirs = edited("E", drafter={"backbone_hidden_size": "64"})
    with pytest.raises(
        LoadError, match=r"backbone_hidden_size in config.json of .*found str '64', expected a valid integer"
    ):
        findings(dirs)


def test_all_faults_are_listed_at_once(edited: Any) -> None:
    dirs = edited("E", drafter={"backbone_hidden_size": 48, TEXT + "sliding_window": 4, TEXT + "global_head_dim": 64})
    codes = {f.code for f in findings(dirs)}
    assert {"GM11", "GM14", "GM17", "GM21"} <= codes


def test_other_kinds_are_not_ours(pair_dirs: Any) -> None:
    target, drafter = map(open_ref, pair_dirs("E"))
    assert plugin.spec_validate_pair(target=target, drafter=drafter, card=DrafterCard("full-model", "llama")) is None
