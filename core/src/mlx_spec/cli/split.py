"""`spec split-mtp`: the drafter head of a checkpoint, as a directory for --draft-model."""

from __future__ import annotations

from pathlib import Path

import click

from ..memory import size
from .convert import Share
from .output import note, print_json, print_table, progress
from .values import WHOLE, Folder, Whole


@click.command("split-mtp")
@click.option(
    "-m", "--model", required=True, metavar="CKPT", help="Checkpoint with a head: directory, hub id, demo:PLUGIN."
)
@click.option("-o", "--out", required=True, type=Folder(path_type=Path), metavar="DIRECTORY", help="Folder to write.")
@click.option("--q-bits", type=WHOLE, help="Quantise the head to this many bits. Default: weights stay as they are.")
@click.option("--q-group-size", type=WHOLE, help="Weights per scale. Default: the mode's, 64 for affine.")
@click.option("--q-mode", type=click.Choice(["affine", "mxfp4", "nvfp4", "mxfp8"]), help="Default: affine.")
@click.option("--block-size", type=Whole(2, 64), help="L to declare, anchor counted. Default: layers of the head + 2.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str,
    out: Path,
    q_bits: int | None,
    q_group_size: int | None,
    q_mode: str | None,
    block_size: int | None,
    as_json: bool,
) -> None:
    """Extract the drafter head that a checkpoint carries into a directory for --draft-model.

    Only the files that hold tensors of the head are read. The directory records which trunk the head belongs to, so
    that it is refused with another one. It appears when it is complete.
    """
    from ..conversion.head import split
    from ..conversion.quantise import read_quantisation
    from ..heads import is_head
    from ..plugins import get_manager
    from ..refs import resolve_part

    how = read_quantisation(q_bits, q_group_size, q_mode)
    get_manager().check_asked()
    with progress("extracting the head", total=1.0, quiet=as_json) as steps:
        made = split(resolve_part(model, is_head), out, how, block_size, Share(steps).on_bytes)
    if as_json:
        print_json(made)
        return
    print_table(
        ("", ""),
        [
            ("written", str(made.out)),
            ("model_type", made.model_type),
            ("kind", made.kind),
            ("block size", f"L={made.block_size}" if made.block_size else "not declared"),
            ("weights", f"{made.tensors} tensors, {size(made.nbytes)}"),
            ("read", ", ".join(made.shards)),
        ],
    )
    note(f"use it with --draft-model {made.out}")
