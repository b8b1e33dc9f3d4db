"""`spec bench` end to end on a tiny target: alternation, fresh prompts, equal tokens, confirmed paths, files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from pairs import make_pair, tiny_target
from tinymodels import LLAMA, write_model, write_tokenizer

from mlx_spec.cli import bench as command_module
from mlx_spec.cli import cli
from mlx_spec.cli.output import Steps
from mlx_spec.testing.drafters import ScriptedDrafter, empty
from mlx_spec.tokenizer import load_tokenizer

CONFIG = LLAMA | {"vocab_size": 340, "max_position_embeddings": 1024, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A tiny target with a tokenizer."""
    folder = write_model(tmp_path_factory.mktemp("bench") / "tiny", CONFIG, seed=4)
    return write_tokenizer(folder)


def bench(target: Path, *args: object):
    """`spec bench` with the target as its own drafter, and short replies."""
    pair = ["-m", str(target), "--draft-model", str(target), "--draft-kind", "full-model", "--no-probe"]
    return CliRunner().invoke(cli, ["bench", *pair, "--arms", "plain,fixed", "-n", "24", *map(str, args)])


@pytest.fixture(scope="module")
def done(target, tmp_path_factory):
    """One run over two workloads, and its folder."""
    folder = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_SPEC_CACHE_DIR", str(folder / "cache"))
        out = bench(target, "--workload", "code", "--workload", "lookup", "--out", folder / "results")
    return out, folder / "results"


@pytest.fixture
def doc(done) -> dict:
    return json.loads((done[1] / "bench.json").read_text())


def test_it_succeeds_and_prints_a_table(done):
    out, _ = done
    assert out.exit_code == 0, out.output
    lines = out.stdout.splitlines()
    assert lines[0] == (
        "3 alternating runs of 24 tokens, median (lowest-highest); "
        "gains are medians of paired runs and do not divide from the speeds"
    )
    assert [line.split()[:2] for line in lines[2:6]] == [
        ["code", "plain"],
        ["code", "fixed"],
        ["lookup", "plain"],
        ["lookup", "fixed"],
    ]
    assert "tokens: all 12 replies equal between the arms" in lines


def test_arms_take_turns_on_fresh_prompts(doc):
    turns = [(run["workload"], run["trial"], run["arm"]) for run in doc["runs"]]
    assert turns == [(w, t, a) for t in (1, 2, 3) for w in ("code", "lookup") for a in ("plain", "fixed")]
    prompts = [tuple(trial["ids"]) for trial in doc["prompts"]]
    assert len(prompts) == 6 == len(set(prompts)) and not any(trial["repeated"] for trial in doc["prompts"])


def test_every_clock_and_every_raw_run_is_kept(doc):
    for run in doc["runs"]:
        assert 0 < run["first_token_s"] < run["total_s"] and run["decode_per_second"] > 0
        assert run["peak_memory"] >= run["active_memory"] > 0
    for entry in doc["summary"]:
        speeds = [
            run["decode_per_second"]
            for run in doc["runs"]
            if (run["workload"], run["arm"]) == (entry["workload"], entry["arm"])
        ]
        assert entry["decode_per_second"]["values"] == speeds and len(speeds) == 3


def test_the_path_of_every_run_is_confirmed(doc):
    assert doc["void"] is False and doc["void_reasons"] == []
    for run in doc["runs"]:
        drafted = run["path"]["draft_rounds"]
        assert (drafted > 0, run["path"]["active"]) == ((run["arm"] == "fixed"),) * 2
        assert run["path"]["method"] == ("full-model" if run["arm"] == "fixed" else "none")


def test_tokens_are_kept_once_per_trial_and_equal(doc):
    assert doc["tokens_equal"] is True
    for run in doc["runs"]:
        if run["arm"] == "plain":
            assert len(run["ids"]) == 24
        else:
            assert run["ids_equal_to"] == "plain" and "ids" not in run


def test_what_the_figures_belong_to_is_recorded(doc, target):
    assert doc["pair"]["target"]["name"] == "/".join(target.parts[-2:])
    assert str(target.parent.parent) not in json.dumps({k: v for k, v in doc.items() if k != "command"})
    assert len(doc["pair"]["target"]["fingerprint"]) >= 16 and doc["pair"]["target"]["dtype"] == "float32"
    assert doc["pair"]["drafter"] == doc["pair"]["target"] and doc["pair"]["kind"] == "full-model"
    assert doc["method"]["max_tokens"] == 24 and doc["method"]["pairs"] == 3 and doc["method"]["law"] == "greedy"
    assert doc["method"]["chat_template"] is True and doc["method"]["warm_up"]["turns"] >= 2
    assert set(doc["versions"]) >= {"python", "mlx", "mlx-lm"} and doc["machine"]["device"]
    assert doc["command"].split()[0] == "spec" and doc["load_s"] > 0


def test_only_whole_files_are_left(done):
    out, folder = done
    assert {path.name for path in folder.iterdir()} == {"bench.json", "bench.png"}
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert f"wrote {folder / 'bench.png'}" in out.stderr


def test_json_goes_to_stdout_alone(target):
    out = bench(target, "--workload", "json", "--json", "--temp", "0.9", "--seed", "11")
    assert out.exit_code == 0, out.output
    found = json.loads(out.stdout)
    assert found["method"]["law"] == "coupled" and found["method"]["seed"] == 11
    assert found["tokens_equal"] is True
    replies = [tuple(run["ids"]) for run in found["runs"] if run["arm"] == "plain"]
    assert len(set(replies)) == 3


