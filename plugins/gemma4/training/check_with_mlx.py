"""Compare the exported target, loaded by mlx-lm, with the numbers `train_demo_pair.py reference` saved."""

from __future__ import annotations

import argparse
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm import load

DEMO = Path(__file__).resolve().parent.parent / "src" / "mlx_spec_gemma4" / "demo"
TEXT = "def f(x):\n\treturn {'é': '\U0001f600'}  # \r\n\x00 end"


def main() -> None:
    """Print the largest difference of the logits in float32 and as stored, and check the tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reference", type=Path, help="reference.npz")
    parser.add_argument("--demo", type=Path, default=DEMO)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    saved = np.load(args.reference)
    model, tokenizer = load(str(args.demo / "target"))
    ids = mx.array(saved["ids"])[None]
    stored = np.asarray(model(ids)[0].astype(mx.float32))
    report("as stored (bfloat16)", stored, saved["logits"])
    model.update(tree_map(lambda a: a.astype(mx.float32), model.parameters()))
    report("cast to float32", np.asarray(model(ids)[0]), saved["logits"])
    ids_of_text = tokenizer.encode(TEXT)
    assert ids_of_text[0] == tokenizer.bos_token_id and ids_of_text.count(ids_of_text[0]) == 1
    assert tokenizer.decode(ids_of_text[1:]) == TEXT
    print("tokenizer: one <bos>, exact round trip, eos", sorted(tokenizer.eos_token_ids))


def report(name: str, found: np.ndarray, wanted: np.ndarray) -> None:
    """One line about two arrays of logits [L, V]."""
    same = (found.argmax(-1) == wanted.argmax(-1)).mean()
    print(f"{name}: max |difference| {np.abs(found - wanted).max():.2e}, same argmax {same:.4f}")


if __name__ == "__main__":
    main()
