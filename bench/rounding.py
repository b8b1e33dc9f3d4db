"""What rounding activations to 8 bits does to a real 135M model: perplexity, and how its choices move.

    python bench/rounding.py [--cache DIR] [--dtype float32] [--save]

The model is that of cpu.py, the text this repository's own documentation, in windows of 512 tokens. Per token after
the first 64 of a window: the loss under both, the Kullback-Leibler divergence from the unrounded distribution in nats,
and whether the most likely token is the same.
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
    names = [library().kernel_names().split(",")[0]]
    names.append(f"{names[0]} int8")
    losses: dict[str, list[float]] = {name: [] for name in names}
    divergence: list[float] = []
    same = 0
    for window in windows:
        found = []
        for name in names:
            use_kernels(name)
            logits = pair.target.forward(mx.array([window]), pair.target.make_states()).logits[0, CONTEXT:-1]
            wide = logits.astype(mx.float32)
            found.append(wide - mx.logsumexp(wide, axis=-1, keepdims=True))
            chosen = mx.take_along_axis(found[-1], mx.array(window[CONTEXT + 1 :])[:, None], axis=-1)
            losses[name] += (-chosen[:, 0]).tolist()
        exact, rounded = found
        divergence += mx.sum(mx.exp(exact) * (exact - rounded), axis=-1).tolist()
        same += int(mx.sum(mx.argmax(exact, axis=-1) == mx.argmax(rounded, axis=-1)).item())
    perplexity = [math.exp(sum(losses[name]) / len(losses[name])) for name in names]
    figures: dict[str, Any] = {
        "model": FILE,
        "dtype": options.dtype,
        "kernels": names,
        "tokens": len(divergence),
        "perplexity": [round(value, 4) for value in perplexity],
        "divergence": {"mean": sum(divergence) / len(divergence), "largest": max(divergence)},
        "same_choice": round(same / len(divergence), 4),
    }
    print(json.dumps(figures, indent=2), file=sys.stderr)
    finish("rounding", options, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
