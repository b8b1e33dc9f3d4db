"""How commands write: rich on a terminal, clean text in a pipe, JSON on request.

What was asked for goes to stdout, talk about it to stderr.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


SPEAK_FIRST, SPEAK_EVERY = 5.0, 15.0  # seconds to the first line about long work without a bar, and between others
STYLES = {"ok": "green", "warn": "yellow", "error": "red", "errors": "red", "not loaded": "red"}


def on_terminal(stream: TextIO) -> bool:
    """Whether a person is looking at this stream."""
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def on_terminal_stderr() -> bool:
    """Whether a person is looking at stderr now."""
    return on_terminal(sys.stderr)


def console(stderr: bool = False) -> Console:
    """A rich console on stdout or stderr; text is printed as it is, never read as markup."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)


def note(text: str) -> None:
    """One line for the person, on stderr; when that takes nothing, the work goes on without."""
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        raise
    except OSError:  # a full stderr: there is nowhere to say so
        return


def print_json(value: Any) -> None:
    """One JSON document on stdout; dataclasses and paths are fine, a float that is not finite is null."""
    print(json.dumps(plain(value), ensure_ascii=False, indent=2, allow_nan=False))


def plain(value: Any) -> Any:
    """`value` in the types JSON has."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        return [plain(item) for item in items]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no JSON form here")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """A table on stdout: drawn on a terminal, aligned columns of plain text in a pipe."""
    cells = [[str(cell) for cell in row] for row in rows]
    if on_terminal(sys.stdout):
        _draw_table(columns, cells, title)
        return
    if title:
        print(title)
    lines = [list(columns), *cells] if any(columns) else cells
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(len(columns))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _draw_table(columns: Sequence[str], cells: list[list[str]], title: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell, STYLES.get(cell, "")) for cell in row))
    console().print(table)


class Steps:
    """Progress of one long piece of work: a bar on a terminal, elsewhere a line when it takes long."""

    def __init__(self, bar: Progress | None = None, task: Any = None, quiet: bool = False, total: float | None = None):
        self._bar, self._task, self._quiet, self._total = bar, task, quiet, total
        self._begun = time.monotonic()
        self._next = self._begun + SPEAK_FIRST
        self._done = 0.0

    def advance(self, steps: float = 1) -> None:
        """So many steps are done."""
        self._done += steps
        if self._bar is not None:
            self._bar.advance(self._task, steps)

    def announce(self, text: str) -> None:
        """Say what begins, where no bar shows it."""
        if self._bar is None and not self._quiet:
            note(text)

    def describe(self, text: str) -> None:
        """Say what is going on now."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        elif not self._quiet and (now := time.monotonic()) >= self._next:
            self._next = now + SPEAK_EVERY
            share = f"{self._done:.0f} of {self._total:.0f} done, " if (self._total or 0) > 1 else ""
            note(f"{text} ({share}{now - self._begun:.0f} s so far)")


@contextmanager
def speaking(text: Callable[[], str]) -> Iterator[Callable[[], None]]:
    """Lines about long work that does not come back to tell: `text()` after a while and from time to time.

    Until the block ends, or what it is given is called. Another thread speaks, so `text` may only look.
    """
    over, begun = Event(), time.monotonic()

    def speak() -> None:
        wait = SPEAK_FIRST
        while not over.wait(wait):
            with suppress(OSError):  # the thread of the work finds that nobody reads
                note(f"{text()} ({time.monotonic() - begun:.0f} s so far)")
            wait = SPEAK_EVERY

    thread = Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield over.set
    finally:
        over.set()
        thread.join()


@contextmanager
def progress(text: str, total: float | None = None, quiet: bool = False) -> Iterator[Steps]:
    """A progress bar on stderr while the block runs, on a terminal; `total` None: no end known."""
    if quiet or not on_terminal_stderr():
        yield Steps(quiet=quiet, total=total)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        yield Steps(bar, bar.add_task(text, total=total))
