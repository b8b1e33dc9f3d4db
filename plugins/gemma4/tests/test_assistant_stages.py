"""What `spec inspect` tells of an assistant, and the next steps that fit a drafter trained apart."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_spec.errors import NoEmbeddedMtpHead
from mlx_spec.head_stages import Stage
from mlx_spec.inspection import inspect
from mlx_spec.pair import load


def stages(dirs: Any) -> dict[str, Stage]:
    target, drafter = map(str, dirs)
    (fit,) = [fit for fit in inspect(target, [drafter]).drafters if fit.source == drafter]
    return {stage.name: stage for stage in fit.stages}


def test_a_sound_assistant_is_told_stage_by_stage(pair_dirs: Any) -> None:
    found = stages(pair_dirs("E"))
    assert [found[name].state for name in ("shapes", "norms", "quantisation")] == ["ok"] * 3
    assert found["shapes"].reason == "4 layers of width 32, reading the target's K/V"
    assert found["quantisation"].reason == "F32; used as stored"
    packed = stages(pair_dirs("E", quantise=4))["quantisation"]
    assert packed.state == "ok" and "matrices in 4 bits in groups of 32" in packed.reason


def test_no_record_of_a_trunk_is_expected_of_one(pair_dirs: Any) -> None:
    found = stages(pair_dirs("E"))
    assert found["trunk"].state == "open" and "trained apart" in found["trunk"].reason
    assert not any("split-mtp" in stage.next_step for stage in found.values())


def test_what_does_not_fit_is_told_by_its_stage(edited: Any) -> None:
    found = stages(edited("E", drafter={"backbone_hidden_size": 40}))
    assert found["shapes"].state == "no" and "backbone_hidden_size 40" in found["shapes"].reason
    assert found["shapes"].reason.endswith("more)") and found["quantisation"].state == "ok"


def test_a_packing_that_is_not_the_declared_one_has_its_own_stage(edited: Any) -> None:
    found = stages(edited("E", quantise=4, drafter={"quantization.bits": 8, "quantization.group_size": 64}))
    assert found["shapes"].state == "ok" and found["quantisation"].state == "no"
    assert "8 bit in groups of 64, as config.json says" in found["quantisation"].reason


def test_a_target_asked_to_draft_for_itself_is_sent_to_its_assistants(pair_dirs: Any) -> None:
    for name, step in ((str(pair_dirs("E")[0]), "model_type gemma4_assistant"), ("demo:gemma4", "pass demo:gemma4 as")):
        with pytest.raises(NoEmbeddedMtpHead) as caught:
            load(name, kind="mtp")
        assert step in caught.value.next_step and "split-mtp" not in str(caught.value)
