"""llama.cpp in a process of its own, asked in turns with us and stopped in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any


class Llama:
    """The process of `llama_side.py`: asked in turns with us, stopped in between."""

    def __init__(self, python: str, gguf: Path, threads: int):
        side = Path(__file__).with_name("llama_side.py")
        command = [python, str(side), str(gguf), str(threads), "2048"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self._hear()

    def ask(self, **command: Any) -> Any:
        """One command and its answer."""
        os.kill(self.process.pid, signal.SIGCONT)
        print(json.dumps(command), file=self.process.stdin, flush=True)
        return self._hear()

    def _hear(self) -> Any:
        if self.process.stdout is None:
            raise RuntimeError("a process without stdout")
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"llama.cpp: found a process that ended with {self.process.wait()}, expected an answer.")
        os.kill(self.process.pid, signal.SIGSTOP)
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


def start_llama(python: str, gguf: Path, threads: int) -> Llama | None:
    """The other side, None when `python` has no llama-cpp-python."""
    found = subprocess.run([python, "-c", "import llama_cpp"], capture_output=True, check=False)
    return None if found.returncode else Llama(python, gguf, threads)
