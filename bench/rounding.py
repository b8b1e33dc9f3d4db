"""What rounding activations does to a real 135M model: perplexity, and how its choices move.

    python bench/rounding.py [--cache DIR] [--dtype float32] [--save]

The model is that of cpu.py, the text this repository's own documentation, in windows of 512 tokens. Per token after
the first 64 of a window: the loss, the Kullback-Leibler divergence from the unrounded distribution in nats, and
whether the most likely token is the same.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from common import finish, parser
from cpu import FILE, convert, fetch

from mlx_spec.pair import load
from mlx_spec.settings import get_settings
from mlx_spec_cpu.native import library, use_kernels

WINDOW, CONTEXT = 512, 64
DOCS = Path(__file__).resolve().parent.parent / "docs"


class Way:
    """What one set of kernels found."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.divergence: list[float] = []
        self.same = 0

    def add(self, logits: mx.array, following: list[int], exact: mx.array | None) -> mx.array:
        """Count logits (T, V) of the tokens before `following`.

        `exact`: log-probabilities without rounding, None where `logits` are those; they are returned.
        """
        wide = logits.astype(mx.float32)
        found = wide - mx.logsumexp(wide, axis=-1, keepdims=True)
        exact = found if exact is None else exact
        self.losses += (-mx.take_along_axis(found, mx.array(following)[:, None], axis=-1)[:, 0]).tolist()
        self.divergence += mx.sum(mx.exp(exact) * (exact - found), axis=-1).tolist()
        self.same += int(mx.sum(mx.argmax(exact, axis=-1) == mx.argmax(found, axis=-1)).item())
        return exact

    def figures(self) -> dict[str, Any]:
        """Means over all tokens."""
        count = len(self.losses)
        return {
            "perplexity": round(math.exp(sum(self.losses) / count), 4),
            "divergence": {"mean": sum(self.divergence) / count, "largest": max(self.divergence)},
            "same_choice": round(self.same / count, 4),
        }


def main() -> int:
    """Measure and print."""
    arguments = parser(__doc__, "rounding", runs=24, tokens=WINDOW)
    arguments.add_argument("--dtype", default="bfloat16", help="of `spec convert`")
    arguments.add_argument("--cache", type=Path, help="folder for the model; default: bench in the cache of mlx-spec")
    options = arguments.parse_args()
    folder = options.cache or get_settings().cache_dir / "bench"
    pair = load(str(convert(fetch(folder), folder, options.dtype)), probe=False)
    text = "\n\n".join(path.read_text() for path in sorted(DOCS.glob("*.md")))
    ids = pair.tokenizer.encode(text)
    windows = [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW, WINDOW)][: options.runs]
    best = library().kernel_names().split(",")[0]
    ways = {name: Way() for name in (best, f"{best} int16", f"{best} int8")}
    for window in windows:
        exact = None
        for name, way in ways.items():
            use_kernels(name)
            logits = pair.target.forward(mx.array([window]), pair.target.make_states()).logits[0, CONTEXT:-1]
            exact = way.add(logits, window[CONTEXT + 1 :], exact)
    figures: dict[str, Any] = {
        "model": FILE,
        "dtype": options.dtype,
        "tokens": len(ways[best].losses),
        "kernels": {name: way.figures() for name, way in ways.items()},
    }
    print(json.dumps(figures, indent=2), file=sys.stderr)
    finish("rounding", options, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
