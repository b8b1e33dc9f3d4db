"""From names to folders: local paths, the hub cache, downloads, and names that are neither. No network."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors as hub
from tinymodels import write_model

from mlx_spec import refs
from mlx_spec.errors import LoadError, UsageError


class Hub:
    """Stands in for snapshot_download: what is cached, what can be downloaded, what was asked."""

    def __init__(self) -> None:
        self.cached: Path | None = None
        self.remote: Path | Exception = RuntimeError("the test has no remote")
        self.asked: list[tuple[str, str | None, bool]] = []

    def __call__(self, repo, *, revision=None, local_files_only=False, allow_patterns=None):
        self.asked.append((repo, revision, local_files_only))
        assert "*.safetensors" in allow_patterns and not any(p.endswith(".py") for p in allow_patterns)
        if local_files_only:
            if self.cached is None:
                raise hub.LocalEntryNotFoundError("not in the cache")
            return str(self.cached)
        if isinstance(self.remote, Exception):
            raise self.remote
        return str(self.remote)


@pytest.fixture
def fake_hub(monkeypatch) -> Hub:
    fake = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("refs") / "model", shards=2)


def test_local_directory(model, fake_hub):
    ref = refs.resolve(model)
    assert (ref.path, ref.name, ref.model_type) == (model, str(model), "llama") and ref.config["vocab_size"] == 131
    assert refs.resolve(str(model), config=False).config == {} and fake_hub.asked == []


def test_relative_path_and_home(model, monkeypatch, fake_hub):
    monkeypatch.chdir(model)
    assert refs.resolve("../model").path.resolve() == model
    assert refs.resolve(".").model_type == "llama"
    monkeypatch.setenv("HOME", str(model.parent))
    assert refs.resolve("~/model").path == model and fake_hub.asked == []


@pytest.mark.parametrize("name", ["/no/such/dir", "./none", "../none", "~/none", "none", "a\\b"])
def test_missing_directory(name, fake_hub):
    with pytest.raises(LoadError, match="found no directory"):
        refs.resolve(name)
    assert fake_hub.asked == []


@pytest.mark.parametrize(
    "name",
    ["", "  ", "a\0b", "/etc/\0", "file:///etc/passwd", "https://host/a/b", "FILE:x", "a/b/../../c", "a/..", "a/b/c",
     "%2e%2e/%2e%2e/etc", "owner/na me", "owner/name@", "owner/name;rm", "a//b", "-x/y", "owner/.hidden"],
)  # fmt: skip
def test_bad_names_are_usage_errors_and_touch_nothing(name, fake_hub, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="model name: found"):
        refs.resolve(name)
    assert fake_hub.asked == []


def test_a_file_is_not_a_directory(model):
    with pytest.raises(LoadError, match="found a file, expected a directory"):
        refs.resolve(model / "config.json")


def test_name_longer_than_the_system_allows():
    with pytest.raises(LoadError, match="expected a readable directory|found no directory"):
        refs.resolve("/" + "x" * 5000)


def test_unreadable_directory(model, monkeypatch):
    def refuse(self):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(LoadError, match="found Permission denied, expected a readable directory"):
        refs.resolve(model)


# -- hub -----------------------------------------------------------------------------------------------


def test_complete_cached_snapshot_needs_no_network(model, fake_hub):
    fake_hub.cached = model
    assert refs.resolve("owner/name").path == model
    assert fake_hub.asked == [("owner/name", None, True)]


def test_revision_is_passed_on(model, fake_hub):
    fake_hub.cached = model
    refs.resolve("owner/name@v1.0")
    assert fake_hub.asked == [("owner/name", "v1.0", True)]


@pytest.mark.parametrize("lacking", ["config.json", "model-00002-of-00002.safetensors"])
def test_incomplete_cached_snapshot_is_completed(model, fake_hub, tmp_path, lacking):
    fake_hub.cached = Path(shutil.copytree(model, tmp_path / "cache"))
    (fake_hub.cached / lacking).unlink()
    fake_hub.remote = model
    assert refs.resolve("owner/name").path == model
    assert fake_hub.asked[-1] == ("owner/name", None, False)


def test_not_cached_is_downloaded(model, fake_hub):
    fake_hub.remote = model
    assert refs.resolve("owner/name").path == model


def test_not_cached_without_download(fake_hub):
    with pytest.raises(LoadError, match="neither a directory nor a downloaded model.*hf download owner/name"):
        refs.resolve("owner/name", download=False)
    assert [asked[2] for asked in fake_hub.asked] == [True]


def response_error(kind):
    """A hub error, made without the HTTP response its constructor wants."""
    error = kind.__new__(kind)
    Exception.__init__(error, "404 Client Error")
    return error


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (response_error(hub.RepositoryNotFoundError), "no such repository"),
        (response_error(hub.GatedRepoError), "a gated repository"),
        (response_error(hub.RevisionNotFoundError), "no revision None"),
        (hub.OfflineModeIsEnabled("offline"), "offline mode and no cached copy"),
        (hub.LocalEntryNotFoundError("no net"), "no connection and no cached copy"),
        (ConnectionError("refused"), "a failed download .ConnectionError: refused"),
        (OSError(errno.ENOSPC, "No space left on device"), "a failed download .*No space left"),
        (PermissionError(errno.EACCES, "Permission denied", "/cache"), "a failed download .*Permission denied"),
    ],
)
def test_download_failures(fake_hub, error, found):
    fake_hub.remote = error
    with pytest.raises(LoadError, match=f"model owner/name: found {found}.*, expected") as caught:
        refs.resolve("owner/name")
    assert caught.value.exit_code == 1 and caught.value.next_step


# -- a server's model root -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../../etc", "/etc/passwd", "~/x", "model/../../c", "/", ".."])
def test_names_outside_the_root_are_refused(model, fake_hub, name):
    with pytest.raises(UsageError, match="outside the model root"):
        refs.resolve(name, root=model.parent)
    assert fake_hub.asked == []


def test_link_out_of_the_root_is_refused(model, tmp_path):
    (tmp_path / "out").symlink_to(model)
    with pytest.raises(UsageError, match="outside the model root"):
        refs.resolve("out", root=tmp_path)


def test_names_inside_the_root(model, fake_hub):
    assert refs.resolve("model", root=model.parent).path == model
    with pytest.raises(LoadError, match="found neither"):
        refs.resolve("owner/unknown", root=model.parent)
    assert [asked[2] for asked in fake_hub.asked] == [True]
