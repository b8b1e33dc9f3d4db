"""Safetensors files of a model folder: headers, index, sizes, loading, fingerprint.

Everything here reads headers only, except `load_tensors`, `check_finite` and the samples of `fingerprint`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from .errors import LoadError

if TYPE_CHECKING:
    import mlx.core as mx

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
HEAD_STEMS = ("model-mtp-head", "mtp")  # files beside the model's that hold a drafter head alone
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors")
_SAMPLE_BYTES = 64
_AGAIN = "Download or copy the file again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: safetensors dtype name, shape, where it is, its size and byte position."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    nbytes: int
    offset: int  # absolute byte position in the file

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def tensor_index(path: Path, stem: str = "model") -> dict[str, TensorInfo]:
    """Tensors of a model folder by name, from headers only; every file is checked against its header.

    An index file decides which shards count, and other weight files are ignored. Without one, a single
    file `<stem>*.safetensors` or one complete set of numbered shards is taken.
    Raises LoadError naming file, found and expected.
    """
    files = weight_files(path, stem)
    index: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(file).items():
            if name in index:
                raise LoadError(
                    f"tensor {name} in {path}",
                    found=f"two copies, in {index[name].file.name} and {file.name}",
                    expected="each tensor in one file",
                    next_step="Remove the file that does not belong to the model",
                    code="L13",
                )
            index[name] = info
    for name, shard in weight_map(path, stem).items():
        if name not in index or index[name].file.name != shard:
            where = f"but it is in {index[name].file.name}" if name in index else "but it is in no shard"
            raise stale_index(path, stem, name, shard, where)
    return index


def stale_index(path: Path, stem: str, name: str, shard: str, where: str) -> LoadError:
    """The error for an index that lists a tensor where it is not."""
    return LoadError(
        f"{stem}.safetensors.index.json in {path}",
        found=f"tensor {name} listed in {shard}, {where}",
        expected="an index that matches its shards",
        next_step="The index is stale: download the index and the shards again from one revision",
        code="L12",
    )


def weight_files(path: Path, stem: str = "model") -> list[Path]:
    """Weight files that belong to the model, sorted; see `tensor_index` for which. Reads no header."""
    listed = sorted(set(weight_map(path, stem).values()))
    if listed:
        missing = [name for name in listed if not (path / name).exists()]
        if missing:
            raise LoadError(
                f"weights in {path}",
                found=f"no file {missing[0]}" + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""),
                expected=f"the {len(listed)} files named by {stem}.safetensors.index.json",
                next_step="Download the missing files, or remove a left-over index",
                code="L11",
            )
        return [path / name for name in listed]
    files = sorted(path.glob(f"{stem}*.safetensors"))
    return _without_index(path, [file for file in files if file.stem == stem or file.stem not in HEAD_STEMS], stem)


def head_index(path: Path) -> dict[str, TensorInfo]:
    """Tensors of `HEAD_STEMS` files that are no part of the model itself, by the names stored there.

    Headers only. Empty when there is no such file, or when the model's own index lists it.
    """
    files = [path / f"{stem}.safetensors" for stem in HEAD_STEMS]
    present = [file for file in files if file.exists()]
    if not present:
        return {}
    own = {path / name for name in weight_map(path, "model").values()}
    return {name: info for file in present if file not in own for name, info in read_header(file).items()}


def _without_index(path: Path, files: list[Path], stem: str) -> list[Path]:
    """One file, or one complete set of numbered shards; anything else is ambiguous."""
    if not files:
        others = sorted(f.name for f in path.glob("*.safetensors"))
        raise LoadError(
            f"weights in {path}",
            found=f"no weights but {', '.join(others[:4])}" if others else "no weights",
            expected=f"{stem}.safetensors, or {stem}-00001-of-0000N.safetensors and their index",
            next_step="Check the path, or download the missing files",
            code="L11",
        )
    if len(files) == 1 and not _SHARD.fullmatch(files[0].name):
        return files
    shards = [_SHARD.fullmatch(file.name) for file in files]
    sets = {(m["stem"], m["total"]) for m in shards if m is not None}
    if len(sets) != 1 or None in shards:
        raise LoadError(
            f"weights in {path}",
            found="several files and no index: " + ", ".join(f.name for f in files[:6]),
            expected=f"one file, one set of numbered shards, or {stem}.safetensors.index.json",
            next_step="Remove the files that do not belong to the model",
            code="L14",
        )
    total = int(next(iter(sets))[1])
    have = {int(m["number"]) for m in shards if m is not None}
    absent = sorted(set(range(1, total + 1)) - have)
    if absent:
        raise LoadError(
            f"weights in {path}",
            found=f"{len(have)} of {total} shards; number {absent[0]} is missing",
            expected=f"all {total} shards",
            next_step="Download the missing files",
            code="L11",
        )
    return files


def weight_map(path: Path, stem: str) -> dict[str, str]:
    """Tensor name -> shard file of the index file; empty without one."""
    file = path / f"{stem}.safetensors.index.json"
    if not file.exists():
        return {}
    content = read_json(file)
    weight_map = content.get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    bad = [n for n in names if not isinstance(n, str) or "/" in n or "\\" in n or n in ("", ".", "..")]
    if not isinstance(weight_map, dict) or not weight_map or bad:
        raise LoadError(
            f"{file.name} in {path}",
            found=f"the file name {bad[0]!r}" if bad else "no weight_map with entries",
            expected="weight_map: tensor name -> name of a file in the same directory",
            next_step=_AGAIN,
            code="L12",
        )
    return weight_map


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; LoadError naming the file otherwise."""
    try:
        check_regular(file)
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(file, error) from error
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LoadError(
            f"{file.name} in {file.parent}",
            found=f"text that is not JSON ({reason})",
            expected="a JSON object",
            next_step=_AGAIN,
            code="L04",
        ) from error
    if not isinstance(content, dict):
        raise LoadError(
            f"{file.name} in {file.parent}",
            found=f"a JSON {type(content).__name__}",
            expected="a JSON object",
            next_step=_AGAIN,
            code="L04",
        )
    return content


