"""llama.cpp as a process that obeys: a JSON command a line on stdin, a JSON answer a line on stdout.

    PYTHON bench/llama_side.py MODEL.gguf THREADS CONTEXT

It needs llama-cpp-python and nothing else, so PYTHON may be an environment of its own. Between commands the one
who asks stops it, since its threads wait by spinning. Commands: {"rows": [ids, counts]} times a forward of each
number of rows after the ids; {"reply": [ids, tokens]} decodes greedily; {"prompt": ids} times a prompt.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import llama_cpp


def main() -> None:
    """Load the model, say which version runs, answer until stdin ends."""
    path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    model = llama_cpp.Llama(
        path, n_ctx=context, n_batch=context, n_ubatch=512, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    say({"version": llama_cpp.__version__, "system": llama_cpp.llama_print_system_info().decode().strip()})
    for line in sys.stdin:
        command = json.loads(line)
        if "rows" in command:
            say(forwards(model, *command["rows"]))
        elif "reply" in command:
            say(reply(model, *command["reply"]))
        else:
            say({"seconds": prompt(model, command["prompt"])})


def say(answer: dict[str, Any]) -> None:
    """One line on stdout."""
    print(json.dumps(answer), flush=True)


def forwards(model: Any, ids: list[int], counts: list[int]) -> dict[str, Any]:
    """Seconds of a forward of each number of rows, all after the same ids."""
    model.reset()
    model.eval(ids)
    seconds = []
    for count in counts:
        model.n_tokens = len(ids)  # what lies behind is overwritten
        started = time.perf_counter()
        model.eval(ids[:count])
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds}


def reply(model: Any, ids: list[int], tokens: int) -> dict[str, Any]:
    """A greedy reply, and seconds from its first token to its last."""
    model.reset()
    model.eval(ids)
    out = [model.sample(temp=0.0)]
    started = time.perf_counter()
    while len(out) < tokens:
        model.eval(out[-1:])
        out.append(model.sample(temp=0.0))
    return {"ids": [int(i) for i in out], "seconds": time.perf_counter() - started}


def prompt(model: Any, ids: list[int]) -> float:
    """Seconds of a prompt."""
    model.reset()
    started = time.perf_counter()
    model.eval(ids)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
