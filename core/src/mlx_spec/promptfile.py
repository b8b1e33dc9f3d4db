"""Reading a prompt from a file or from standard input, either of which may be damaged or never end.

The line break that ends the last line is not part of the prompt: editors and `echo` put it there, and models answer it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

LIMIT = 64 << 20  # bytes; more text than any context holds


def read_prompt_file(name: str) -> str:
    """The text of a UTF-8 file, less a line break at its end.

    Raises OSError when it cannot be read, ValueError when it is no such text.
    """
    with Path(name).open("rb") as file:
        return _decoded(file)


def read_standard_input() -> str:
    """The UTF-8 text of standard input, up to its end; raises as `read_prompt_file` does."""
    if sys.stdin is None:
        raise ValueError("it closed")
    return _decoded(sys.stdin.buffer)


def why_not(error: Exception) -> str:
    """What a message says of an error of the two: the system's reason, without the path it repeats."""
    return getattr(error, "strerror", None) or str(error)


def _decoded(file: BinaryIO) -> str:
    """Text with line breaks as "\\n", without the one at its end."""
    data = file.read(LIMIT + 1)
    if len(data) > LIMIT:
        raise ValueError(f"more than {LIMIT >> 20} MiB")
    return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")
