"""Compare the exported checkpoint with the numbers `train_demo_pair.py reference` saved."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm import load

from mlx_spec.pair import load as load_pair
from mlx_spec.state import KVState, StateGroup

DEMO = Path(__file__).resolve().parent.parent / "src" / "mlx_spec_qwen35" / "demo" / "model"


def main() -> None:
    """Print the largest difference of the logits in float32 and as stored, of the target and of the head's steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reference", type=Path, help="reference.npz")
    parser.add_argument("--demo", type=Path, default=DEMO)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    saved = np.load(args.reference)
    ids = mx.array(saved["ids"])[None]
    model = load(str(args.demo))[0]
    report("target as stored (bfloat16)", model(ids)[0], saved["logits"])
    model.update(tree_map(lambda a: a.astype(mx.float32), model.parameters()))
    report("target cast to float32", model(ids)[0], saved["logits"])
    head(args.demo, ids, saved)


def head(demo: Path, ids: mx.array, saved: dict[str, np.ndarray]) -> None:
    """The plugin's drafter, unpacked and in float32, over the committed history and its own steps."""
    os.environ["MLX_SPEC_QUANTIZE_DRAFTER"] = "0"
    pair = load_pair(str(demo), str(demo), "mtp", probe=False, dtype="float32")
    drafter, wanted = pair.drafter, saved["head_logits"]
    drafter.model.update(tree_map(lambda a: a.astype(mx.float32), drafter.model.parameters()))
    steps, anchors = wanted.shape[:2]
    hidden = mx.array(saved["hidden"])[None]
    for anchor in (anchors // 3, anchors - 1):
        caches = StateGroup(KVState() for _ in drafter.model.head.layers)
        state, fed = hidden[:, : anchor + 1], ids[:, 1 : anchor + 2]
        for step in range(steps):
            seen, state = drafter._run(state, fed, caches)
            report(f"head, anchor {anchor}, step {step + 1}", drafter.logits(seen[:, -1]), wanted[step, anchor][None])
            state, fed = state[:, -1:], ids[:, anchor + 2 + step : anchor + 3 + step]


def report(name: str, found: mx.array, wanted: np.ndarray) -> None:
    """One line about two arrays of logits [L, V]."""
    have = np.asarray(found.astype(mx.float32))
    same = (have.argmax(-1) == wanted.argmax(-1)).mean()
    print(f"{name}: max |difference| {np.abs(have - wanted).max():.2e}, same argmax {same:.4f}")


if __name__ == "__main__":
    main()
