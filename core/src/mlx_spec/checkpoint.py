"""A model folder checked before use: config.json, end ids, and loading through mlx-lm.

Safetensors files are in `tensorfiles`, kinds of directories in `identify`; both are re-exported here.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import LoadError, SpecError
from .identify import carries_embedding, identify, other_kind, refuse_other_kind
from .tensorfiles import (
    TensorInfo,
    check_finite,
    fingerprint,
    head_index,
    load_indexed,
    load_tensors,
    read_header,
    read_json,
    read_metadata,
    tensor_index,
    weight_files,
)
from .types import ModelRef

__all__ = [
    "TensorInfo",
    "carries_embedding",
    "check_finite",
    "end_ids",
    "fingerprint",
    "head_index",
    "identify",
    "load_indexed",
    "load_mlx_lm",
    "load_tensors",
    "other_kind",
    "read_config",
    "read_header",
    "read_json",
    "read_metadata",
    "refuse_other_kind",
    "tensor_index",
    "weight_files",
]

# Sizes every family spells alike. Keys that some families write as one value per layer also take a list.
GENERATION = "generation_config.json"
_POSITIVE = ("hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings")
_PER_LAYER = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
_NUMBERS = ("rms_norm_eps", "layer_norm_eps", "rope_theta")
_OBJECTS = ("text_config", "quantization", "quantization_config")
MAX_LAYERS = 10_000
"""More layers than any model has; libraries build a list or a module for each that config.json declares."""


# -- config.json ---------------------------------------------------------------------------------------


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a model folder, with the types of its well-known keys checked, also in text_config.

    Raises LoadError naming file, key, found and expected; a directory of another kind is named as such.
    """
    file = path / "config.json"
    if not file.exists():
        raise _no_config(path)
    config = read_json(file)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise _bad_key(file, "model_type", model_type, "a non-empty string")
    _check_keys(file, config, "")
    text = config.get("text_config")
    if isinstance(text, dict):
        _check_keys(file, text, "text_config.")
    return config


def _no_config(path: Path) -> LoadError:
    """The error for a folder without config.json: its kind when it shows one."""
    try:
        identity = identify(path, None)
    except OSError as error:
        return LoadError(
            f"model {path}",
            found=error.strerror or str(error),
            expected="a readable directory",
            next_step="Check the path and its permissions",
            code="L01",
        )
    if identity.kind != "unknown":
        return other_kind(path, identity)
    return LoadError(
        f"model {path}",
        found="no config.json",
        expected="a model directory with config.json",
        next_step="Check the path, or download the model again",
        code="L04",
    )


def _check_keys(file: Path, section: Mapping[str, Any], prefix: str) -> None:
    """Types of the well-known keys of one section; null counts as absent."""
    for key, value in section.items():
        if value is None:
            continue
        name = prefix + key
        if key in _POSITIVE and not _positive(value):
            raise _bad_key(file, name, value, "a positive integer")
        if key.endswith("num_hidden_layers") and type(value) is int and value > MAX_LAYERS:
            raise _bad_key(file, name, value, f"at most {MAX_LAYERS} layers")
        if key == "architectures" and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
            raise _bad_key(file, name, value, "a list of class names")
        if key in _PER_LAYER and not (_positive(value) or _positive_list(value)):
            raise _bad_key(file, name, value, "a positive integer, or one per layer")
        if key in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float | dict)):
            raise _bad_key(file, name, value, "a number")
        if key in _OBJECTS and not isinstance(value, dict):
            raise _bad_key(file, name, value, "an object")
        if key == "eos_token_id":
            _ids(file, name, value)


def _positive(value: Any) -> bool:
    return type(value) is int and value > 0


def _positive_list(value: Any) -> bool:
    # 0 marks a layer without that part in pruned models
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _bad_key(file: Path, key: str, value: Any, expected: str) -> LoadError:
    found = "nothing" if value is None else f"{type(value).__name__} {str(value)[:60]!r}"
    return LoadError(
        f"{key} in {file.name} of {file.parent}",
        found=found,
        expected=expected,
        next_step="Correct the key, or download the file again",
        code="L04",
    )


# -- end ids -------------------------------------------------------------------------------------------


def end_ids(path: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """Token ids that end a reply: union of config.json, text_config, generation_config.json and tokenizer."""
    found: set[int] = set()
    file = path / "config.json"
    found |= _ids(file, "eos_token_id", config.get("eos_token_id"))
    text = config.get("text_config")
    if isinstance(text, dict):
        found |= _ids(file, "text_config.eos_token_id", text.get("eos_token_id"))
    generation = path / GENERATION
    if generation.exists():
        found |= _ids(generation, "eos_token_id", read_json(generation).get("eos_token_id"))
    return frozenset(found | _tokenizer_end_ids(path))


def _ids(file: Path, key: str, value: Any) -> set[int]:
    """An id, a list of ids or null, as a set."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(v) is int and v >= 0 for v in values):
        raise _bad_key(file, key, value, "a token id or a list of them")
    return set(values)


def _tokenizer_end_ids(path: Path) -> set[int]:
    """Id of the tokenizer's eos_token, from its JSON files alone."""
    config_file = path / "tokenizer_config.json"
    if not config_file.exists():
        return set()
    config = read_json(config_file)
    token = config.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str):
        return set()
    declared = config.get("added_tokens_decoder")
    for key, entry in declared.items() if isinstance(declared, dict) else ():
        if isinstance(entry, dict) and entry.get("content") == token and key.isdigit():
            return {int(key)}
    tokenizer = path / "tokenizer.json"
    return _id_of(read_json(tokenizer), token) if tokenizer.exists() else set()


