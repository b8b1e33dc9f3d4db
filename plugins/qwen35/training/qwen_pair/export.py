"""Target and head as one directory in the published raw layout, written aside, then moved in place."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .settings import CONFIG, GENERATION, Work
from .train_head import load_head
from .train_target import load_target

SIZE_LIMIT = 5_000_000


def tensors(work: Work) -> dict[str, Tensor]:
    """Every tensor under its published name; norms as deltas, A_log in float32, the rest in bfloat16."""
    named = {
        f"model.language_model.{k.removeprefix('model.')}": v for k, v in load_target(work.target).state_dict().items()
    }
    named |= {f"mtp.{k}": v for k, v in load_head(work).state_dict().items()}
    return {k: (v if k.endswith("A_log") else v.to(torch.bfloat16)).contiguous() for k, v in named.items()}


def export(work: Work, out: Path, gemma: Path) -> None:
    """Write the directory `out`; refuse to go over the size limit."""
    aside, old = (out.parent / f".{out.name}-{os.getpid()}{end}" for end in ("", "-old"))
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    _json(aside / "config.json", CONFIG)
    _json(aside / "generation_config.json", GENERATION)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(gemma / name, aside / name)
    file = aside / "model.safetensors"
    save_file(tensors(work), str(file), metadata={"format": "pt"})
    file.chmod(0o644)  # save_file makes it readable by its owner only
    size = sum(p.stat().st_size for p in aside.iterdir())
    if size > SIZE_LIMIT:
        raise SystemExit(f"the checkpoint has {size} bytes, more than {SIZE_LIMIT}")
    if out.exists():
        out.rename(old)
    aside.rename(out)
    shutil.rmtree(old, ignore_errors=True)
    print(f"exported {size} bytes")


def _json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
