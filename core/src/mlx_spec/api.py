"""The Python API: load a pair, generate, stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .engine import Engine
from .intake import check_pair, is_chat, message_ids, no_tokenizer, prompt_ids
from .pair import Pair, load
from .request import Event, Request, Result
from .sampling import Sampling
from .types import Message

__all__ = ["encode", "generate", "load", "stream"]


def encode(pair: Pair, prompt: str | Sequence[int] | Sequence[Message]) -> list[int]:
    """Token ids of a prompt: text as it is, messages through the chat template, ids unchanged."""
    if is_chat(prompt):
        return message_ids(prompt, pair)
    if not isinstance(prompt, str):
        return prompt_ids(prompt, text=True)  # type: ignore[return-value]  # Engine.submit checks every one
    if pair.tokenizer is None:
        raise no_tokenizer()
    return pair.tokenizer.encode(prompt)


def _request(
    pair: Pair,
    prompt: str | Sequence[int] | Sequence[Message],
    sampling: Sampling | None,
    max_tokens: int,
    ignore_eos: bool,
    adaptive: bool,
    speculative: bool,
    block_size: int | None,
) -> Request:
    return Request(
        prompt=encode(check_pair(pair), prompt),
        sampling=Sampling() if sampling is None else sampling,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        adaptive=adaptive,
        speculative=speculative,
        block_size=block_size,
    )


def generate(
    pair: Pair,
    prompt: str | Sequence[int] | Sequence[Message],
    sampling: Sampling | None = None,
    max_tokens: int = 256,
    ignore_eos: bool = False,
    adaptive: bool = True,
    speculative: bool = True,
    block_size: int | None = None,
) -> Result:
    """Generate one reply.

    Args:
        prompt: text, continued as it is; messages, [{"role": "user", "content": "..."}], through the chat template;
            or token ids.
        sampling: greedy when None.
        max_tokens: reply length limit; the context may end it sooner.
        ignore_eos: go on past the model's end ids.
        adaptive: False always drafts the full width.
        speculative: False decodes plainly.
        block_size: a narrower L for this request, anchor counted.

    Raises:
        UsageError: a prompt or setting that cannot be used.
    """
    request = _request(pair, prompt, sampling, max_tokens, ignore_eos, adaptive, speculative, block_size)
    return Engine(pair, max_rows=1).submit(request).result()


def stream(
    pair: Pair,
    prompt: str | Sequence[int] | Sequence[Message],
    sampling: Sampling | None = None,
    max_tokens: int = 256,
    ignore_eos: bool = False,
    adaptive: bool = True,
    speculative: bool = True,
    block_size: int | None = None,
) -> Iterator[Event]:
    """The same reply as events, each sent only after its round is committed.

    What cannot be used is refused when this is called, not with the first event.
    """
    request = _request(pair, prompt, sampling, max_tokens, ignore_eos, adaptive, speculative, block_size)
    return iter(Engine(pair, max_rows=1).submit(request))
