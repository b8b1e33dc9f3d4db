"""The document of `spec bench`: what makes it void, what it says of losses and differences, how it is written."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from io import BytesIO

import pytest

from mlx_spec.benchmark import plot, report
from mlx_spec.benchmark.method import ARMS, BenchPlan, Run, Trial, WarmUp, at_trial, run_once, void_reason
from mlx_spec.benchmark.workloads import Workload
from mlx_spec.cli.bench import save
from mlx_spec.errors import RefusedError, UsageError
from mlx_spec.request import Event, Result, SpeculationReport, Timings
from mlx_spec.sampling import Sampling

PATH = {
    "active": True,
    "method": "mtp",
    "law": "greedy",
    "draft_rounds": 4,
    "plain_steps": 2,
    "proposed_by_position": [4, 3],
    "accepted_by_position": [3, 1],
    "tokens_per_forward": 2.0,
    "governor": "K=2",
    "fallbacks": [],
}
NO_DRAFTS = {"proposed_by_position": [], "accepted_by_position": []}
PLAIN = PATH | {"method": "none", "draft_rounds": 0, "plain_steps": 9, "tokens_per_forward": 1.0} | NO_DRAFTS
CONTEXT = {
    "pair": {
        "exactness": "greedy",
        "kind": "mtp",
        "block_size": 4,
        "target": {"name": "a/b"},
        "drafter": None,
    },
    "machine": {"device": "cpu"},
    "versions": {"mlx": "0"},
}


def make_plan(
    arms: str = "plain,spec", workloads: tuple[str, ...] = ("code", "prose"), **sampling: object
) -> BenchPlan:
    """A plan of three pairs."""
    return BenchPlan(
        tuple(ARMS[name] for name in arms.split(",")),
        tuple(Workload(name, "", ("one", "two")) for name in workloads),
        3,
        9,
        Sampling(**sampling),
    )


def make_runs(plan: BenchPlan, speeds: dict[str, dict[str, list[float]]]) -> list[Run]:
    """One run per workload, arm and trial; speeds[workload][arm] are decode speeds."""
    runs = []
    for workload, arms in speeds.items():
        for trial in range(3):
            for arm, values in arms.items():
                path = PATH if ARMS[arm].speculative else PLAIN
                runs.append(
                    Run(
                        workload,
                        trial + 1,
                        arm,
                        0.1,
                        values[trial],
                        9 / values[trial],
                        7 << 20,
                        5,
                        [1, 2, 3],
                        dict(path),
                    )
                )
    return runs


SPEEDS = {
    "code": {"plain": [10.0, 20.0, 10.0], "spec": [20.0, 30.0, 15.0]},
    "prose": {"plain": [10.0, 10.0, 10.0], "spec": [8.0, 11.0, 9.0]},
}


SLOWER = {"plain": [10.0, 10.0, 10.0], "spec": [8.0, 9.5, 9.0]}


def make_document(plan: BenchPlan | None = None, runs: list[Run] | None = None, **changes: object) -> dict:
    """The document of these runs."""
    plan = plan or make_plan()
    runs = runs or make_runs(plan, SPEEDS)
    trials = [Trial(w.name, n, 1, n > 1, [4, 5]) for n in (1, 2, 3) for w in plan.workloads]
    return report.document(plan, trials, runs, WarmUp(2, {"plain": [9.0, 9.1]}, True), CONTEXT) | changes


# -- the path -------------------------------------------------------------------------------------------


def make_result(
    tokens: int = 9, finish: str = "length", active: bool = True, rounds: int = 4, error: str = ""
) -> Result:
    """A reply with these facts."""
    timings = Timings(draft_rounds=rounds, plain_steps=9 - rounds)
    spec = SpeculationReport(active=active, method="mtp", reason="why not", governor="parked")
    return Result([1] * tokens, "", finish, 2, timings, spec, [], None, error)


@pytest.mark.parametrize(
    ("arm", "facts", "reason"),
    [
        ("plain", {"active": False, "rounds": 0}, ""),
        ("plain", {"rounds": 1}, "1 rounds drafted in a plain run"),
        ("spec", {}, ""),
        ("fixed", {}, ""),
        ("spec", {"active": False}, "speculation was off: why not"),
        ("fixed", {"rounds": 0}, "0 of 9 forwards drafted, expected at least 1 (parked)"),
        ("spec", {"tokens": 8}, "the reply has 8 tokens, 9 were asked for"),
        ("plain", {"rounds": 0, "finish": "error", "error": "NaN"}, "the reply ended in an error: NaN"),
    ],
)
def test_a_run_off_its_path_is_void(arm, facts, reason):
    assert void_reason(ARMS[arm], make_result(**facts), 9) == reason


def test_every_trial_has_its_own_seed():
    assert [at_trial(Sampling(temperature=0.7, seed=5), number).seed for number in (1, 2, 3)] == [5, 6, 7]
    assert at_trial(Sampling(), 3).seed is None


# -- the summary ----------------------------------------------------------------------------------------


def test_gains_and_losses_by_workload():
    doc = make_document()
    code, prose = (next(e for e in doc["summary"] if (e["workload"], e["arm"]) == (w, "spec")) for w in SPEEDS)
    assert code["decode_gain"]["values"] == (2.0, 1.5, 1.5) and code["decode_gain"]["median"] == 1.5
    assert code["total_gain"]["median"] == pytest.approx(1.5) and code["verdict"] == "faster 3/3"
    assert prose["decode_gain"]["median"] == pytest.approx(0.9) and prose["verdict"] == "faster 1/3"
    assert doc["geometric_mean"]["spec"] == pytest.approx((1.5 * 0.9) ** 0.5)
    assert code["acceptance_by_position"] == [0.75, pytest.approx(1 / 3)]
    assert code["tokens_per_forward"] == 9 / 18 and code["peak_memory"] == 7 << 20
    lines = report.remarks(doc)
    assert "undecided: spec on prose (0.90x (0.80x-1.10x))" in lines
    slower = make_document(make_plan(), make_runs(make_plan(), {**SPEEDS, "prose": SLOWER}))
    assert "loss: spec is slower on prose (0.90x)" in report.remarks(slower)
    assert "tokens: all 12 replies equal between the arms" in lines
    assert not report.failed(doc)
    assert not any("decode_gain" in e for e in doc["summary"] if e["arm"] == "plain")


def test_the_table_has_a_cell_for_every_column():
    doc = make_document()
    rows = report.table(doc)
    assert [row[:2] for row in rows] == [("code", "plain"), ("code", "spec"), ("prose", "plain"), ("prose", "spec")]
    assert all(len(row) == len(report.COLUMNS) for row in rows)
    assert rows[1][2:5] == ("20.0 (15.0-30.0)", "1.50x (1.50-2.00)", "faster 3/3")
    assert rows[0][3] == "-" and rows[1][7:] == ("75% 33%", "0.50", "7 MiB")


def test_a_void_run_voids_the_document():
    plan = make_plan()
    runs = make_runs(plan, SPEEDS)
    runs[3].void = "0 of 9 forwards drafted"
    doc = make_document(plan, runs)
    assert doc["void"] and report.failed(doc)
    assert doc["void_reasons"] == ["code 2, spec: 0 of 9 forwards drafted"]
    assert [row[3:5] for row in report.table(doc) if row[3] == "VOID"] == [("VOID", "-")]
    assert report.remarks(doc)[-1] == "VOID code 2, spec: 0 of 9 forwards drafted"
    assert not any(line.startswith(("loss: spec is slower on code", "spec: ")) for line in report.remarks(doc))


@pytest.mark.parametrize(
    ("level", "fails"), [("bitwise", True), ("greedy", True), ("distribution", False), ("unproven", False)]
)
def test_a_differing_reply_is_said_and_fails_where_exactness_is_proven(level, fails):
    plan = make_plan()
    runs = make_runs(plan, SPEEDS)
    runs[3].ids = [1, 2, 7]
    doc = make_document(plan, runs)
    doc["pair"] = doc["pair"] | {"exactness": level}
    assert doc["tokens_equal"] is False
    assert doc["differences"] == [
        {"workload": "code", "trial": 2, "arm": "spec", "position": 2, "found": [7], "expected": [3]}
        | {"expected_of": "plain"}
    ]
    assert any(
        "tokens DIFFER: code 2, spec: reply token 2 is [7], plain has [3]" in line for line in report.remarks(doc)
    )
    assert report.failed(doc) is fails
    assert [run.get("ids") for run in doc["runs"]][:4] == [[1, 2, 3], None, [1, 2, 3], [1, 2, 7]]


def test_rejection_compares_no_tokens():
    plan = make_plan(temperature=0.8, acceptance="rejection")
    runs = make_runs(plan, SPEEDS)
    runs[1].ids = [9]
    doc = make_document(plan, runs)
    assert doc["tokens_equal"] is None and doc["differences"] == [] and not report.failed(doc)
    assert any(line.startswith("tokens: not compared") for line in report.remarks(doc))


def test_what_may_mislead_is_said():
    runs = make_runs(make_plan(), SPEEDS)
    runs[1].path["fallbacks"] = ["drafter raised ValueError: x"]
    doc = make_document(runs=runs)
    doc["method"]["warm_up"]["settled"] = False
    lines = report.remarks(doc)
    assert "note: more pairs than prompts, so some prompts came twice" in lines
    assert "note: drafter raised ValueError: x" in lines
    assert any(line.startswith("note: the speed had not settled") for line in lines)


def test_a_gain_beyond_what_its_forwards_give_is_no_figure():
    speeds = {**SPEEDS, "code": {"plain": [10.0, 10.0, 4.0], "spec": [20.0, 20.0, 20.0]}}
    doc = make_document(runs=make_runs(make_plan(), speeds))
    code, prose = (row for row in report.table(doc) if row[1] == "spec")
    assert (code[4], prose[4]) == ("implausible", "faster 1/3")
    assert doc["geometric_mean"] == {"spec": None}
    (line,) = (line for line in report.remarks(doc) if line.startswith("implausible"))
    assert "spec on code (2.00x (2.00x-5.00x)): some run gained more than its tokens a forward can give" in line
    assert "replies of 9 tokens are too short to time: take a larger -n" in line
    assert not any("over all workloads" in line for line in report.remarks(doc))


def test_the_rate_counts_from_the_start_of_decoding(monkeypatch):
    """The first event comes late and with many tokens: what follows it does not take the time of all rounds."""

    class Handle:
        def __init__(self, *_: object, **__: object):
            self.events = [Event(1, [1] * 5, ""), Event(1, [1] * 4, "", "length")]

        def submit(self, request: object) -> Handle:
            return self

        def __iter__(self):
            return iter(self.events)

        def result(self) -> Result:
            done = make_result(rounds=2)
            done.timings.predicted_per_second = 90.0
            return done

    monkeypatch.setattr("mlx_spec.engine.Engine", Handle)
    run = run_once(None, Trial("code", 1, 1, False, [4, 5]), ARMS["fixed"], Sampling(), 9)
    assert run.decode_per_second == 90.0 and not run.void
    assert 0 < run.first_token_s <= run.total_s


def test_a_clock_that_did_not_run_gives_no_gain():
    speeds = {"code": {"plain": [10.0, 10.0, 10.0], "spec": [20.0, 20.0, 20.0]}}
    plan = make_plan(workloads=("code",))
    runs = make_runs(plan, speeds)
    runs[1].decode_per_second = 0.0
    doc = make_document(plan, runs)
    assert doc["geometric_mean"] == {"spec": None}
    assert report.table(doc)[1][3:5] == ("-", "no figures")


# -- writing --------------------------------------------------------------------------------------------


def test_json_keeps_numbers_on_one_line_and_strings_untouched():
    doc = {"a": [1, 2.5, -3e-07], "b": ["[\n  1,\n  2\n]", "[ 1, 2 ]"], "c": [[1], []], "d": [1, "x"]}
    text = report.to_json(doc)
    assert json.loads(text) == doc
    assert '"a": [1, 2.5, -3e-07]' in text
    with pytest.raises(ValueError):
        report.to_json({"a": float("nan")})


def test_the_document_is_json():
    doc = make_document()
    assert json.loads(report.to_json(doc))["summary"][1]["decode_gain"]["values"] == [2.0, 1.5, 1.5]


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "bench.json"
    report.write_file(path, b"first")

    def broken(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), "replace", broken)
    with pytest.raises(RefusedError, match=r"--out .*No space left on device") as caught:
        report.write_file(path, b"second")
    assert caught.value.code == "R40"
    assert path.read_bytes() == b"first"
    assert [p.name for p in tmp_path.iterdir()] == ["bench.json"]


def test_the_folder_is_made_or_refused(tmp_path):
    folder = report.open_folder(str(tmp_path / "a" / "b"))
    assert folder.is_dir() and list(folder.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--out .*file/x: found Not a directory"):
        report.open_folder(str(tmp_path / "file" / "x"))


@pytest.mark.parametrize("outcome", [None, KeyboardInterrupt(), RefusedError("x", found=1, expected=2, next_step="y")])
def test_a_folder_that_nothing_was_written_to_is_not_left(tmp_path, outcome):
    (tmp_path / "mine").mkdir()
    for path, left in (("a/b", False), ("mine", True), ("mine/c", False), (".", True)):
        with suppress(KeyboardInterrupt, RefusedError), report.results_folder(str(tmp_path / path)) as folder:
            assert folder.is_dir()
            if outcome is not None:
                raise outcome
        assert (tmp_path / path).is_dir() is left
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    with report.results_folder(str(tmp_path / "a" / "b")) as folder:
        (folder / "x").write_text("")
    assert (tmp_path / "a" / "b" / "x").exists()
    with report.results_folder(None) as folder:
        assert folder is None


def colours(png: bytes, share: float = 1.0) -> tuple[tuple[int, int], dict[str, int]]:
    """(width, height) of a picture, and the pixels per colour of an arm in this share of it from the top."""
    from PIL import Image

    picture = Image.open(BytesIO(png))
    picture = picture.crop((0, 0, picture.width, round(picture.height * share)))
    counts = {"#{:02x}{:02x}{:02x}".format(*rgb): n for n, rgb in picture.convert("RGB").getcolors(1 << 24)}
    return picture.size, {colour: counts.get(colour, 0) for colour in plot.COLOURS}


def test_the_picture_has_a_bar_per_arm_and_workload():
    doc = make_document(make_plan("plain,spec"))
    png = plot.draw(doc)
    assert png.startswith(b"\x89PNG\r\n\x1a\n") and len(png) > 5000
    size, found = colours(png)
    assert size == (845, 975)  # 6.5 by 7.5 inches at 130 dots
    plain, spec, third = found.values()
    assert plain > 10_000 and spec > 10_000 and third == 0
    names = tuple("abcdef")
    speeds = {name: {arm: [9.0, 10.0, 11.0] for arm in ("plain", "spec", "fixed")} for name in names}
    plan = make_plan("plain,spec,fixed", names)
    wide, found = colours(plot.draw(make_document(plan, make_runs(plan, speeds))))
    assert wide[0] > size[0] and min(found.values()) > 10_000


def test_the_bars_are_as_tall_as_the_medians():
    """The upper panel holds the speeds: twice the speed is twice the bar, dots and whiskers aside."""
    plan = make_plan("plain,spec", ("code",))

    def ratio(fast: float) -> float:
        runs = make_runs(plan, {"code": {"plain": [10.0] * 3, "spec": [fast] * 3}})
        _, found = colours(plot.draw(make_document(plan, runs)), share=0.6)
        plain, spec, _ = found.values()
        return spec / plain

    assert ratio(10.0) == pytest.approx(1.0, rel=0.15) and ratio(20.0) == pytest.approx(2.0, rel=0.15)


def test_a_void_result_is_drawn_as_one():
    doc = make_document()
    assert plot.draw(doc | {"void": True}) != plot.draw(doc) == plot.draw(doc)


@pytest.fixture
def no_matplotlib(monkeypatch):
    """As where the extra is not installed."""
    for name in {"matplotlib", *(name for name in sys.modules if name.startswith("matplotlib."))}:
        monkeypatch.setitem(sys.modules, name, None)


def test_without_matplotlib_there_is_no_picture_and_a_reason(no_matplotlib, tmp_path, capsys):
    doc = make_document()
    assert not plot.available() and "pip install -e './core[bench]'" in plot.MISSING
    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        plot.draw(doc)
    save(doc, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
    assert capsys.readouterr().err.splitlines()[1:] == [plot.MISSING]
