"""`spec inspect` on drafter heads, stage by stage; families' own stages are tested with their plugins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_split_head import heads, ref, write_source  # noqa: F401 - heads is a fixture for every test

from mlx_spec import settings
from mlx_spec.conversion.head import split
from mlx_spec.diskcache import write_entry
from mlx_spec.head_stages import FAMILY_STAGES, own_stages, verdict_stage
from mlx_spec.inspection import inspect
from mlx_spec.probe import AREA, POINTERS, _files_key, environment, remembered
from mlx_spec.tuned import Tuned, forget_tuned, write_tuned
from mlx_spec.types import ExactnessReport

NAMES = ["declared", "tensors", *FAMILY_STAGES, "trunk", "probe"]
TELLING = """

@hookimpl
def spec_inspect_head(target, drafter, card):
    from mlx_spec.head_stages import Stage
    return [Stage("shapes", "ok", "they fit"), Stage("norms", "no", "strange ones", "Take others")]
"""


@pytest.fixture
def source(tmp_path) -> Path:
    return write_source(tmp_path / "source", whole=True)


def states(stages) -> dict[str, str]:
    return {stage.name: stage.state for stage in stages}


def edit(path: Path, **values: object) -> None:
    config = {**json.loads((path / "config.json").read_text()), **values}
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_a_model_without_a_head_has_no_stages(tmp_path):
    bare = write_source(tmp_path / "bare", head=False, mtp_num_hidden_layers=0)
    assert own_stages(ref(bare)) == [] == inspect(str(bare)).stages


def test_every_stage_is_there_with_a_reason_and_a_next_step(source):
    stages = own_stages(ref(source))
    assert [stage.name for stage in stages] == NAMES
    assert all(stage.reason and stage.next_step for stage in stages)
    assert states(stages) == {
        "declared": "ok", "tensors": "ok", "shapes": "ok", "norms": "open", "quantisation": "open", "trunk": "ok",
        "probe": "open",
    }  # fmt: skip
    assert "plugin heads finds nothing wrong" in stages[2].reason  # it tells no stages: its pair checks are asked
    assert "Run spec probe -m" in stages[-1].next_step and "--draft-kind mtp" in stages[-1].next_step


def test_a_promise_without_tensors_stops_there(tmp_path):
    stages = own_stages(ref(write_source(tmp_path / "bare", head=False)))
    assert states(stages) == dict.fromkeys(NAMES, "open") | {"declared": "ok", "tensors": "no"}
    assert stages[1].reason == "none, where config.json declares 1 layer"
    assert all("spec convert --keep-mtp" in stage.next_step for stage in stages[1:])


def test_tensors_without_a_promise(source):
    edit(source, mtp_num_hidden_layers=None)
    first = own_stages(ref(source))[0]
    assert first.state == "no" and "tensors under mtp" in first.reason and "mtp_num_hidden_layers" in first.next_step


def test_a_head_that_is_not_whole(source):
    edit(source, mtp_num_hidden_layers=2)
    stage = own_stages(ref(source))[1]
    assert stage.state == "no" and stage.reason == "1 layer, expected 2 layers, as config.json declares (C03)"


def test_without_a_plugin_the_familys_stages_are_open(source, monkeypatch):
    from mlx_spec import plugins

    monkeypatch.setenv("MLX_SPEC_PLUGINS", "heads")
    edit(source, model_type="unheard_of")
    plugins.reset()
    stages = own_stages(ref(source))
    assert states(stages)["shapes"] == "open" and "no installed plugin reads heads" in stages[2].reason
    assert stages[2].next_step == "Install the family's plugin"


def test_a_plugins_own_stages_are_shown_and_one_that_fails_blocks_the_probe(source, site):
    from mlx_spec import plugins

    module = site.folder / "fake_heads_plugin.py"
    module.write_text(module.read_text() + TELLING)
    plugins.reset()
    stages = {stage.name: stage for stage in own_stages(ref(source))}
    assert stages["shapes"].reason == "they fit"
    assert (stages["norms"].state, stages["norms"].next_step) == ("no", "Take others")
    assert stages["quantisation"].state == "open" and "does not tell" in stages["quantisation"].reason
    assert stages["probe"].reason == "not possible: norms" and stages["probe"].next_step == "Take others"


def test_a_directory_of_its_own_is_told_for_the_target(source, tmp_path):
    head = split(ref(source), tmp_path / "head").out
    (fit,) = [d for d in inspect(str(source), [str(head)]).drafters if d.source == str(head)]
    assert [stage.name for stage in fit.stages] == NAMES and fit.fits
    other = write_source(tmp_path / "other", seed=9, whole=True)
    (fit,) = [d for d in inspect(str(other), [str(head)]).drafters if d.source == str(head)]
    assert not fit.fits and states(fit.stages)["trunk"] == "no" and states(fit.stages)["probe"] == "open"
    assert "another trunk than recorded" in fit.reason


# -- the remembered verdict --------------------------------------------------------------------------------


def remember(path: Path, **changes: object) -> None:
    values = {"level": "bitwise", "width": 3, "asked_width": 3, "rows": 5, "key": "k", "environment": environment()}
    report = {**values, "min_top2_gap": 0.5, **changes}
    write_entry(AREA, "memo", report)
    write_entry(POINTERS, _files_key(ref(path), ref(path)), {"memo": "memo", "key": "k", "block_size": 3})


def test_a_verdict_is_remembered_by_the_files(source):
    edit(source, block_size=3)
    assert remembered(ref(source), ref(source)) is None
    remember(source)
    assert remembered(ref(source), ref(source)).level == "bitwise"
    stage = own_stages(ref(source))[-1]
    assert (stage.state, stage.reason) == ("ok", "bitwise at L=3 of L=3 (memo)")
    edit(source, bos_token_id=7)  # other files: nothing is known about them
    assert remembered(ref(source), ref(source)) is None


@pytest.mark.parametrize(
    ("variable", "value"), [("KERNELS", "linear"), ("ACTIVATIONS", "int8"), ("PLUGINS", "gemma4,qwen35")]
)
def test_a_verdict_belongs_to_the_kernels_that_were_asked_for(source, monkeypatch, variable, value):
    remember(source)
    with monkeypatch.context() as changed:
        changed.setenv(f"MLX_SPEC_{variable}", value)
        settings.reset_settings()
        assert remembered(ref(source), ref(source)) is None
    settings.reset_settings()
    assert remembered(ref(source), ref(source)).level == "bitwise"


def test_the_verdict_told_is_that_of_the_width_that_runs_now(source, monkeypatch):
    """Not the newest one: spec tune proves its widest L, and stores another, or forgets it again."""
    key = "0f" * 16
    for width, level in ((6, "greedy"), (3, "bitwise")):
        report = {"level": level, "width": width, "asked_width": width, "rows": 5, "key": key, "min_top2_gap": 0.5}
        write_entry(AREA, f"{key}-L{width}-greedy", report | {"environment": environment()})
    newest = {"memo": f"{key}-L6-greedy", "key": key, "block_size": 6}
    write_entry(POINTERS, _files_key(ref(source), ref(source)), newest)

    def told() -> tuple[str, str]:
        settings.reset_settings()
        stage = own_stages(ref(source))[-1]
        return stage.state, stage.reason

    write_tuned(key, Tuned(3, 1.5, "2026-01-02T00:00:00Z"))
    assert told() == ("ok", "bitwise at L=3 of L=3 (memo)")
    assert forget_tuned(key)
    assert told() == ("open", "greedy at L=6 of L=6 (memo); no verdict yet at L=4, which runs now")
    assert "Run spec probe -m" in own_stages(ref(source))[-1].next_step
    monkeypatch.setenv("MLX_SPEC_DRAFT_BLOCK_SIZE", "6")
    assert told() == ("ok", "greedy at L=6 of L=6 (memo)")


@pytest.mark.parametrize(
    "changes", [{"environment": {"mlx": "0.0"}}, {"key": "other"}, {"level": "perfect"}, {"width": 9}]
)
def test_a_verdict_of_other_versions_or_a_damaged_one_is_none(source, changes):
    remember(source, **changes)
    assert remembered(ref(source), ref(source)) is None


@pytest.mark.parametrize(
    ("level", "width", "state", "text"),
    [
        ("bitwise", 3, "ok", "bitwise at L=3 of L=3"),
        ("greedy", 2, "ok", "it drafts with L=2"),
        ("distribution", 3, "no", "--exactness distribution"),
        ("unproven", 1, "no", "Decode plainly"),
    ],
)
def test_what_a_verdict_means(level, width, state, text):
    stage = verdict_stage(ExactnessReport(level, width, 3, reason="rows differ" if width < 3 else ""))
    assert stage.state == state and text in f"{stage.reason} {stage.next_step}"
