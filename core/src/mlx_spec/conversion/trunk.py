"""Which trunk a drafter head belongs to: a record in the head's file, compared when it meets a target.

The record holds a hash of the trunk the head was taken from and samples of its norm weights. A target is the same
trunk when its own hash is that one, or the one of the checkpoint it was converted from, which `spec convert` writes
into the files it makes. Where no hash says so (another tool quantised it), the norms do: packing weights leaves them
alone, but for a shift by 1 and the rounding of a cast, so norms that differ mean another trunk. Equal norms are shared
by fine-tunes that left them alone, which a head may serve, with less accepted.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..errors import Finding, LoadError
from ..heads import is_head, text_section
from ..partialfiles import listed_files
from ..tensorfiles import HEAD_STEMS, TensorInfo, read_header, read_metadata
from ..types import ModelRef

KEY, SOURCE_KEY = "mlx_spec.trunk", "mlx_spec.source"  # in the metadata of a head's file, and of a converted trunk's
VERSION = 1
NORMS, VALUES = 24, 8  # norm weights sampled, and values of each
TOLERANCE = 0.01  # of max(1, |w|): what bfloat16 rounds a weight near 1 to, and room
_SAMPLE = 64
_NORM = re.compile(r"(?:.*?\.)??(?P<key>layers\.\d+\..*norm.*\.weight)|(?:(?!.*layers\.).*\.)?(?P<last>norm\.weight)")
_TOWER = re.compile(r"(^|\.)(vision|visual|audio)")
UNRECORDED = "P32"
PASSING = ("P31", UNRECORDED)  # what `check_trunk` finds and lets through
Verdict = Literal["same", "alike", "other", "unknown"]


@dataclass(frozen=True, slots=True)
class Trunk:
    """What is recorded of one.

    Attributes:
        whole: hash of its tensors, "" when not all of its files were there.
        norms: norm weight -> (size, values at even distances), names without what is before `layers.`.
    """

    whole: str = ""
    norms: dict[str, tuple[int, list[float]]] = field(default_factory=dict)

    def as_text(self) -> str:
        """As the metadata of a head's file has it."""
        return json.dumps({"version": VERSION, **asdict(self)}, separators=(",", ":"))


def read_trunk(path: Path, config: Mapping[str, Any]) -> Trunk:
    """The trunk in a folder, from headers and a few bytes per tensor; files that are absent are left out."""
    files = listed_files(path)
    present = [file for file in files if file.exists()]
    layers = text_section(config).get("num_hidden_layers")
    index = {
        name: info
        for file in present
        if file.stem not in HEAD_STEMS
        for name, info in read_header(file).items()
        if not is_head(name, layers)
    }
    return Trunk(_hash(index) if len(present) == len(files) else "", _norms(index))


