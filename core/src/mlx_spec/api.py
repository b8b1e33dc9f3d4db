"""The Python API: load a pair, generate, stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .engine import Engine
from .errors import UsageError
from .intake import prompt_ids
from .pair import Pair, load
from .request import Event, Request, Result
from .sampling import Sampling

__all__ = ["encode", "generate", "load", "stream"]


def encode(pair: Pair, prompt: str | Sequence[int]) -> list[int]:
    """Token ids of a prompt: text goes through the pair's tokenizer, ids pass unchanged."""
    if not isinstance(prompt, str):
        return prompt_ids(prompt)  # type: ignore[return-value]  # Engine.submit checks every one
    if pair.tokenizer is None:
        raise no_tokenizer()
    return pair.tokenizer.encode(prompt)


def no_tokenizer() -> UsageError:
    """The refusal of text for a target that has no tokenizer."""
    return UsageError(
        "prompt",
        found="text, and a target without a tokenizer",
        expected="token ids",
        next_step="Pass ids (--prompt-ids), or add tokenizer.json to the target's directory",
        code="U14",
    )


def _request(
    pair: Pair,
    prompt: str | Sequence[int],
    sampling: Sampling | None,
    max_tokens: int,
    ignore_eos: bool,
    adaptive: bool,
    speculative: bool,
    block_size: int | None,
) -> Request:
    return Request(
        prompt=encode(pair, prompt),
        sampling=Sampling() if sampling is None else sampling,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        adaptive=adaptive,
        speculative=speculative,
        block_size=block_size,
    )


def generate(
    pair: Pair,
    prompt: str | Sequence[int],
    sampling: Sampling | None = None,
    max_tokens: int = 256,
    ignore_eos: bool = False,
    adaptive: bool = True,
    speculative: bool = True,
    block_size: int | None = None,
) -> Result:
    """Generate one reply.

    Args:
        prompt: text, or token ids.
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
    prompt: str | Sequence[int],
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
