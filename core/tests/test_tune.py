"""`spec tune`: the rule that chooses, what is stored and when, who uses it, and what is refused."""

from __future__ import annotations

import json
import math
import re
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from tinymodels import LLAMA, write_model, write_tokenizer

from mlx_spec import diskcache
from mlx_spec.benchmark import method
from mlx_spec.benchmark.tune import COLUMNS, WidthResult, choose, gain_and_range, table, width_arms
from mlx_spec.cli import cli
from mlx_spec.costs import load_costs
from mlx_spec.memory import size
from mlx_spec.pair import load
from mlx_spec.tensorfiles import tensor_index
from mlx_spec.tuned import AREA, Tuned, forget_tuned, read_tuned, write_tuned
from mlx_spec.types import DrafterCard
from mlx_spec.width import SWEEP, resolve_block_size

CONFIG = LLAMA | {"vocab_size": 340, "max_position_embeddings": 1024, "num_hidden_layers": 2}
KEY = "0123456789abcdef"


# -- the rule --------------------------------------------------------------------------------------------


def test_what_a_workload_gains_is_no_noise_but_disagreeing_pairs_are():
    gain, low, high = gain_and_range([[math.log(4.0)] * 3, [math.log(0.25)] * 3])
    assert gain == pytest.approx(1.0) and low == pytest.approx(1.0) and high == pytest.approx(1.0)
    steady, shaky = gain_and_range([[0.2, 0.2, 0.2]]), gain_and_range([[-0.4, 0.2, 0.8]])
    assert steady[0] == pytest.approx(shaky[0]) == pytest.approx(math.exp(0.2))
    assert steady[1] == pytest.approx(math.exp(0.2))
    assert shaky[1:] == pytest.approx([math.exp(0.2 + side * 2 * 0.6 / math.sqrt(3)) for side in (-1, 1)])


def test_runs_that_disagree_more_than_they_gain_leave_it_open():
    """Over three workloads two standard errors would call this a gain; the worst run of each does not."""
    logs = [0.10, 0.02, -0.005]
    gain, low, high = gain_and_range([logs] * 3)
    assert math.log(gain) - 2 * statistics.stdev(logs) / 3 > 0
    assert math.log(low) == pytest.approx(-0.005) and math.log(high) == pytest.approx(0.10)


def width(L: int, gain: float, low: float | None = None, void: str = "") -> WidthResult:
    return WidthResult(L, 100 * gain, gain, gain - 0.05 if low is None else low, [0.5], 1.5, 1.0, 2.0, void)


@pytest.mark.parametrize(
    ("widths", "want"),
    [
        ([width(2, 1.2), width(3, 1.5), width(4, 1.3)], 3),
        ([width(2, 1.48), width(3, 1.5), width(4, 1.49)], 2),  # within 2%: the narrowest
        ([width(2, 1.46), width(3, 1.5)], 3),
        ([width(2, 1.02), width(3, 1.04)], None),  # not beyond noise
        ([width(2, 1.2), width(3, 1.5, low=0.9)], 2),  # the fastest one is all noise
        ([width(2, 1.2), width(3, 9.9, void="it fell over")], 2),
        ([width(2, 0.8), width(3, 0.7)], None),
    ],
)
def test_the_choice(widths, want):
    chosen = choose(widths)
    assert (chosen.block_size if chosen else None) == want


def test_a_width_that_lost_says_why():
    """One that wins but gains less, one that noise may explain, one that is slower whatever noise explains."""
    widths = [
        replace(width(2, 1.2), high=1.3),
        replace(width(3, 1.5), high=1.6),
        replace(width(4, 1.04, low=0.95), high=1.11),
        replace(width(5, 0.97, low=0.9), high=1.02),
        replace(width(6, 0.8), high=0.9),
        width(7, 9.9, void="it fell over"),
    ]
    sweep = [asdict(one) | {"wins": one.wins, "loses": one.loses} for one in widths]
    rows = table({"sweep": sweep, "chosen": 3, "plain_per_second": 100.0})
    assert COLUMNS[-1] == "verdict"
    assert [row[-1] for row in rows] == [
        "",
        "20% slower than L=3",
        "chosen",
        "faster by 4%, within noise (0.95x-1.11x)",
        "slower by 3%, within noise (0.90x-1.02x)",
        "slower by 20%",
        "VOID",
    ]


def test_every_width_is_an_arm_at_its_full_width():
    plain, *rest = width_arms(4)
    assert not plain.speculative
    assert [(a.name, a.block_size, a.adaptive) for a in rest] == [
        ("L=2", 2, False), ("L=3", 3, False), ("L=4", 4, False),
    ]  # fmt: skip


