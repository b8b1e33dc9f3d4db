"""`spec convert`: a GGUF file, or a safetensors checkpoint, becomes one that targets and mlx-lm load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError
from ..memory import size
from .output import Steps, note, on_terminal_stderr, print_json, print_table, progress
from .values import WHOLE, Folder

if TYPE_CHECKING:
    from ..conversion.checkpoint import Converted
    from ..gguf.convert import Conversion


@click.command("convert")
@click.argument("source")
@click.option("-o", "--out", required=True, type=Folder(path_type=Path), metavar="DIRECTORY", help="Folder to write.")
@click.option("--q-bits", type=WHOLE, help="Quantise to this many bits per weight (4 when only a mode is given).")
@click.option("--q-group-size", type=WHOLE, help="Weights per scale. Default: the mode's, 64 for affine.")
@click.option("--q-mode", type=click.Choice(["affine", "mxfp4", "nvfp4", "mxfp8"]), help="Default: affine.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Of scales and unquantised weights. Default: what config.json declares; float32 for a GGUF file, which keeps "
    "its values. bfloat16 rounds them by up to 1/256 and decoded 1.2 to 1.6 times as fast on CPU kernels with bfloat16 products.",
)
@click.option("--keep-mtp", is_flag=True, help="Keep the drafter head, in a file beside the model.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint that is there already.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(source: str, out: Path, dtype: str | None, overwrite: bool, as_json: bool, **quantise: Any) -> None:
    """Write SOURCE as an MLX checkpoint: a GGUF file, a safetensors directory, a hub id or demo:PLUGIN.

    A safetensors checkpoint is converted as mlx_lm.convert does it, quantised when --q-bits or --q-mode says so. It is
    written tensor by tensor; a run that was interrupted goes on after its last complete file when it is repeated.

    A GGUF file may be of architecture llama or gemma3. Weights of types Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K and Q5_K
    keep their codes: nothing is quantised again. Q6_K, F16, BF16 and F32 become floats.
    """
    if source.endswith(".gguf") or Path(source).is_file():
        _refuse_for_gguf(quantise)
        _convert_gguf(Path(source), out, dtype or "float32", overwrite, as_json)
    else:
        _convert_checkpoint(source, out, dtype, overwrite, as_json, quantise)


# -- safetensors -------------------------------------------------------------------------------------------


def _convert_checkpoint(
    source: str, out: Path, dtype: str | None, overwrite: bool, as_json: bool, quantise: dict[str, Any]
) -> None:
    from ..conversion.checkpoint import Options, Progress, convert
    from ..conversion.quantise import read_quantisation
    from ..loading import open_ref

    how = read_quantisation(quantise["q_bits"], quantise["q_group_size"], quantise["q_mode"])
    ref = open_ref(source)
    with progress(f"converting {ref.path.name}", total=1.0, quiet=as_json) as steps:
        told = Progress(Share(steps).on_bytes, file_note(as_json))
        try:
            made = convert(ref, out, Options(how, dtype, quantise["keep_mtp"]), overwrite, told)
        except KeyboardInterrupt:
            note("interrupted: the same command goes on after the files that are complete")
            raise
    if as_json:
        print_json(made)
    else:
        print_table(("", ""), checkpoint_rows(made))
        if made.left_out:
            note(f"left out: the drafter head under {', '.join(made.left_out)}; --keep-mtp keeps it")


class Share:
    """Bytes done of a total, as steps of a progress bar that ends at 1."""

    def __init__(self, steps: Steps):
        self._steps, self._before = steps, 0.0

    def on_bytes(self, done: int, total: int) -> None:
        """So many bytes of so many are done."""
        now = done / total if total else 1.0
        self._steps.advance(now - self._before)
        self._before = now


def file_note(quiet: bool) -> Any:
    """Says which file is complete, where no progress bar shows it."""
    if quiet or on_terminal_stderr():
        return lambda name: None
    return lambda name: note(f"wrote {name}")


def checkpoint_rows(made: Converted) -> list[tuple[str, str]]:
    """Label and value of each line; lines without a value are left out."""
    bits = ", ".join(f"{count} modules in {bits} bits" for bits, count in sorted(made.quantised.items()))
    lines = [
        ("written", str(made.out)),
        ("model_type", made.model_type),
        ("quantised", bits or "no"),
        ("dtype", made.dtype or "as stored"),
        ("weights", f"{size(made.nbytes)} in {made.files} file{'s' * (made.files > 1)}"),
        ("head", f"{made.head}; it drafts with --draft-kind mtp" if made.head else ""),
        ("resumed", "after an interrupted run" if made.resumed else ""),
    ]
    return [(label, value) for label, value in lines if value]


# -- GGUF --------------------------------------------------------------------------------------------------


def _refuse_for_gguf(quantise: dict[str, Any]) -> None:
    """UsageError for an option that says nothing about a GGUF file."""
    for name, value in quantise.items():
        if value:
            raise UsageError(
                "--" + name.replace("_", "-"),
                found=f"{'' if value is True else f'{value} '}for a GGUF file".strip(),
                expected="a directory of safetensors, for this option",
                next_step="Leave it out: weights of a GGUF file keep the codes they have",
                code="U68",
            )


def _convert_gguf(file: Path, out: Path, dtype: str, overwrite: bool, as_json: bool) -> None:
    from ..gguf.convert import convert_gguf

    with progress(f"converting {file.name}", total=1.0, quiet=as_json) as steps:
        made = convert_gguf(file, out, dtype, overwrite, Share(steps).on_bytes)
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
    bits = ", ".join(f"{layers} layer{'s' * (layers != 1)} in {bits} bits" for bits, layers in sorted(made.quantised.items()))
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
