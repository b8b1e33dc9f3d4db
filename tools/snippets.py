"""Code blocks of the documentation: which ones a page has, and how they are run or parsed."""

from __future__ import annotations
import __future__

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GENERATED = re.compile(r"<!-- generated:.*?<!-- end -->", re.DOTALL)
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE)
TITLE = re.compile(r'title="([^"]+)"')


@dataclass(frozen=True)
class Snippet:
    """One fenced block: language, file name of its title (""), text, first line in the page."""

    page: str
    language: str
    title: str
    text: str
    line: int


def snippets(page: Path) -> list[Snippet]:
    """Hand-written fenced blocks of a page, in order."""
    text = GENERATED.sub(lambda m: "\n" * m[0].count("\n"), page.read_text())
    found = []
    for match in FENCE.finditer(text):
        language, _, rest = match["info"].strip().partition(" ")
        title = TITLE.search(rest)
        indent = match["indent"]
        body = "".join(line.removeprefix(indent) for line in match["body"].splitlines(keepends=True))
        found.append(
            Snippet(page.name, language, title[1] if title else "", body, text[: match.start()].count("\n") + 2)
        )
    return found


def run_python(found: list[Snippet], namespace: dict[str, object]) -> None:
    """Run the untitled Python blocks of one page in order, in one namespace; errors carry its line."""
    for snippet in found:
        if snippet.language == "python" and not snippet.title:
            source = "\n" * (snippet.line - 1) + snippet.text
            flags = __future__.annotations.compiler_flag
            exec(compile(source, snippet.page, "exec", flags, dont_inherit=True), namespace)


def commands(found: list[Snippet]) -> Iterator[list[str]]:
    """Command lines of shell blocks as words: continuation lines joined, comments and pipes cut off."""
    for snippet in found:
        if snippet.language not in ("sh", "console", "shell"):
            continue
        for line in snippet.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"\$|[A-Z_]+=.*", words[0]):
                words = words[1:]
            for end in ("|", ">", "&&", "2>&1"):
                words = words[: words.index(end)] if end in words else words
            if words:
                yield words
