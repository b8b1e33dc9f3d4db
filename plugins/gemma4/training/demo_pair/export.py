"""The pair as two checkpoint directories in the published layout, written aside and then moved in place."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from .settings import DRAFTER, GENERATION, TARGET, Work
from .train_drafter import load_drafter
from .train_target import load_target

SIZE_LIMIT = 7_900_000


def export(work: Work, out: Path) -> None:
    """Write out/target and out/drafter; refuse to go over the size limit."""
    aside = out.parent / f".{out.name}-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    target, drafter = aside / "target", aside / "drafter"
    _checkpoint(target, TARGET, load_target(work.target))
    _json(target / "generation_config.json", GENERATION)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(work.tokenizer / name, target / name)
    _checkpoint(drafter, DRAFTER, load_drafter(work))
    size = sum(p.stat().st_size for p in aside.rglob("*") if p.is_file())
    if size > SIZE_LIMIT:
        raise SystemExit(f"the pair has {size} bytes, more than {SIZE_LIMIT}")
    _move(aside, out)
    print(f"exported {size} bytes")


def _checkpoint(directory: Path, config: dict[str, Any], model: nn.Module) -> None:
    directory.mkdir(parents=True)
    _json(directory / "config.json", config)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    file = directory / "model.safetensors"
    save_file(tensors, str(file), metadata={"format": "pt"})
    file.chmod(0o644)  # save_file makes it readable by its owner only


def _json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _move(aside: Path, out: Path) -> None:
    """Replace out/target and out/drafter, leaving other files of `out` alone."""
    out.mkdir(parents=True, exist_ok=True)
    for part in aside.iterdir():
        old = aside.with_name(f"{aside.name}-{part.name}-old")
        if (out / part.name).exists():
            (out / part.name).rename(old)
        part.rename(out / part.name)
        shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(aside)
