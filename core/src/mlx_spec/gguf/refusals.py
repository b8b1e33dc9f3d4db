"""The errors a GGUF file can meet, one function per meaning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import LoadError, shorten

AGAIN = "Use a file that was converted from the original model with a current llama.cpp"
OTHER = "Use a checkpoint of this model in MLX's own format instead"


def some(names: Sequence[str], limit: int = 4) -> str:
    """The first few of many names."""
    rest = f" (and {len(names) - limit} more)" if len(names) > limit else ""
    return ", ".join(shorten(name) for name in names[:limit]) + rest


def damaged(path: Path, found: str, expected: str) -> LoadError:
    """The file is no GGUF, or not as the format says."""
    return LoadError(
        f"GGUF file {path}",
        found=found,
        expected=expected,
        next_step="Download or copy the file again, and check its size and checksum",
        code="L50",
    )


def cut_short(path: Path, nbytes: int, whole: int, tensor: str) -> LoadError:
    """The header is there, and says that the tensors end at byte `whole`."""
    lack = whole - nbytes
    percent = 100 * lack / whole
    share = "less than 0.1%" if percent < 0.1 else "more than 99.9%" if percent > 99.9 else f"{percent:.1f}%"
    missing = f"{lack} {'is' if lack == 1 else 'are'} missing ({share})"
    return damaged(
        path, f"{nbytes} bytes, which end in {tensor}", f"at least {whole} bytes, as its header says: {missing}"
    )


def no_gguf(path: Path, magic: bytes, expected: bytes) -> LoadError:
    """A file that begins like something else; one that is named as a GGUF file may be a damaged one."""
    if path.suffix == ".gguf":
        return damaged(path, f"the first bytes {magic!r}", f"{expected!r}")
    return LoadError(
        f"file {path}",
        found=f"no GGUF file: its first bytes are {magic!r}",
        expected=f"{expected!r}, as a GGUF file begins, or a directory of safetensors",
        next_step="Give a GGUF file, or the directory that holds config.json and the safetensors files",
        code="L50",
    )


def architecture(path: Path, name: str, known: Iterable[str]) -> LoadError:
    """Nobody wrote down what this architecture's tensors mean."""
    return LoadError(
        f"architecture of {path}",
        found=shorten(repr(name)),
        expected=" or ".join(known),
        next_step=OTHER,
        code="L51",
    )


def tensor_types(path: Path, tensors: dict[str, list[str]], known: Iterable[str]) -> LoadError:
    """Tensors whose weights MLX cannot hold; `tensors`: type -> names."""
    found = "; ".join(f"{kind} in {len(names)} tensors ({some(names, 2)})" for kind, names in tensors.items())
    return LoadError(
        f"tensors of {path}",
        found=found,
        expected=", ".join(known),
        next_step="Use a file of the same model of type Q4_0, Q4_1, Q8_0, Q4_K_M, Q5_K_M, Q6_K, F16 or BF16",
        code="L52",
    )


def wrong(path: Path, what: str, found: str, expected: str) -> LoadError:
    """Metadata that is missing, of another type, or not what the tensors say."""
    return LoadError(f"{what} in {path}", found=found, expected=expected, next_step=AGAIN, code="L53")


def cannot(path: Path, found: str, expected: str, next_step: str = OTHER) -> LoadError:
    """The model has something that the checkpoint could not express."""
    return LoadError(f"model in {path}", found=found, expected=expected, next_step=next_step, code="L54")


def tokenizer(path: Path, found: str, expected: str, next_step: str = OTHER) -> LoadError:
    """A kind of tokenizer that is not converted."""
    return LoadError(f"tokenizer in {path}", found=found, expected=expected, next_step=next_step, code="L55")


def missing(path: Path, names: Sequence[str]) -> LoadError:
    """Tensors the architecture needs."""
    return LoadError(
        f"tensors of {path}",
        found=f"no {some(names)}",
        expected="every tensor of the architecture",
        next_step=AGAIN,
        code="L17",
    )


def not_finite(path: Path, name: str, dtype: str) -> LoadError:
    """Weights that are no numbers, or leave the range of the dtype they are written in."""
    return LoadError(
        f"tensor {name} of {path}",
        found="NaN or infinite values",
        expected=f"numbers that are finite in {dtype}",
        next_step="Give --dtype float32 if it was not; else the file is damaged: download it again",
        code="L18",
    )