# -- what is stored --------------------------------------------------------------------------------------


def test_a_stored_choice_is_read_back_and_forgotten(tmp_path):
    assert read_tuned(KEY, tmp_path) is None and not forget_tuned(KEY, tmp_path)
    assert write_tuned(KEY, Tuned(5, 1.4, "2026-01-02T00:00:00Z"), tmp_path)
    assert read_tuned(KEY, tmp_path) == Tuned(5, 1.4, "2026-01-02T00:00:00Z")
    assert read_tuned("fedcba", tmp_path) is None
    assert forget_tuned(KEY, tmp_path) and read_tuned(KEY, tmp_path) is None


@pytest.mark.parametrize(
    "damage", [{"block_size": 1}, {"block_size": 65}, {"block_size": "4"}, {"gain": None}, {"version": 2}]
)
def test_what_makes_no_sense_is_not_used(tmp_path, damage):
    write_tuned(KEY, Tuned(5, 1.4, "now"), tmp_path)
    (file,) = (tmp_path / AREA).iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    assert read_tuned(KEY, tmp_path) is None


def test_the_sweep_does_not_warn_about_widths_it_tries_itself():
    card = DrafterCard("mtp", "x", block_size=4)
    assert resolve_block_size((6, SWEEP), card, "mtp").notes == ()
    assert "wider than the L=4" in resolve_block_size((6, "--draft-block-size"), card, "mtp").notes[0]


def test_an_operator_wins_over_it_and_it_wins_over_the_drafter():
    card, tuned = DrafterCard("mtp", "x", block_size=3), Tuned(6, 1.4, "2026-01-02T00:00:00Z")
    chosen = resolve_block_size(None, card, "mtp", {}, tuned=tuned)
    assert (chosen.L, chosen.source) == (6, "tuned")
    assert chosen.notes == ("block size L=6 as spec tune measured it (1.40x plain, 2026-01-02)",)
    asked = resolve_block_size((2, "--draft-block-size"), card, "mtp", {}, tuned=tuned)
    assert (asked.L, asked.source) == (2, "--draft-block-size")
    cut = resolve_block_size(None, replace(card, max_block_size=4), "mtp", {}, tuned=tuned)
    assert cut.L == 4 and "L=6 from tuned cut to L=4" in cut.notes[1]


# -- the command -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A tiny target with a tokenizer; as its own drafter it has every draft accepted."""
    return write_tokenizer(write_model(tmp_path_factory.mktemp("tune") / "tiny", CONFIG, seed=4))


def tune(target: Path, *args: object, kind: str = "full-model"):
    drafter = ["--draft-model", str(target)] if kind == "full-model" else []
    pair = ["-m", str(target), *drafter, "--draft-kind", kind, "--no-probe"]
    return CliRunner().invoke(cli, ["tune", *pair, "-n", "16", "--workload", "code", *map(str, args)])


@pytest.fixture
def speeds(monkeypatch):
    """Let the runs happen, but set how fast each arm says it was."""
    real, table = method.run_once, {"plain": 100.0, "L=2": 110.0, "L=3": 160.0, "L=4": 159.0, "L=5": 120.0}

    def run_once(*args):
        run = real(*args)
        run.decode_per_second = table.get(run.arm, 130.0)
        return run

    monkeypatch.setattr(method, "run_once", run_once)
    return table


def pair_of(target: Path, **options):
    return load(str(target), str(target), "full-model", probe=False, **options)


WIDEST = "note: no wider one was tried; a larger --draft-block-size, if drafter and probe allow it, may win\n"


def test_a_best_width_that_is_the_widest_tried_is_told_as_such(target, speeds):
    out = tune(target, "--draft-block-size", 3)
    assert f"best: L=3 (2 drafted tokens); stored: L=3\n{WIDEST}" in out.stdout