def _id_of(tokenizer: Mapping[str, Any], token: str) -> set[int]:
    """Id of a token in a parsed tokenizer.json; empty when it has none."""
    for entry in tokenizer.get("added_tokens") or ():
        if entry.get("content") == token:
            return {entry["id"]}
    vocab = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(vocab, dict) and type(vocab.get(token)) is int:
        return {vocab[token]}
    return set()


# -- loading through mlx-lm ----------------------------------------------------------------------------


def load_mlx_lm(
    ref: ModelRef,
    get_model_classes: Callable[..., tuple[type, type]] | None = None,
    lazy: bool = True,
    drafter_types: Collection[str] = (),
) -> tuple[Any, dict[str, Any]]:
    """Load a causal LM with mlx-lm after checking its files; returns (nn.Module, config mlx-lm used).

    Args:
        get_model_classes: as in mlx_lm.utils.load_model, to build from other classes.
        lazy: leave weights unread until first use.
        drafter_types: model_types registered as drafters, refused here by name.

    Raises LoadError for everything that goes wrong, naming file or parameters. Prints nothing.
    """
    config = read_config(ref.path)
    refuse_other_kind(ref.path, config, drafter_types)
    if config.get("model_file") is not None:
        raise LoadError(
            f"model {ref.name}",
            found=f"a model that brings its own code ({config['model_file']!r})",
            expected="a model_type that is installed",
            next_step="Use a plugin for this model; code inside a checkpoint is not run",
            code="L06",
        )
    index = tensor_index(ref.path)
    if not carries_embedding(config, index):
        raise LoadError(
            f"model {ref.name}",
            found="no tensor with a row per vocabulary entry",
            expected="a full model with its own token embedding",
            next_step="It looks like a drafter head: pass it as --draft-model and give the full model to -m",
            code="L05",
        )
    if (ref.path / GENERATION).exists():
        read_json(ref.path / GENERATION)  # names the file, where mlx-lm would trip over what it holds
    from mlx_lm import utils

    with _folder_for_mlx_lm(ref.path) as folder:
        try:
            model, used = utils.load_model(
                folder, lazy=lazy, strict=True, get_model_classes=get_model_classes or utils._get_classes
            )
        except SpecError:
            raise
        except Exception as error:  # mlx-lm and its model classes raise whatever their code meets
            raise load_error(ref, config, error) from error
    return model, used


@contextmanager
def _folder_for_mlx_lm(path: Path) -> Iterator[Path]:
    """`path`, or a folder of links when mlx-lm's own `model*.safetensors` would take other files.

    mlx-lm ignores the index, so a stray weight file would be merged in; it also globs with the path as
    the pattern, so brackets in it would match nothing. Open files keep their data once links are gone.
    """
    wanted = weight_files(path)
    if wanted == sorted(path.glob("model*.safetensors")) and not re.search(r"[][*?]", str(path)):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="mlx-spec-") as name:
        folder = Path(name)
        for file in path.iterdir():
            if not file.name.endswith(".safetensors"):
                (folder / file.name).symlink_to(file.resolve())
        for number, file in enumerate(wanted):
            (folder / f"model-{number:05d}.safetensors").symlink_to(file.resolve())
        yield folder


_MISSING_KEYS = re.compile(r"missing \d+ required (?:positional|keyword-only) arguments?: (.+)")


def load_error(ref: ModelRef, config: Mapping[str, Any], error: Exception) -> LoadError:
    """What a loader's exception means: parameters, config keys or model_type, by name."""
    text = str(error)
    where = f"model {ref.name}"
    again = "Use a complete checkpoint of this model_type, or convert it again"
    if "parameters" in text and text.startswith("Missing "):
        return LoadError(
            where,
            found=f"no tensors {_names(text)}",
            expected="every parameter of the model",
            next_step=again,
            code="L17",
        )
    if text.startswith("Received ") and "not in model" in text:
        return LoadError(
            where,
            found=f"tensors the model does not have: {_names(text)}",
            expected="only parameters of the model",
            next_step=again,
            code="L19",
        )
    if text.startswith("Expected shape"):
        found = " ".join(text.split())
        return LoadError(
            where,
            found=f"a wrong shape ({found})",
            expected="the shapes config.json gives",
            next_step=again,
            code="L19",
        )
    if "not supported" in text and isinstance(error, ValueError):
        from .plugins import get_manager

        lacks = f"which no plugin and not mlx-lm defines{get_manager().missing()}"
        return LoadError(
            where,
            found=f"model_type {config.get('model_type')!r}, {lacks}",
            expected="a supported model_type",
            next_step="Install the plugin for this family (`spec plugins` lists what is installed), or update mlx-lm",
            code="L06",
        )
    missing = _MISSING_KEYS.search(text)
    if isinstance(error, KeyError) or missing:
        keys = missing[1].replace("'", "") if missing else str(error.args[0] if error.args else error)
        return LoadError(
            f"config.json of {ref.path}",
            found=f"no {keys}",
            expected=f"every key that model_type {config.get('model_type')!r} needs",
            next_step="Correct config.json, or download it again",
            code="L04",
        )
    reason = (text.strip().splitlines() or [""])[0]
    return LoadError(
        where,
        found=f"{type(error).__name__}: {reason}" if reason else type(error).__name__,
        expected="a checkpoint that its model class can load",
        next_step="Check config.json and the weights against the original model",
        code="L08",
    )


def _names(text: str, limit: int = 5) -> str:
    """First few parameter names of an mlx message, which lists one per line."""
    names = [part.strip(" ,.") for part in text.splitlines()[1:] if part.strip(" ,.")]
    rest = f" (and {len(names) - limit} more)" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
