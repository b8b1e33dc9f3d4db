"""From token ids, arriving in blocks, to text: incremental decoding, stop strings and stop ids.

The result does not depend on how ids are cut into blocks: every id is looked at alone, in order. Text is
held back only while it can still change (an open UTF-8 sequence) or still become a stop string.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import UsageError

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
_MAX_OPEN = 3  # an unfinished UTF-8 sequence is at most 3 bytes, so at most 3 replacement marks
_MAX_TAIL = 16  # tokens decoded again per new token


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token adds to the text.

    Attributes:
        text: ready to show; "" while held back.
        index: 0-based position of the token in the reply; -1 for the piece of `finish` without tokens.
        stop: the stop string or stop id that this token completed, None when it ended nothing.
    """

    text: str
    index: int
    stop: str | int | None = None


class TextStream:
    """One reply's text.

    Args:
        tokenizer: decodes ids and knows control tokens, which render to nothing.
        stop_strings: end the reply once the text contains one; text is cut before it, "" is ignored.
            One that is spelled like a control token also ends the reply at that token's id.
        stop_ids: end the reply; they render to nothing.
        min_tokens: stops completed by one of the first `min_tokens` tokens are ignored.
        visible: control tokens shown with their spelling, for parsers of tool calls and thinking.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: str | Sequence[str] | None = None,
        stop_ids: Iterable[int] = (),
        min_tokens: int = 0,
        visible: Collection[int] = (),
    ):
        strings = stop_list(stop_strings)
        self.stop_ids = frozenset(stop_ids) | stop_string_ids(tokenizer, strings)
        self.text = ""  # everything released so far
        self.stopped: str | int | None = None
        self.count = 0  # tokens consumed
        self._min_tokens = min_tokens
        self._decoder = Detokenizer(tokenizer, visible)
        self._matchers = [_Matcher(s) for s in strings]
        self._held = ""

    @property
    def searches(self) -> bool:
        """True when text can end the reply: there are stop strings."""
        return bool(self._matchers)

    def push(self, ids: Iterable[int]) -> list[Piece]:
        """Consume ids in order; one piece per consumed id.

        The token that completes a stop is the last one consumed: ids behind it get no piece, so
        `ids[:len(pieces)]` are the tokens of the reply. After a stop nothing is consumed.
        """
        pieces: list[Piece] = []
        for token in ids:
            if self.stopped is not None:
                break
            pieces.append(self._one(token))
        return pieces

    def take(self, ids: Sequence[int]) -> tuple[int, str]:
        """`push` for those who want no pieces: how many ids were consumed, and the text they add."""
        if self.stopped is None and not self._matchers and self.stop_ids.isdisjoint(ids):
            text = self._decoder.push_all(ids)
            self.count += len(ids)
            self.text += text
            return len(ids), text
        pieces = self.push(ids)
        return len(pieces), "".join(piece.text for piece in pieces)

    def finish(self) -> Piece:
        """Release what is still held back; the reply ended by length or by the caller."""
        if self.stopped is not None:
            return Piece("", self.count - 1, self.stopped)
        return self._release(self._decoder.finish(), final=True)

    def _one(self, token: int) -> Piece:
        self.count += 1
        if token in self.stop_ids and self.count > self._min_tokens:
            piece = self._release(self._decoder.finish(), final=True)
            if self.stopped is None:
                self.stopped = token
            return Piece(piece.text, piece.index, self.stopped)
        return self._release(self._decoder.push(token), final=False)

    def _release(self, new: str, final: bool) -> Piece:
        """Match stops over `new`, then release all that cannot become part of one."""
        start: int | None = None
        base = len(self._held)
        for matcher in self._matchers:
            end = matcher.feed(new, stop=self.count > self._min_tokens)
            if end is not None and (start is None or base + end - len(matcher.string) < start):
                start, self.stopped = base + end - len(matcher.string), matcher.string
        text = self._held + new
        if start is not None:
            out, self._held = text[:start], ""
        else:
            hold = 0 if final else max((m.matched for m in self._matchers), default=0)
            out, self._held = text[: len(text) - hold], text[len(text) - hold :]
        self.text += out
        return Piece(out, self.count - 1, self.stopped)


class Detokenizer:
    """Ids to text, one id at a time; joined text equals decoding all ids at once.

    Only a short tail of ids is decoded again for each new one. The one exception to equality: a run of
    byte-fallback tokens that never becomes UTF-8 after some of it was shown keeps what was shown.
    """

    def __init__(self, tokenizer: Tokenizer, visible: Collection[int] = ()):
        self._tokenizer = tokenizer
        self._hidden = tokenizer.control_ids - frozenset(visible)
        self._bytes = tokenizer.byte_ids
        self._size = len(tokenizer)
        self._tail: list[int] = []
        self._sent = ""  # leading part of the tail's text that was given out
        self._limit = _MAX_TAIL

    def push(self, token: int) -> str:
        """Text that `token` makes final."""
        if token in self._hidden or not 0 <= token < self._size:
            return ""
        self._tail.append(token)
        return "" if self._in_open_run() else self._grown()

    def push_all(self, ids: Sequence[int]) -> str:
        """Text that `ids` make final, joined; decoded once when no byte tokens are among them."""
        if self._bytes and any(token in self._bytes for token in (*self._tail[-1:], *ids)):
            return "".join(map(self.push, ids))
        shown = [token for token in ids if token not in self._hidden and 0 <= token < self._size]
        self._tail += shown
        return self._grown() if shown else ""

    def _grown(self) -> str:
        """Text that is final now that the tail has grown."""
        text = self._decode(self._tail)
        stable = len(text) - self._open_marks(text)
        if not text.startswith(self._sent):
            text = self._keep_sent(text)
        out = text[len(self._sent) : stable]
        self._sent = text[: max(stable, len(self._sent))]
        if len(self._tail) >= self._limit:
            self._shorten(text)
        return out

    def finish(self) -> str:
        """Text that was still open; the next token starts afresh."""
        text = self._decode(self._tail) if self._tail else ""
        if not text.startswith(self._sent):
            text = self._keep_sent(text)
        out = text[len(self._sent) :]
        self._tail, self._sent, self._limit = [], "", _MAX_TAIL
        return out

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _byte_run(self) -> bytes:
        """Bytes of the byte-fallback tokens that end the tail."""
        run: list[int] = []
        for token in reversed(self._tail):
            if token not in self._bytes:
                break
            run.append(self._bytes[token])
        return bytes(reversed(run))

    def _in_open_run(self) -> bool:
        """True inside a character spelled by byte-fallback tokens, where the run decodes to marks."""
        run = self._byte_run()
        try:
            run.decode("utf-8")
        except UnicodeDecodeError as error:
            return error.end == len(run) and error.reason == "unexpected end of data"
        return False

    def _open_marks(self, text: str) -> int:
        """Replacement marks at the end that a further byte may still turn into a character."""
        if self._tail[-1] in self._bytes and _is_utf8(self._byte_run()):
            return 0
        return min(len(text) - len(text.rstrip(REPLACEMENT)), _MAX_OPEN)

    def _keep_sent(self, text: str) -> str:
        """`text` with the part already given out left as it was: later bytes spoilt their whole run."""
        return self._sent + text[len(self._sent) :]

    def _shorten(self, text: str) -> None:
        """Drop old ids once the rest decodes to the end of the same text without them."""
        unsent = len(text) - len(self._sent)
        for cut in range(len(self._tail) // 2, len(self._tail)):
            rest = self._decode(self._tail[cut:])
            if len(rest) >= unsent and text.endswith(rest):
                self._tail = self._tail[cut:]
                self._sent = rest[: len(rest) - unsent]
                self._limit = _MAX_TAIL
                return
        self._limit = 2 * len(self._tail)


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:  # the answer
        return False
    return True


class _Matcher:
    """Knuth-Morris-Pratt search of one stop string in a text that arrives in parts."""

    __slots__ = ("_fail", "matched", "string")

    def __init__(self, string: str):
        self.string = string
        self.matched = 0  # longest prefix of `string` that ends the text so far
        self._fail = _borders(string)

    def feed(self, text: str, stop: bool) -> int | None:
        """Offset in `text` just behind the first match, None without one; `stop` False ignores matches."""
        string, k = self.string, self.matched
        if k == 0 and string[0] not in text:
            return None
        for i, char in enumerate(text):
            while k and string[k] != char:
                k = self._fail[k - 1]
            k += string[k] == char
            if k == len(string):
                if stop:
                    return i + 1
                k = self._fail[k - 1]
        self.matched = k
        return None


def _borders(string: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table, k = [0] * len(string), 0
    for i in range(1, len(string)):
        while k and string[k] != string[i]:
            k = table[k - 1]
        k += string[k] == string[i]
        table[i] = k
    return table


def stop_list(value: str | Sequence[str] | None) -> list[str]:
    """Stop strings as a list without "" and repeats; UsageError for anything but strings."""
    values = [value] if isinstance(value, str) else list(value or ())
    for item in values:
        if not isinstance(item, str):
            raise UsageError(
                "stop", found=f"{type(item).__name__} {item!r}", expected="a string or a list of strings",
                next_step="Give stop ids separately", code="U20",
            )  # fmt: skip
    return list(dict.fromkeys(item for item in values if item))


def stop_string_ids(tokenizer: Tokenizer, strings: Iterable[str]) -> frozenset[int]:
    """Ids of the control tokens that stop strings spell: they render to nothing, so text cannot show them."""
    spelled = tokenizer.control_tokens
    return frozenset(spelled[s] for s in strings if s in spelled)