def test_the_best_width_is_stored_and_used_from_then_on(target, speeds, tmp_path):
    out = tune(target, "--draft-block-size", 5, "--out", tmp_path / "results")
    assert out.exit_code == 0, out.output
    assert "best: L=3 (2 drafted tokens); stored: L=3" in out.stdout and WIDEST not in out.stdout
    assert "1.60x" in out.stdout and out.stdout.count("chosen") == 1
    lines = out.stdout.splitlines()
    assert lines[0].endswith("on each of code; gains are means of paired runs and do not divide from the speeds")
    ends = ["31% slower than L=3", "chosen", "no better than L=3, which is narrower", "25% slower than L=3"]
    assert [re.split(r"  +", line)[-1] for line in lines[3:7]] == ends
    plan = pair_of(target).plan
    assert (plan.block_size, plan.block_size_from) == (3, "tuned") and "1.60x plain" in plan.notes[0]
    assert "block_size=3 block_size_from=tuned" in plan.line()
    assert pair_of(target, block_size=2).plan.block_size_from == "operator"
    assert pair_of(target, kv_bits=None, dtype="float16").plan.block_size_from == "default"  # another pair
    args = ["-m", str(target), "--draft-model", str(target), "--draft-kind", "full-model", "--no-probe"]
    used = CliRunner().invoke(cli, ["generate", *args, "--prompt-ids", "5,6,7", "-n", "4", "--json"])
    assert json.loads(used.stdout)["speculation"]["block_size_from"] == "tuned"
    doc = json.loads((tmp_path / "results" / "tune.json").read_text())
    assert (tmp_path / "results" / "tune.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert doc["chosen"] == 3 and doc["stored"] == "L=3"


def test_the_sweep_has_every_width_with_its_acceptance_and_times(target, speeds):
    out = tune(target, "--draft-block-size", 4, "--json", "--no-store")
    assert out.exit_code == 0, out.output
    doc = json.loads(out.stdout)
    assert doc["stored"] == "not asked to" and pair_of(target).plan.block_size_from == "default"
    assert [entry["block_size"] for entry in doc["sweep"]] == [2, 3, 4]
    for entry in doc["sweep"]:
        drafted = entry["block_size"] - 1
        assert entry["acceptance_by_position"] == [1.0] * drafted  # a model agrees with itself
        assert entry["draft_ms"] > 0 and entry["verify_ms"] > 0 and entry["tokens_per_forward"] > drafted
    turns = [(run["trial"], run["arm"]) for run in doc["runs"]]
    assert turns == [(t, a) for t in (1, 2, 3) for a in ("plain", "L=2", "L=3", "L=4")]
    assert doc["tokens_equal"] is True and doc["method"]["arms"][1]["block_size"] == 2


def test_a_loss_removes_what_was_stored(target, speeds):
    key = pair_of(target).key
    write_tuned(key, Tuned(3, 1.5, "2026-01-02T00:00:00Z"))
    speeds |= {"L=2": 90.0, "L=3": 80.0}
    out = tune(target, "--draft-block-size", 3)
    assert out.exit_code == 0, out.output
    assert "no width beats plain decoding beyond noise; stored: removed an earlier choice" in out.stdout
    assert read_tuned(key) is None
    assert "stored: nothing" in tune(target, "--draft-block-size", 3).stdout


@pytest.mark.parametrize("L", [2, 3, 5])
def test_runs_that_do_not_decide_about_an_earlier_choice_leave_it_alone(target, speeds, monkeypatch, L):
    key, timed, turn = pair_of(target).key, method.run_once, iter(range(99))
    write_tuned(key, Tuned(L, 1.5, "2026-01-02T00:00:00Z"))
    speeds |= {"L=2": 80.0}

    def run_once(*args):
        run = timed(*args)
        run.decode_per_second = 90.0 + 20.0 * (next(turn) % 2) if run.arm == "L=3" else run.decode_per_second
        return run

    monkeypatch.setattr(method, "run_once", run_once)
    out = tune(target, "--draft-block-size", 3)
    assert out.exit_code == 0 and "no width beats plain decoding" in out.stdout, out.output
    kept = read_tuned(key)
    assert (kept.block_size if kept else None) == (None if L == 2 else L)  # 2 loses, 5 was not tried again
    assert ("these runs do not decide about it" in out.stdout) == (L != 2)


def too_large(target: Path) -> str:
    """What is said of a target that drafts for itself."""
    nbytes = size(sum(info.nbytes for info in tensor_index(target).values()))
    return (
        f"warning P28: size of full-model drafter {target}: found {nbytes} of weights, target {target} has {nbytes}, "
        "expected a fraction of it, since a draft takes about as long as its weights take to read. Use a smaller one, "
        "or prompt-lookup: even where every draft of this one is accepted, replies are hardly faster than plain ones, "
        "so most are decoded plainly (parked).\n"
    )


def test_forget_removes_it_without_measuring(target, monkeypatch):
    key = pair_of(target).key
    write_tuned(key, Tuned(4, 1.5, "2026-01-02T00:00:00Z"))
    monkeypatch.setattr(method, "run_once", lambda *_: pytest.fail("measured"))
    lead = too_large(target)
    assert tune(target, "--forget").stderr == f"{lead}forgotten for this pair on this machine: block size L=4\n"
    assert read_tuned(key) is None
    assert tune(target, "--forget").stderr == too_large(target) + "forgotten for this pair on this machine: nothing\n"


def test_forget_drops_learned_costs(target, monkeypatch):
    """Of this pair alone, for every batch size; the next run starts from nothing."""
    key = pair_of(target).key
    for name in (key, "another"):
        learned = load_costs(name)
        for rows, k in ((1, 0), (1, 3), (2, 0)):
            for _ in range(3):
                learned.for_batch(rows).observe(k, 0.01 * (k + 1))
        assert learned.save(force=True)
    write_tuned(key, Tuned(4, 1.5, "2026-01-02T00:00:00Z"))
    assert tune(target, "--forget").stderr == too_large(target) + (
        "forgotten for this pair on this machine: block size L=4, "
        "costs and acceptance of rounds at K=0, 3; K=0 with 2 rows\n"
    )
    assert load_costs(key).for_batch(1).blank and not load_costs("another").for_batch(1).blank
    assert tune(target, "--forget").stderr == too_large(target) + "forgotten for this pair on this machine: nothing\n"


def test_what_cannot_be_forgotten_is_said(target, monkeypatch):
    write_tuned(pair_of(target).key, Tuned(4, 1.5, "2026-01-02T00:00:00Z"))

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(diskcache, "_said", set())
    said = tune(target, "--forget").stderr
    assert "could not be removed: Permission denied. It stays in use." in said
    assert said.endswith("forgotten for this pair on this machine: nothing\n")


def test_without_a_width_asked_for_a_little_more_than_the_default_is_tried(target, speeds):
    doc = json.loads(tune(target, "--json", "--no-store").stdout)
    assert [entry["block_size"] for entry in doc["sweep"]] == [2, 3, 4, 5, 6]


def test_a_drafter_that_proposes_nothing_is_measured_and_not_void(target, speeds, tmp_path):
    (tmp_path / "mine").write_text("a b", encoding="utf-8")
    args = ["tune", "-m", str(target), "--draft-kind", "prompt-lookup", "--no-probe", "-n", "16"]
    args += ["--draft-block-size", "3", "--prompt-file", str(tmp_path / "mine"), "--json", "--no-store"]
    out = CliRunner().invoke(cli, [*args, "--spec-config", '{"prompt_lookup_min": 9, "prompt_lookup_max": 9}'])
    assert out.exit_code == 0, out.output
    doc = json.loads(out.stdout)
    assert [run["path"]["draft_rounds"] for run in doc["runs"]] == [0] * 9
    assert doc["void"] is False and doc["sweep"][0]["draft_ms"] is None


def test_replies_that_differ_on_a_proven_pair_store_nothing(target, speeds, monkeypatch):
    real = method.run_once

    def other(pair, trial, arm, *rest):
        run = real(pair, trial, arm, *rest)
        if arm.name == "L=3":
            run.ids[5] += 1
        return run

    monkeypatch.setattr(method, "run_once", other)
    pair = ["-m", str(target), "--draft-model", str(target), "--draft-kind", "full-model"]
    args = ["tune", *pair, "-n", "16", "--workload", "code", "--draft-block-size", "3"]
    out = CliRunner().invoke(cli, args)
    assert out.exit_code == 1
    assert (
        "tune: found L=3 and plain replies that differ on code 1" in out.stderr and "nothing was stored" in out.stderr
    )
    assert not list((diskcache.entry_path(AREA, "x").parent).glob("*"))


@pytest.mark.parametrize(
    ("args", "text", "code"),
    [
        (("--draft-block-size", "1"), "tune: found speculation off", 1),
        (("--draft-block-size", "99"), "--draft-block-size", 2),
        (("--pairs", "2"), "--pairs", 2),
        (("-n", "5"), "-n", 2),
    ],
)
def test_what_cannot_be_tuned_is_refused(target, args, text, code):
    out = tune(target, *args)
    assert out.exit_code == code and text in out.stderr and "Traceback" not in out.stderr


def test_no_drafter_is_refused_before_anything_is_loaded(target):
    out = CliRunner().invoke(cli, ["tune", "-m", str(target)])
    assert out.exit_code == 1
    assert "tune: found no drafter, expected a pair that speculates" in out.stderr
