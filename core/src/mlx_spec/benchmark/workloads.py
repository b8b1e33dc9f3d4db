"""The bundled texts, as workloads: a few prompts for measuring and one for warming up."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from ..errors import UsageError, visible
from ..promptfile import read_prompt_file, why_not

NAMES = ("code", "chat", "json", "prose", "lookup")
OWN = "file"  # name of the workload made of --prompt-file texts


@dataclass(frozen=True, slots=True)
class Workload:
    """Texts of one kind.

    Attributes:
        name, about: how tables call it, and what it is.
        texts: prompts; the last one warms up when there are several, so it is never measured.
    """

    name: str
    about: str
    texts: tuple[str, ...]

    @property
    def measured(self) -> tuple[str, ...]:
        """Prompts that are timed."""
        return self.texts[:-1] if len(self.texts) > 1 else self.texts

    @property
    def warm_up(self) -> str:
        """The prompt that is never timed (unless it is the only one)."""
        return self.texts[-1]

    def choose(self, trial: int) -> tuple[int, bool]:
        """(index into `measured`, whether an earlier trial had it too) for a trial counted from 0."""
        count = len(self.measured)
        return trial % count, trial >= count


def bundled(name: str) -> Workload:
    """One of `NAMES`, read from the package."""
    source = files(__package__) / "texts" / f"{name}.toml"
    data = tomllib.loads(source.read_text(encoding="utf-8"))
    return Workload(name, data["about"], tuple(entry["text"] for entry in data["prompt"]))


def from_files(paths: Sequence[str]) -> Workload:
    """A workload of a person's own texts, one file per prompt."""
    return Workload(OWN, "texts given with --prompt-file", tuple(_read(path) for path in paths))


def _read(path: str) -> str:
    try:
        text = read_prompt_file(path)
    except (OSError, ValueError) as error:
        raise _refuse(path, why_not(error)) from error
    if not text.strip():
        raise _refuse(path, "an empty file")
    return text


def _refuse(path: str, found: str) -> UsageError:
    return UsageError(
        f"--prompt-file {visible(path)}",
        found=found,
        expected="a readable UTF-8 text file that is not empty",
        next_step="Check the path and the encoding",
        code="U80",
    )