def check_regular(file: Path) -> int:
    """Bytes of a file; OSError for a pipe, socket or device, of which a reader might wait for ever."""
    found = file.stat()
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise OSError("a pipe, socket or device")
    return found.st_size


def unreadable(file: Path, error: OSError) -> LoadError:
    """The error for a file the system will not let us read."""
    return LoadError(
        f"{file.name} in {file.parent}",
        found=error.strerror or str(error),
        expected="a readable file",
        next_step="Check the path, that it is a file and that you may read it",
        code="L03",
    )


# -- one file ------------------------------------------------------------------------------------------


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Tensors of one safetensors file, checked: a file shorter or longer than its header says is refused."""
    try:
        size = check_regular(file)
        with file.open("rb") as stream:
            length, header = _header_json(file, stream, size)
    except OSError as error:
        raise unreadable(file, error) from error
    start = 8 + length
    tensors = {name: _tensor(file, name, entry, start) for name, entry in header.items() if name != "__metadata__"}
    expected = _data_end(file, tensors, start)
    if size != expected:
        raise _bad_file(file, f"{size} bytes", f"{expected} bytes (header and data)", code="L15")
    return tensors


def read_metadata(file: Path) -> dict[str, str]:
    """What a safetensors file says about itself, e.g. {"format": "mlx"}; {} for nothing."""
    try:
        size = check_regular(file)
        with file.open("rb") as stream:
            metadata = _header_json(file, stream, size)[1].get("__metadata__")
    except OSError as error:
        raise unreadable(file, error) from error
    return {str(k): str(v) for k, v in metadata.items()} if isinstance(metadata, dict) else {}


def _bad_file(file: Path, found: str, expected: str, code: str = "L16") -> LoadError:
    return LoadError(f"{file.name} in {file.parent}", found=found, expected=expected, next_step=_AGAIN, code=code)


def _header_json(file: Path, stream: BinaryIO, size: int) -> tuple[int, dict[str, Any]]:
    """Header length and parsed header of an open file."""
    head = stream.read(8)
    if len(head) < 8:
        raise _bad_file(file, f"{size} bytes", "a safetensors file of at least 8 bytes", code="L15")
    length = int.from_bytes(head, "little")
    if length > MAX_HEADER_BYTES:
        raise _bad_file(file, f"a header length of {length}", f"at most {MAX_HEADER_BYTES}: a safetensors file")
    if 8 + length > size:
        raise _bad_file(file, f"{size} bytes", f"at least {8 + length} bytes (header)", code="L15")
    try:
        header = json.loads(stream.read(length).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _bad_file(file, "a header that is not JSON", "a safetensors file") from error
    if not isinstance(header, dict):
        raise _bad_file(file, "a header that is not a JSON object", "a safetensors file")
    return length, header


def _tensor(file: Path, name: str, entry: Any, start: int) -> TensorInfo:
    """One header entry, checked for types, dtype and span."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not (_ints(shape) and _ints(span) and len(span) == 2 and isinstance(dtype, str)):
        raise _bad_file(file, f"tensor {name} described as {entry}", "dtype, shape and data_offsets")
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise _bad_file(file, f"tensor {name} of dtype {dtype!r}", "one of " + ", ".join(sorted(DTYPE_BITS)))
    nbytes = math.prod(shape) * bits // 8
    if span[1] - span[0] != nbytes:
        raise _bad_file(
            file, f"tensor {name} with {span[1] - span[0]} bytes", f"{nbytes} bytes for {dtype} {list(shape)}"
        )
    return TensorInfo(dtype, tuple(shape), file, nbytes, start + span[0])