def test_own_texts_replace_the_bundled_ones(target, tmp_path):
    (tmp_path / "mine").write_text("abc abc abc abc abc abc abc abc abc abc abc", encoding="utf-8")
    out = bench(target, "--prompt-file", tmp_path / "mine", "--json")
    assert out.exit_code == 0, out.output
    found = json.loads(out.stdout)
    assert [trial["workload"] for trial in found["prompts"]] == ["file"] * 3
    assert [trial["repeated"] for trial in found["prompts"]] == [False, True, True]


def test_progress_counts_every_run(target, monkeypatch):
    seen = []

    class Counted(Steps):
        def advance(self, steps: float = 1) -> None:
            seen.append(steps)

    class Bar:
        def __init__(self, text: str, total: float | None = None):
            self.total = total

        def __enter__(self):
            return Counted()

        def __exit__(self, *_):
            if self.total is not None:
                assert len(seen) == self.total

    monkeypatch.setattr(command_module, "progress", Bar)
    assert bench(target, "--workload", "prose").exit_code == 0
    assert len(seen) == 6


# -- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arms", ["plain", "plain,plain", "plain,fast", ""])
def test_arms_must_be_two_known_ones(target, arms):
    out = bench(target, "--arms", arms)
    assert out.exit_code == 2 and "--arms: found" in out.stderr


def test_an_unwritable_folder_is_refused_before_anything_is_loaded(target, tmp_path, monkeypatch):
    monkeypatch.setattr(command_module, "load_pair", lambda *_: pytest.fail("loaded"))
    (tmp_path / "file").write_text("")
    out = bench(target, "--out", tmp_path / "file")
    assert out.exit_code == 2
    assert out.stderr.count("\n") == 1 and "--out" in out.stderr


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("-n", "1000"), "-n: found 1000 tokens after a prompt of"),
        (("--pairs", "2"), "--pairs"),
        (("--workload", "poems"), "--workload"),
        (("--prompt-file", "/nowhere/text"), "--prompt-file /nowhere/text: found"),
        (("--temp", "-1"), "temperature"),
    ],
)
def test_bad_usage(target, args, text):
    out = bench(target, *args)
    assert out.exit_code == 2 and text in out.stderr and "Traceback" not in out.stderr


def test_no_drafter_is_refused_before_measuring(target):
    out = CliRunner().invoke(cli, ["bench", "-m", str(target), "-n", "24"])
    assert out.exit_code == 1
    assert "bench: found no drafter" in out.stderr and "--draft-kind prompt-lookup" in out.stderr


def test_a_target_without_a_tokenizer_is_refused(tmp_path):
    folder = write_model(tmp_path / "bare", CONFIG)
    out = bench(folder)
    assert out.exit_code == 2 and "a target without a tokenizer" in out.stderr


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_it_is_refused_before_weights_are_read(tmp_path, command, monkeypatch):
    from mlx_spec import pair as loaded

    folder = write_model(tmp_path / "bare", CONFIG)
    monkeypatch.setattr(loaded, "load_target", lambda _: pytest.fail("read"))
    out = CliRunner().invoke(cli, [command, "-m", str(folder), "--draft-kind", "prompt-lookup"])
    assert out.exit_code == 2 and out.stderr.startswith("error U81: bench: found a target without a tokenizer")


@pytest.fixture
def scripted(target, monkeypatch):
    """Have the command run a pair whose drafter is scripted."""

    def use(script) -> None:
        pair = make_pair(tiny_target(), ScriptedDrafter(script))
        pair.tokenizer = load_tokenizer(target)
        pair.target = tiny_like(target)
        monkeypatch.setattr(command_module, "load_pair", lambda *_: pair)

    return use


def tiny_like(folder: Path):
    """The target in `folder`, loaded."""
    from mlx_spec.checkpoint import read_config
    from mlx_spec.generic_target import GenericTarget
    from mlx_spec.types import ModelRef

    return GenericTarget.load(ModelRef("tiny", folder, read_config(folder)))


def test_a_drafter_that_never_drafts_voids_the_result(target, scripted, tmp_path):
    scripted(empty)
    out = bench(target, "--workload", "code", "--out", tmp_path)
    assert out.exit_code == 1
    why = r"K=\d: fixed \(adaptive off\); the drafter had nothing to propose \d\d times"
    assert re.search(rf"VOID code 1, fixed: 0 of \d\d forwards drafted, expected at least 1 \({why}\)", out.stdout)
    assert "bench: found a void run" in out.stderr
    assert "take text that repeats itself (--workload, --prompt-file), or another drafter." in out.stderr
    assert "-n" not in out.stderr.splitlines()[-1] and "--arms plain,fixed" not in out.stderr
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["void"] is True and len(found["void_reasons"]) == 3


def test_a_void_run_of_the_governor_is_sent_to_the_arm_without_one(target, scripted):
    scripted(empty)
    out = bench(target, "--workload", "code", "--arms", "plain,spec")
    assert out.exit_code == 1
    assert "-n leaves more rounds to draft in, and --arms plain,fixed drafts without the governor." in out.stderr


def test_wrong_drafts_cost_speed_and_no_tokens(target, scripted):
    scripted(lambda tokens, budget: [7] * budget)
    out = bench(target, "--workload", "code")
    assert out.exit_code == 0, out.output
    assert "tokens: all 6 replies equal between the arms" in out.stdout
