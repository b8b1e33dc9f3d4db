"""From what a user types to a local folder: a path, or a hub id looked up offline first."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from .checkpoint import read_config
from .demos import DEMO, demo_folder
from .errors import MODEL_NAME, LoadError, UsageError
from .types import ModelRef

WANTED = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
)  # weights and tokenizers; never code: a checkpoint's own Python is not run

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w][\w.-]*(@[\w][\w./-]*)?", re.ASCII)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_EXPECTED = "a model directory, a hub id of the form owner/name, or demo:PLUGIN"


def resolve(
    name: str | Path, *, download: bool = True, root: Path | None = None, config: bool = True, drafter: bool = False
) -> ModelRef:
    """Find the folder of a model: a local directory, a hub id (`owner/name[@revision]`) or `demo:PLUGIN`.

    Args:
        download: fetch a hub id that is not in the local cache.
        root: when given, only folders inside it are opened (a server's model root) and nothing is fetched.
        config: read config.json into the reference; off for tools that inspect any directory.
        drafter: which folder of a bundled pair is meant, the target's or the drafter's.

    Raises UsageError for a name that is neither, LoadError when nothing usable is found.
    """
    text = str(name)
    if text.startswith(DEMO) and root is None:
        path = demo_folder(text, drafter)
        return ModelRef(name=text, path=path, config=read_config(path) if config else {})
    _refuse_bad_name(text)
    path = _inside(text, root) if root is not None else _at_home(text)
    if not _is_dir(path):
        path = _from_hub(text, path, download and root is None)
    return ModelRef(name=text, path=path, config=read_config(path) if config else {})


def resolve_part(name: str, wanted: Callable[[str], bool]) -> ModelRef:
    """As `resolve`, for who needs only tensors `wanted` by name: no other file of a hub id is fetched.

    Files that hold a drafter head beside the model are fetched too, a model without an index whole.
    """
    from .tensorfiles import HEAD_STEMS, weight_map

    if name.startswith(DEMO):
        return resolve(name)
    _refuse_bad_name(name)
    if _is_dir(_at_home(name)) or not _HUB_ID.fullmatch(name):
        return resolve(name)
    repo, _, revision = name.partition("@")
    cached = _cached(repo, revision or None)
    if cached is not None and is_complete(cached):
        return resolve(name)
    small = ("config.json", "*.index.json")
    index = weight_map(_download(repo, revision or None, small), "model")
    shards = sorted({file for tensor, file in index.items() if wanted(tensor)}) if index else ["*.safetensors"]
    beside = [f"{stem}.safetensors" for stem in HEAD_STEMS]
    path = _download(repo, revision or None, [*small, *beside, *shards])
    return ModelRef(name=name, path=path, config=read_config(path))


def _refuse_bad_name(text: str) -> None:
    """Names that can be neither a path nor a hub id."""
    if not text.strip():
        raise UsageError(MODEL_NAME, found="an empty name", expected=_EXPECTED, next_step="Name a model", code="U01")
    if "\0" in text:
        raise UsageError(
            MODEL_NAME, found=f"a NUL byte in {text!r}", expected=_EXPECTED, next_step="Remove it", code="U01"
        )
    if _SCHEME.match(text):
        raise UsageError(
            MODEL_NAME,
            found=f"the URL {text!r}",
            expected=_EXPECTED,
            next_step="Give the path without a scheme, or the hub id alone",
            code="U01",
        )


def _at_home(text: str) -> Path:
    """`text` as a path, a leading ~ replaced; it stays where nobody has such a home."""
    try:
        return Path(text).expanduser()
    except RuntimeError:  # no such home; looking the path up will say that it does not exist
        return Path(text)


def _inside(text: str, root: Path) -> Path:
    """`text` as a folder below root; UsageError when it leaves it."""
    base = root.resolve()
    path = (base / text).resolve()
    if text.startswith("~") or (path != base and base not in path.parents):
        raise UsageError(
            MODEL_NAME,
            found=f"{text!r}, which is outside the model root",
            expected="the name of a folder inside the model root",
            next_step="Name a model that is being served",
            code="U02",
        )
    return path


def _is_dir(path: Path) -> bool:
    """True for a directory; LoadError for a file or an unreadable path."""
    try:
        if path.is_file():
            gguf = path.suffix == ".gguf"
            raise LoadError(
                f"model {path}",
                found="a file",
                expected="a directory with config.json and safetensors files",
                next_step=f"Make one of it: spec convert {path} -o DIR" if gguf else "Give the directory that holds it",
                code="L01",
            )
        return path.is_dir()
    except OSError as error:
        raise LoadError(
            f"model {path}",
            found=error.strerror or str(error),
            expected="a readable directory",
            next_step="Check the path and its permissions",
            code="L01",
        ) from error


def _from_hub(text: str, path: Path, download: bool) -> Path:
    """Folder of a hub id, from the cache when complete, else downloaded."""
    if not _HUB_ID.fullmatch(text) or ".." in text:
        raise _not_found(text, path)
    repo, _, revision = text.partition("@")
    cached = _cached(repo, revision or None)
    if cached is not None and (is_complete(cached) or not download):
        return cached
    if not download:
        raise LoadError(
            f"model {text}",
            found="neither a directory nor a downloaded model",
            expected=_EXPECTED + " that is on this machine",
            next_step=f"Download it with `hf download {text}`",
            code="L02",
        )
    return _download(repo, revision or None)


def _not_found(text: str, path: Path) -> UsageError | LoadError:
    """The error for a name that is no directory and no hub id."""
    if text.startswith(("/", ".", "~")) or "/" not in text:
        return LoadError(
            f"model {text}", found=f"no directory {path}", expected=_EXPECTED, next_step="Check the path", code="L01"
        )
    return UsageError(
        MODEL_NAME,
        found=f"{text!r}, which is no directory and no hub id",
        expected=_EXPECTED,
        next_step="Check the spelling",
        code="U01",
    )


def is_complete(path: Path) -> bool:
    """True when config.json and all weight files its index names are there."""
    from .tensorfiles import weight_files

    if not (path / "config.json").is_file():
        return False
    try:
        return bool(weight_files(path))
    except LoadError:  # missing or damaged: not complete, and loading it says why
        return False


def _cached(repo: str, revision: str | None) -> Path | None:
    """Snapshot folder in the local hub cache, complete or not; None when there is none."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=list(WANTED)))
    except (OSError, ValueError):  # the hub's "not in the cache" errors derive from these
        return None


def _download(repo: str, revision: str | None, patterns: Sequence[str] = WANTED) -> Path:
    """Fetch config, tokenizer and weights of a hub repository; every failure becomes a LoadError."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # the hub client raises its own, requests' and OS errors alike
        raise _hub_error(repo, revision, error) from error


def _hub_error(repo: str, revision: str | None, error: Exception) -> LoadError:
    """Say in one line why a download failed."""
    from huggingface_hub import errors

    reasons: tuple[tuple[str, str, str], ...] = (
        ("GatedRepoError", "a gated repository", "Accept its terms on the hub and log in with `hf auth login`"),
        ("RepositoryNotFoundError", "no such repository", "Check the spelling, or log in if it is private"),
        ("RevisionNotFoundError", f"no revision {revision!r}", "Leave out the revision, or name one that exists"),
        ("OfflineModeIsEnabled", "offline mode and no cached copy", "Download it while online, or give a directory"),
        ("LocalEntryNotFoundError", "no connection and no cached copy", "Connect and retry, or give a directory"),
    )
    for name, found, step in reasons:
        kind = getattr(errors, name, None)
        if kind is not None and isinstance(error, kind):
            return LoadError(f"model {repo}", found=found, expected=_EXPECTED, next_step=step, code="L02")
    first_line = (str(error).strip().splitlines() or [""])[0]
    return LoadError(
        f"model {repo}",
        found=f"a failed download ({type(error).__name__}: {first_line})",
        expected="the files of the model in the hub cache",
        next_step="Check the connection and the free disk space, or give a directory",
        code="L02",
    )