def _hash(index: Mapping[str, TensorInfo]) -> str:
    """sha256 over name, dtype, shape and a sample of every tensor, however they are spread over files."""
    digest = hashlib.sha256()
    for name, info in sorted(index.items()):
        digest.update(f"{name}\0{info.dtype}\0{info.shape}\0".encode())
        size = min(_SAMPLE, info.nbytes)
        digest.update(_bytes(info, max(info.nbytes - _SAMPLE, 0) // 2, size))
    return digest.hexdigest()


def _bytes(info: TensorInfo, start: int, count: int) -> bytes:
    with info.file.open("rb") as stream:
        stream.seek(info.offset + start)
        return stream.read(count)


def _norms(index: Mapping[str, TensorInfo]) -> dict[str, tuple[int, list[float]]]:
    """Samples of norm weights spread over the layers."""
    found = _norm_tensors(index)
    names = sorted(found, key=_by_number)
    chosen = names if len(names) <= NORMS else [names[i * len(names) // NORMS] for i in range(NORMS)]
    return {name: (found[name].size, [round(v, 6) for v in _values(found[name])]) for name in chosen}


def _norm_tensors(index: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Name without prefix -> norm weight, of the text stack."""
    out = {}
    for name, info in index.items():
        match = _NORM.fullmatch(name)
        if match and not _TOWER.search(name) and len(info.shape) == 1 and info.size and info.dtype in _FLOATS:
            out[match["key"] or match["last"]] = info
    return out


def _by_number(name: str) -> list[Any]:
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


_FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def _values(info: TensorInfo) -> list[float]:
    """`VALUES` of a vector at even distances."""
    data: np.ndarray = np.frombuffer(_bytes(info, 0, info.nbytes), _FLOATS[info.dtype])
    if info.dtype == "BF16":  # the upper half of a float32
        data = (data.astype(np.uint32) << 16).view(np.float32)
    step = max(info.size // VALUES, 1)
    return [float(v) for v in data[::step][:VALUES]]


# -- records ---------------------------------------------------------------------------------------------


def head_metadata(trunk: Trunk) -> dict[str, str]:
    """Metadata of a file that holds a head of this trunk."""
    return {KEY: trunk.as_text()}


def source_metadata(ref: ModelRef) -> dict[str, str]:
    """Metadata of files that a trunk is converted into: what it and its own sources are known by."""
    whole = read_trunk(ref.path, ref.config).whole
    before = [s for file in listed_files(ref.path) for s in _sources(file)]
    return {SOURCE_KEY: ",".join(dict.fromkeys([whole, *before]))}


def _sources(file: Path) -> list[str]:
    return [part for part in read_metadata(file).get(SOURCE_KEY, "").split(",") if part]


def recorded(files: Sequence[Path]) -> Trunk | None:
    """The record in the first of these files that has one, None without; LoadError for a damaged one."""
    for file in files:
        text = read_metadata(file).get(KEY)
        if text is not None:
            return _parse(file, text)
    return None


def _parse(file: Path, text: str) -> Trunk:
    try:
        data = json.loads(text)
        norms = {str(n): (int(size), [float(v) for v in values]) for n, (size, values) in data["norms"].items()}
        if data["version"] != VERSION or not isinstance(data["whole"], str):
            raise ValueError(f"version {data['version']}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(
            f"{KEY} of {file.name} in {file.parent}",
            found=f"a record that cannot be read ({error})",
            expected=f"a record of version {VERSION}",
            next_step="Extract the head again with `spec split-mtp`, or update mlx-spec",
            code="L63",
        ) from error
    return Trunk(data["whole"], norms)


_TABLE = re.compile(r"(?:^|\.)(?:embed_tokens|wte)\.weight$")  # drafters borrow it from their target


# -- comparing ---------------------------------------------------------------------------------------------


def compare(record: Trunk, path: Path, config: Mapping[str, Any]) -> tuple[Verdict, str]:
    """What a record says about the trunk in a folder, and what shows it."""
    files = [file for file in listed_files(path) if file.exists()]
    own = read_trunk(path, config)
    sources = {source for file in files for source in _sources(file)}
    if record.whole and record.whole in {own.whole, *sources}:
        return "same", "its tensors" if record.whole == own.whole else "what it was converted from"
    layers = text_section(config).get("num_hidden_layers")
    index = {n: i for file in files for n, i in read_header(file).items() if not is_head(n, layers)}
    here = _norm_tensors(index)
    both = [name for name in record.norms if name in here]
    for name in both:
        size, values = record.norms[name]
        if here[name].size != size:
            return "other", f"{name} has {here[name].size} values, {size} in the record"
        if not _near(values, _values(here[name])):
            return "other", f"{name} has other values"
    return ("alike", f"{len(both)} norms agree") if both else ("unknown", "no norm that both have")


def _near(left: Sequence[float], right: Sequence[float]) -> bool:
    """Equal but for a cast, and for the 1 that converted norms have more than published ones."""
    a, b = np.asarray(left), np.asarray(right)
    room = TOLERANCE * np.maximum(1.0, np.maximum(np.abs(a), np.abs(b)))
    return any(bool((np.abs(a - b - shift) <= room).all()) for shift in (0.0, 1.0, -1.0))


def check_trunk(target: ModelRef, drafter: ModelRef, extracted: bool = False) -> list[Finding]:
    """Findings about a head's record and the target it is to draft for.

    extracted: the drafter is of a kind that is made by extraction, so that a record is to be expected.
    """
    if not any(drafter.path.glob("*.safetensors*")):
        return []  # nothing that could be a head; what is missing is for those who load it to say
    own, beside = target.path == drafter.path, side_files(drafter.path)
    files = beside if own else [file for file in [*listed_files(drafter.path), *beside] if file.exists()]
    record, source = recorded(files), "recorded"
    subject = f"trunk of target {target.name} for the head in {drafter.name}"
    if record is None and not own and _is_whole(drafter, target, files):
        record, source = read_trunk(drafter.path, drafter.config), "the one beside the head"
    if record is None:
        return [unrecorded(subject)] if (own and beside) or (not own and extracted) else []
    verdict, why = compare(record, target.path, target.config)
    if verdict == "other":
        step = "Use the head of this very model: spec convert --keep-mtp keeps it, spec split-mtp extracts it"
        return [Finding("P30", "error", subject, f"another trunk than {source} ({why})", "the same one", step)]
    if verdict == "alike":
        step = "Nothing has to be done; a fine-tune of the recorded model may have fewer drafts accepted"
        return [
            Finding(
                "P31",
                "note",
                subject,
                f"other weights than {source}, with the same norms ({why})",
                "the same ones",
                step,
            )
        ]
    if verdict == "unknown":
        return [unrecorded(subject, f"nothing to compare ({why})")]
    return []


def _is_whole(drafter: ModelRef, target: ModelRef, files: Sequence[Path]) -> bool:
    """Whether the head lies in a whole checkpoint of the target's kind: then its own trunk is beside it."""
    if not files or drafter.model_type != target.model_type:
        return False
    return any(_TABLE.search(name) for file in files for name in read_header(file))


def unrecorded(subject: str, found: str = "no record of the trunk it belongs to") -> Finding:
    """The warning about a head of which nobody can say whether it is this target's."""
    step = "If hardly any draft is accepted, extract the head from the target's own checkpoint with spec split-mtp"
    return Finding("P32", "warning", subject, found, "the record that spec split-mtp and spec convert write", step)


def side_files(path: Path) -> list[Path]:
    """Files beside a model's own that hold a head."""
    own = set(listed_files(path))
    return [file for stem in HEAD_STEMS if (file := path / f"{stem}.safetensors").exists() and file not in own]
