"""Every field of a request, checked before anything is queued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeGuard

from .errors import UsageError
from .request import Request
from .sampling import Sampling
from .types import Message
from .values import as_integer, as_items, shown
from .width import check_block_size

if TYPE_CHECKING:
    from .pair import Pair


def check_pair(pair: object) -> Pair:
    """`pair`, when it is one; UsageError for a name, a target alone, or anything else."""
    from .pair import Pair

    if isinstance(pair, Pair):
        return pair
    raise UsageError(
        "pair",
        found=f"{type(pair).__name__} {shown(pair)}",
        expected="a loaded pair",
        next_step="Give what mlx_spec.load returns, with or without a drafter",
        code="U43",
    )


def check_request(request: Request, pair: Pair) -> Request:
    """A copy whose fields `pair` can serve; UsageError names the first one that it cannot."""
    _check_type("request", request, Request)
    _check_type("sampling", request.sampling, Sampling)
    _check_type("id", request.id, int)
    for switch in ("ignore_eos", "adaptive", "speculative"):
        _check_type(switch, getattr(request, switch), bool)
    target, block_size = pair.target, request.block_size
    prompt = message_ids(request.prompt, pair) if is_chat(request.prompt) else request.prompt
    ids = check_prompt(prompt, pair.token_limit or target.vocab_size, target.context)
    target.check_prompt(ids)
    _check_sampling(request.sampling, pair)
    return replace(
        request,
        prompt=ids,
        max_tokens=_whole(request.max_tokens),
        block_size=None if block_size is None else check_block_size(block_size, "block_size"),
    )


def _check_type(what: str, value: object, kind: type) -> None:
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return
    raise UsageError(
        what,
        found=f"{type(value).__name__} {shown(value)}",
        expected="True or False" if kind is bool else f"a value of type {kind.__name__}",
        next_step=f"Correct {what}",
        code="U29",
    )


def _whole(value: object) -> int:
    number = as_integer(value)
    if number is None or number < 0:
        raise UsageError(
            "max_tokens",
            found=shown(value),
            expected="an integer of at least 0",
            next_step="Give a length",
            code="U15",
        )
    return number


def _check_sampling(sampling: Sampling, pair: Pair) -> None:
    sampling.check_ids(pair.target.vocab_size)
    if sampling.stop and pair.tokenizer is None:
        raise UsageError(
            "stop",
            found="strings, and a target without a tokenizer",
            expected="token ids",
            next_step="Give stop_ids, or add tokenizer.json to the target's directory",
            code="U36",
        )


def no_tokenizer(given: str = "text") -> UsageError:
    """The refusal of what only a tokenizer makes ids of, for a target that has none."""
    return UsageError(
        "prompt",
        found=f"{given}, and a target without a tokenizer",
        expected="token ids",
        next_step="Pass ids (--prompt-ids), or add tokenizer.json to the target's directory",
        code="U14",
    )


def is_chat(prompt: object) -> TypeGuard[Sequence[Message]]:
    """True for a list that begins with a message, {"role": ..., "content": ...}."""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def message_ids(messages: Sequence[Message], pair: Pair) -> list[int]:
    """Token ids of messages, through the chat template of the pair's tokenizer; UsageError without one."""
    if pair.tokenizer is None:
        raise no_tokenizer("messages")
    if not pair.tokenizer.has_chat_template:
        raise UsageError(
            "prompt",
            found="messages, and a tokenizer without a chat template",
            expected="text or token ids",
            next_step="Give text, which is used as it is, or add chat_template.jinja to the target's directory",
            code="U18",
        )
    return pair.tokenizer.chat(messages).ids


def prompt_ids(prompt: object, text: bool = False) -> list[object]:
    """The items of a prompt that is no text: a list, a range or a one-dimensional array; else UsageError.

    text: the caller takes text too, for the message.
    """
    items = as_items(prompt)
    if items is None:
        raise UsageError(
            "prompt",
            found=f"{type(prompt).__name__} {shown(prompt)}",
            expected=f"{'text, ' if text else ''}a list of token ids, or one of messages",
            next_step="Give one of these" if text else "Encode text with the tokenizer of the pair",
            code="U38",
        )
    return items


def refuse_placeholders(media: Mapping[int, str], tokens: Sequence[int], code: str) -> None:
    """UsageError `code` for a prompt with one of the placeholders in `media` (id -> kind)."""
    place = next((i for i, token in enumerate(tokens) if token in media), None)
    if place is None:
        return
    kind = media[tokens[place]]
    raise UsageError(
        f"prompt token {place}",
        found=f"id {tokens[place]}, the placeholder for {kind} input",
        expected="text tokens only",
        next_step=f"Serve requests with {kind} input with mlx-vlm, or remove the placeholder",
        code=code,
    )


def check_prompt(prompt: object, vocab_size: int, context: int) -> list[int]:
    """Token ids as ints, or a UsageError naming the first bad one."""
    items = prompt_ids(prompt)
    if not items:
        raise UsageError(
            "prompt", found="no tokens", expected="at least one token", next_step="Give a prompt", code="U10"
        )
    ids: list[int] = []
    for i, token in enumerate(items):
        value = as_integer(token)
        if value is None:
            raise UsageError(
                f"prompt token {i}",
                found=shown(token),
                expected="an integer id",
                next_step="Give token ids",
                code="U11",
            )
        if not 0 <= value < vocab_size:
            raise UsageError(
                f"prompt token {i}",
                found=value,
                expected=f"0 to {vocab_size - 1}",
                next_step="Encode the prompt with this model's tokenizer",
                code="U12",
            )
        ids.append(value)
    if len(ids) >= context:
        raise UsageError(
            "prompt length",
            found=f"{len(ids)} tokens",
            expected=f"at most {context - 1} (context {context}, one position for the reply)",
            next_step="Shorten the prompt",
            code="U13",
        )
    return ids


def check_rows(max_rows: object) -> int:
    """`max_rows` of an engine, at least 1."""
    if isinstance(max_rows, int) and not isinstance(max_rows, bool) and max_rows >= 1:
        return max_rows
    raise UsageError(
        "max_rows",
        found=shown(max_rows),
        expected="an integer of at least 1",
        next_step="Give the number of requests served at once",
        code="U37",
    )
