"""A drafter head out of a checkpoint, into a directory of its own or a file beside a converted model.

What a head is made of is the family's business: its plugin answers `spec_split_drafter`, with `write_head` as its pen.
Core gives it a folder, and the finished directory its name.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint import read_config
from ..errors import LoadError, RefusedError
from ..heads import counted, is_head, promised_layers, text_section
from ..partialfiles import select_index
from ..tensorfiles import TensorInfo, head_index, tensor_index
from ..types import DrafterCard, ModelRef
from .quantise import Quantisation
from .staging import Staging, check_output, dumps
from .stream import Arrays, write_file
from .trunk import head_metadata, read_trunk

if TYPE_CHECKING:
    import mlx.core as mx

HEAD_FILE, PREFIX = "mtp.safetensors", "mtp."
"""File that holds a kept head, and what its tensors' names begin with. mlx-lm reads `model*.safetensors` alone."""
APART = "mtplx_mtp_quantization"
"""Key of config.json for a packed head beside a model that is not packed; mlx-vlm and MTPLX read it too."""


@dataclass(slots=True)
class SplitHead:
    """A drafter directory that was written."""

    source: Path
    out: Path
    model_type: str
    kind: str
    block_size: int | None
    tensors: int
    nbytes: int
    shards: list[str]


def write_head(
    out: Path, tensors: Mapping[str, mx.array], config: Mapping[str, Any], options: Mapping[str, object]
) -> Path:
    """Write a drafter directory: config.json and model.safetensors; for `spec_split_drafter`.

    tensors: lazy arrays; each is computed, written and let go before the next one. A plugin should not hold them.
    options: those the hook received; the record of the trunk and the listener for progress are taken from them.
    """
    tick: Any = options.get("tick") or (lambda nbytes: None)
    metadata: Any = options.get("metadata") or {}
    out.mkdir(parents=True, exist_ok=True)
    arrays = Arrays(tensors)
    write_file(out / "model.safetensors", arrays, arrays.entries, metadata, tick)
    (out / "config.json").write_text(dumps(dict(sorted(config.items()))), encoding="utf-8")
    return out


def split(
    ref: ModelRef,
    out: Path,
    quantisation: Quantisation | None = None,
    block_size: int | None = None,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> SplitHead:
    """Extract the head of `ref` into the drafter directory `out`: all of it, or nothing.

    Only the files that hold tensors of the head are read, and those of the trunk that are there for its record.

    Raises LoadError where there is no head, or nobody here who can extract it, UsageError for an output that cannot be,
    RefusedError when the disk is full.
    """
    out = check_output(ref.path, out)
    index = head_tensors(ref)
    total = sum(info.nbytes for info in index.values())
    done = 0

    def on_bytes(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        tick(min(done, total), total)

    with Staging(out, None) as staging:
        staging.check_room(total)
        card = call_plugin(ref, staging.folder, quantisation, None, block_size, on_bytes)
        made = tensor_index(staging.folder)
        staging.finish()
    return SplitHead(
        source=ref.path,
        out=out,
        model_type=card.model_type,
        kind=card.kind,
        block_size=card.block_size,
        tensors=len(made),
        nbytes=sum(info.nbytes for info in made.values()),
        shards=sorted({info.file.name for info in index.values()}),
    )


def head_tensors(ref: ModelRef) -> dict[str, TensorInfo]:
    """Tensors of the heads in a checkpoint, from the files that hold them; LoadError without any."""
    layers = text_section(ref.config).get("num_hidden_layers")
    index = select_index(ref.path, lambda name: is_head(name, layers))
    index = index or head_index(ref.path)
    if not index:
        promised = promised_layers(ref.config)
        raise LoadError(
            f"head of {ref.name} (model_type {ref.model_type})",
            found=f"no head tensors{f' (config.json declares {counted(promised)})' if promised else ''}",
            expected="a checkpoint that carries a drafter head",
            next_step="Take the original checkpoint: conversions by other tools drop the head"
            if promised
            else "This checkpoint never had one: give a drafter made for it with --draft-model, or use prompt-lookup",
            code="L20",
        )
    return index


def call_plugin(
    ref: ModelRef,
    out: Path,
    quantisation: Quantisation | None,
    dtype: str | None,
    block_size: int | None,
    tick: Callable[[int], None],
) -> DrafterCard:
    """Have the family's plugin write the drafter directory `out`; returns the card it then has."""
    from ..plugins import get_manager

    manager = get_manager()
    owner = manager.registry.target_owner(ref.model_type)
    how = quantisation
    options: dict[str, object] = {
        "q_bits": how.bits if how else None,
        "q_group_size": how.group_size if how else None,
        "q_mode": how.mode if how else None,
        "dtype": dtype,
        "block_size": block_size,
        "metadata": head_metadata(read_trunk(ref.path, ref.config)),
        "tick": tick,
    }
    call = manager.owner_call("spec_split_drafter", owner) if owner is not None else None
    if call is None or call(ref=ref, out=out, options=options) is None:
        raise LoadError(
            f"head of {ref.name} (model_type {ref.model_type})",
            found=f"plugin {owner}, which extracts none" if owner else "no plugin that serves this model_type",
            expected="an installed plugin that answers spec_split_drafter",
            next_step="Install the family's plugin (`spec plugins` lists what is installed), or update it",
            code="L62",
        )
    written = ModelRef(str(out), out, read_config(out))
    found = manager.registry.drafter_for(written)
    if found is None:
        raise RefusedError(
            f"head of {ref.name}",
            found=f"a directory of model_type {written.model_type!r} that no plugin takes for a drafter",
            expected="a drafter directory",
            next_step=f"Report this to the authors of plugin {owner}",
            code="L64",
        )
    return found[1]


# -- kept beside a model -------------------------------------------------------------------------------------


@dataclass(slots=True)
class KeptHead:
    """A head in a file beside a converted model; `settings` goes into its config.json."""

    file: str
    nbytes: int
    settings: dict[str, Any]


def keep(
    ref: ModelRef, staging: Staging, quantisation: Quantisation | None, dtype: str | None, tick: Callable[[int], None]
) -> None:
    """Write the heads of `ref` as `HEAD_FILE`, with the record of their trunk, unless it is there."""
    import mlx.core as mx

    if staging.has(HEAD_FILE):
        return
    scratch = staging.folder / ".head"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        call_plugin(ref, scratch, quantisation, dtype, None, tick)
        loaded: Any = mx.load(str(scratch / "model.safetensors"))
        arrays = Arrays({PREFIX + name: array for name, array in loaded.items()})
        loaded.clear()
        trunk = head_metadata(read_trunk(ref.path, ref.config))
        packing = dumps(packing_of(read_config(scratch)))
        with staging.file(HEAD_FILE) as path:
            write_file(path, arrays, arrays.entries, {**trunk, PACKING: packing}, lambda nbytes: None)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


PACKING = "mlx_spec.quantization"  # in the metadata of a kept head: how it is packed, for a run that goes on


def packing_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantisation settings of a drafter's config.json, {} without any."""
    settings = config.get("quantization")
    return dict(settings) if isinstance(settings, dict) else {}


def settings_with_head(config: dict[str, Any], packing: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a model with a head beside it that is packed as `packing` says."""
    if not packing:
        return config
    own = config.get("quantization")
    if not isinstance(own, dict):
        return {**config, APART: dict(packing)}
    modules = {PREFIX + name: how for name, how in packing.items() if isinstance(how, dict)}
    return {**config, "quantization": {**own, **modules}}