def _ints(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _data_end(file: Path, tensors: Mapping[str, TensorInfo], start: int) -> int:
    """File size the header implies; spans must tile the data without gap or overlap."""
    end = start
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset != end:
            raise _bad_file(file, f"tensor {name} at byte {info.offset}", f"byte {end}, where the one before it ends")
        end = info.offset + info.nbytes
    return end


# -- contents ------------------------------------------------------------------------------------------


def load_tensors(
    path: Path, names: Collection[str] | Callable[[str], bool], stem: str = "model"
) -> dict[str, mx.array]:
    """Chosen tensors as lazy mlx arrays; only files that hold one are opened.

    names: exact names (a missing one is a LoadError) or a predicate on the name.
    """
    return load_indexed(path, names, tensor_index(path, stem))


def load_indexed(
    path: Path, names: Collection[str] | Callable[[str], bool], index: Mapping[str, TensorInfo]
) -> dict[str, mx.array]:
    """As `load_tensors`, of an index that was read already; `path` is only named in messages."""
    wanted = {name for name in index if names(name)} if callable(names) else set(names)
    absent = sorted(wanted - index.keys())
    if absent:
        raise LoadError(
            f"tensors in {path}",
            found=f"no {', '.join(absent[:5])}" + (f" (and {len(absent) - 5} more)" if len(absent) > 5 else ""),
            expected=f"{len(wanted)} tensors by name",
            next_step="Use a complete checkpoint of this kind",
            code="L17",
        )
    return {
        name: array
        for file in sorted({index[name].file for name in wanted})
        for name, array in _load_file(file).items()
        if name in wanted
    }


def _load_file(file: Path) -> dict[str, mx.array]:
    """All tensors of one file, lazy."""
    import mlx.core as mx

    try:
        loaded: Any = mx.load(str(file), format="safetensors")
    except Exception as error:  # mlx raises RuntimeError and ValueError for a dtype it cannot hold
        raise _bad_file(file, f"a file mlx cannot read ({error})", "tensors of dtypes mlx supports") from error
    return dict(loaded)


def check_finite(tensors: Mapping[str, mx.array], what: str = "weights") -> None:
    """LoadError naming the first tensor, by name, that holds a NaN or an infinity; one host sync."""
    import mlx.core as mx

    names = sorted(name for name, array in tensors.items() if mx.issubdtype(array.dtype, mx.floating))
    if not names:
        return
    finite: Any = mx.stack([mx.isfinite(tensors[name]).all() for name in names]).tolist()
    bad = [name for name, ok in zip(names, finite, strict=True) if not ok]
    if bad:
        raise LoadError(
            what,
            found=f"NaN or infinite values in {bad[0]}"
            + (f" (and {len(bad) - 1} more tensors)" if len(bad) > 1 else ""),
            expected="finite numbers",
            next_step="The file is damaged or was converted wrongly: download or convert it again",
            code="L18",
        )


def fingerprint(path: Path, stem: str = "model") -> str:
    """sha256 (hex) over config.json and, per weight file, name, size, header and a sample of each tensor.

    A separate head file counts as a weight file.

    Reads 64 bytes from the middle of each tensor, so it costs milliseconds for files of any size.
    """
    digest = hashlib.sha256()
    config = path / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    index = {**(head_index(path) if stem == "model" else {}), **tensor_index(path, stem)}
    for file in sorted({info.file for info in index.values()}):
        inside = sorted((i for i in index.values() if i.file == file), key=lambda i: i.offset)
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
            digest.update(stream.read(length))
            for info in inside:
                stream.seek(info.offset + max(info.nbytes - _SAMPLE_BYTES, 0) // 2)
                digest.update(stream.read(min(_SAMPLE_BYTES, info.nbytes)))
    return digest.hexdigest()
