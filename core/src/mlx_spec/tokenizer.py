"""The tokenizer of a model folder: encode, chat template, decode, and which ids mean something."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .errors import LoadError, UsageError
from .types import Message

log = logging.getLogger("mlx_spec.load")

CONFIG = "tokenizer_config.json"  # names a class and its settings; the tokens themselves are in another file
VOCABULARIES = ("tokenizer.json", "tekken.json", "vocab.json", "vocab.txt", "vocab.*", "*.model", "*.tiktoken", "*.bpe")
NO_FILES = "no tokenizer files"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt, the text they stand for, and what was not as asked ("" when all was)."""

    ids: list[int]
    text: str
    note: str = ""


def lacking(path: Path) -> str:
    """What a folder has in the place of a tokenizer, in words; "" when there is a file with the tokens."""
    if any(next(path.glob(pattern), None) for pattern in VOCABULARIES):
        return ""
    return f"{CONFIG} and no file with the tokens (tokenizer.json)" if (path / CONFIG).exists() else NO_FILES


def load_tokenizer(path: Path) -> Tokenizer | None:
    """Tokenizer of a model folder; None when it has none (token ids can still be the prompt).

    Raises LoadError when the files are there but cannot be used. Runs no code from the folder.
    """
    lack = lacking(path)
    if lack:
        if lack != NO_FILES:
            log.warning("no tokenizer: %s has %s", path, lack)
        return None
    from .tensorfiles import read_json

    for name in ("tokenizer.json", CONFIG):
        if (path / name).exists():
            read_json(path / name)  # names the file, where the libraries below name a parser state
    with _quiet_transformers():
        try:
            from mlx_lm.utils import load_tokenizer as load

            found = Tokenizer(load(path, {"trust_remote_code": False, "local_files_only": True}), path)
            _ = found.control_tokens  # special tokens that mean each other are found by asking
            return found
        except Exception as error:  # tokenizers raises bare Exception, transformers whatever its code meets
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise LoadError(
                f"tokenizer in {path}",
                found=f"files that cannot be loaded ({reason[:200]})",
                expected="tokenizer.json and tokenizer_config.json of this model",
                next_step="Download them again; without tokenizer files the prompt can be --prompt-ids",
                code="L40",
            ) from error


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep the library's advice on other frameworks off the user's terminal; errors still raise."""
    import mlx_lm  # noqa: F401 - tells transformers to give no advice while it is imported
    import transformers  # noqa: F401 - its import sets the level anew, so that comes first

    logger = logging.getLogger("transformers")
    level, propagate = logger.level, logger.propagate
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.propagate = propagate


class Tokenizer:
    """Thin wrapper over mlx-lm's, with one meaning per method.

    Attributes:
        wrapped: mlx-lm's TokenizerWrapper or a Hugging Face tokenizer, for what is not offered here.
    """

    def __init__(self, wrapped: Any, path: Path | None = None):
        self.wrapped = wrapped
        self.path = path

    def __len__(self) -> int:
        """Ids below this may mean something; ids from here to V are padding rows of the model."""
        return self._size

    @cached_property
    def _size(self) -> int:
        return max(len(self.wrapped), 1 + max(self._added, default=-1))

    @cached_property
    def _added(self) -> dict[int, Any]:
        return dict(getattr(self.wrapped, "added_tokens_decoder", None) or {})

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """Spelling -> id of the tokens that render to nothing."""
        found = {str(token): index for index, token in self._added.items() if getattr(token, "special", False)}
        special = zip(self.wrapped.all_special_tokens, self.wrapped.all_special_ids, strict=True)
        return found | {str(token): index for token, index in special}

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Ids of the tokens that render to nothing."""
        return frozenset(self.control_tokens.values())

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        """Id -> byte of the byte-fallback tokens "<0x00>".."<0xFF>"; empty for other tokenizers."""
        unknown = getattr(self.wrapped, "unk_token_id", None)
        names = [f"<0x{value:02X}>" for value in range(256)]
        ids = self.wrapped.convert_tokens_to_ids(names)
        return {index: value for value, index in enumerate(ids) if index is not None and index != unknown}

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Ids the tokenizer itself declares as end of text."""
        declared = getattr(self.wrapped, "eos_token_ids", None) or ()
        own = self.wrapped.eos_token_id
        return frozenset(declared) | (frozenset() if own is None else frozenset([own]))

    @property
    def has_chat_template(self) -> bool:
        """True when `chat` can use a template."""
        known = getattr(self.wrapped, "has_chat_template", None)
        return bool(self.wrapped.chat_template) if known is None else bool(known)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text to ids; with special tokens, a leading start token is added unless the text spells it."""
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise UsageError(
                "prompt",
                found="a lone surrogate: bytes that are not UTF-8",
                expected="Unicode text",
                next_step="Give UTF-8 text, or token ids",
                code="U19",
            )
        start = getattr(self.wrapped, "bos_token", None)
        special = add_special_tokens and not (start and text.startswith(start))
        quiet = {"verbose": False} if self._fast[0] is not None else {}  # of lengths, which `check_prompt` refuses
        return [int(i) for i in self.wrapped.encode(text, add_special_tokens=special, **quiet)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids to text; control tokens render to nothing unless `skip_special_tokens` is False."""
        inside = [i for i in ids if 0 <= i < self._size]
        if skip_special_tokens:
            inside = [i for i in inside if i not in self.control_ids]
        return self._spell(inside)

    @cached_property
    def _fast(self) -> tuple[Any, Any]:
        """(its class there, the tokenizer) of one that `tokenizers` runs for transformers, else (None, None)."""
        library = sys.modules.get("transformers")  # not imported: nothing of it is wrapped
        inner = getattr(self.wrapped, "_tokenizer", None) if hasattr(self.wrapped, "detokenizer") else self.wrapped
        fast = getattr(library, "PreTrainedTokenizerFast", None)
        return (fast, inner) if fast is not None and isinstance(inner, fast) else (None, None)

    @cached_property
    def _spell(self) -> Callable[[list[int]], str]:
        """function(ids) -> text, every token spelled out and spaces left as they are.

        Every token of a reply passes here. Where the tokenizer is one of `tokenizers` and no class of its own has
        another way to decode, that library is asked, without the checks of what kind of ids these are.
        """
        fast, inner = self._fast
        if fast is not None:
            own = type(inner)
            if own.decode is fast.decode and own._decode is fast._decode:
                backend = inner.backend_tokenizer
                return lambda ids: str(backend.decode(ids, skip_special_tokens=False))
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return lambda ids: str(self.wrapped.decode(ids, **options))

    def token_text(self, token: int) -> str:
        """Spelling of one token: control tokens as written, others decoded alone."""
        added = self._added.get(token)
        return str(added) if added is not None else self.decode([token], skip_special_tokens=False)

    def prompt(self, text: str, template: bool = True, **options: Any) -> Prompt:
        """A single user turn through the chat template, or the text itself without one."""
        if template and self.has_chat_template:
            return self.chat([{"role": "user", "content": text}], **options)
        note = "no chat template: the prompt is used as it is" if template else ""
        return Prompt(self.encode(text), text, note)

    def chat(self, messages: Sequence[Message], generation_prompt: bool = True, **options: Any) -> Prompt:
        """Messages through the chat template; UsageError quotes what the template refuses.

        Without a template the contents are joined by line breaks, and the note says so.
        """
        turns = [_plain(i, message) for i, message in enumerate(messages)]
        if not self.has_chat_template:
            text = "\n".join(str(turn.get("content") or "") for turn in turns)
            return Prompt(self.encode(text), text, "no chat template: the messages are joined by line breaks")
        try:
            text = self.wrapped.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=generation_prompt, **options
            )
        except Exception as error:  # templates are programs: jinja2 errors, TypeError, KeyError...
            raise UsageError(
                "messages",
                found=f"a chat template error: {error}",
                expected="messages that this model's template accepts",
                next_step="Change roles or contents, or pass --no-chat-template",
                code="U18",
            ) from error
        return Prompt(self.encode(text, add_special_tokens=False), text)


def _plain(index: int, message: Message) -> dict[str, Any]:
    """One message with text parts joined to a string, as every template takes it."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UsageError(
            f"message {index}", found=repr(message)[:80], expected="an object with role and content",
            next_step="Correct the message", code="U18",
        )  # fmt: skip
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message) if content is not None else {**message, "content": ""}
    parts = content if isinstance(content, list) else [content]
    texts = [p if isinstance(p, str) else p.get("text") if isinstance(p, Mapping) else None for p in parts]
    if not all(isinstance(t, str) for t in texts):
        bad = parts[[isinstance(t, str) for t in texts].index(False)]
        kind = bad.get("type", "part without text") if isinstance(bad, Mapping) else type(bad).__name__
        raise UsageError(
            f"message {index}", found=f"a content part of type {kind!r}", expected="text parts",
            next_step="Send text only; this path serves no images, audio or video", code="U17",
        )  # fmt: skip
    return {**message, "content": "".join(str(t) for t in texts)}
