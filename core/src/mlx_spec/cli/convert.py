"""`spec convert`: a GGUF file becomes a checkpoint directory that targets and mlx-lm load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .inspect import size
from .output import note, print_json, print_table, progress

if TYPE_CHECKING:
    from ..gguf.convert import Conversion


@click.command("convert")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder to write.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Of scales and unquantised weights: float32 keeps the file's values and is fast on CPUs, the others may round "
    "and are fast on GPUs.",
)
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint that is there already.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(file: Path, out: Path, dtype: str, overwrite: bool, as_json: bool) -> None:
    """Write a GGUF FILE as an MLX checkpoint with tokenizer and chat template.

    Architectures llama and gemma3. Weights of types Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K and Q5_K keep their codes:
    nothing is quantised again. Q6_K, F16, BF16 and F32 become floats.
    """
    from ..gguf.convert import convert_gguf

    with progress(f"converting {file.name}", total=1.0) as steps:
        before = 0.0

        def on_bytes(done: int, total: int) -> None:
            nonlocal before
            steps.advance(done / total - before)
            before = done / total

        made = convert_gguf(file, out, dtype, overwrite, on_bytes)
    if as_json:
        print_json(made)
        return
    print_table(("", ""), rows(made))
    if made.rounded:
        worst = max(made.rounded.values())
        found = f"{len(made.rounded)} tensors by up to {worst:.1e} of their largest value"
        note(f"rounded to {made.dtype}: {found}; --dtype float32 keeps the file's values")
    if made.widened:
        names = ", ".join(made.widened[:3]) + (f" and {len(made.widened) - 3} more" if len(made.widened) > 3 else "")
        note(f"written as {made.dtype}, larger than in the file: {names} (Q6_K, which MLX has no layout for)")


def rows(made: Conversion) -> list[tuple[str, str]]:
    """Label and value of each line."""
    bits = ", ".join(f"{layers} layers in {bits} bits" for bits, layers in sorted(made.quantised.items()))
    types = ", ".join(f"{count} {name}" for name, count in sorted(made.types.items()))
    return [
        ("written", str(made.out)),
        ("model_type", made.model_type),
        ("tensors", types),
        ("quantised", f"{bits}, group size 32" if bits else "no"),
        ("dtype", made.dtype),
        ("weights", f"{size(made.nbytes)} in {made.files} file{'s' * (made.files > 1)}"),
        ("vocabulary", f"{made.tokens} tokens"),
    ]
