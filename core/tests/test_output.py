"""Tables, JSON and progress on a terminal and in a pipe."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest

from mlx_spec.cli import output


@dataclass
class Thing:
    name: str
    sizes: tuple[int, ...]
    gap: float


def test_json_of_dataclasses_paths_sets_and_infinity(capsys):
    output.print_json({"thing": Thing("é", (1, 2), float("inf")), "path": Path("a/b"), "set": {3, 1}, 4: None})
    assert json.loads(capsys.readouterr().out) == {
        "thing": {"name": "é", "sizes": [1, 2], "gap": None},
        "path": "a/b",
        "set": [1, 3],
        "4": None,
    }


def test_a_full_stderr_stops_no_work(monkeypatch):
    class Full:
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stderr", Full())
    output.note("a word beside the work")


def test_long_work_is_spoken_of_until_it_is_silenced(capsys, monkeypatch):
    monkeypatch.setattr(output, "SPEAK_FIRST", 0.05)
    monkeypatch.setattr(output, "SPEAK_EVERY", 0.05)
    looked, twice = [], Event()

    def text() -> str:
        looked.append(len(looked))
        if len(looked) == 2:
            twice.set()
        return f"at {len(looked)}"

    with output.speaking(text) as silence:
        assert twice.wait(10)
        silence()
        told = len(looked)
    assert len(looked) <= told + 1  # one may be under way
    assert capsys.readouterr().err.startswith("at 1 (0 s so far)\nat 2 (0 s so far)\n")
    with output.speaking(lambda: pytest.fail("spoken of")):
        pass
    assert capsys.readouterr().err == ""


def test_json_refuses_what_it_does_not_know():
    with pytest.raises(TypeError, match="object"):
        output.print_json(object())


def test_plain_table_aligns_and_keeps_markup_as_text(capsys):
    output.print_table(("a", "long column"), [("[bold]x", 1), ("y", "")], title="Title")
    assert capsys.readouterr().out.splitlines() == ["Title", "a        long column", "[bold]x  1", "y"]


def test_drawn_table_shows_the_same_cells(capsys, monkeypatch):
    monkeypatch.setattr(output, "on_terminal", lambda stream: True)
    output.print_table(("plugin", "status"), [("[bold]x", "ok")])
    text = capsys.readouterr().out
    assert "[bold]x" in text and "ok" in text and "─" in text


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_talks_only_to_a_terminal(capsys, monkeypatch, terminal):
    monkeypatch.setattr(output, "on_terminal", lambda stream: terminal)
    with output.progress("working", total=3) as steps:
        steps.advance()
        steps.describe("still [working]")
        steps.advance(2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert bool(captured.err) is terminal


def test_where_no_bar_is_drawn_a_line_says_what_begins_and_how_much_is_done(capsys, monkeypatch):
    clock = iter([0.0, 1.0, 6.0, 20.0])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    with output.progress("measuring", total=54) as steps:
        steps.announce("measuring 54 replies")
        for name in ("a", "b", "c"):
            steps.describe(name)
            steps.advance()
    assert capsys.readouterr().err.splitlines() == ["measuring 54 replies", "b (1 of 54 done, 6 s so far)"]


@pytest.mark.parametrize("quiet", [False, True])
def test_long_work_says_now_and_then_what_it_does_where_no_bar_is_drawn(capsys, monkeypatch, quiet):
    clock = iter([0.0, 3.0, 6.0, 17.0, 40.0])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    with output.progress("loading", quiet=quiet) as steps:
        for L in (2, 3, 4, 5):
            steps.describe(f"probing L={L}")
    said = [] if quiet else ["probing L=3 (6 s so far)", "probing L=5 (40 s so far)"]
    assert capsys.readouterr().err.splitlines() == said
