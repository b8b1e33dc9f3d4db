"""What can be refused about the arguments of a load before a model is looked for, let alone read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .errors import UsageError
from .kernels import check_kernels
from .values import as_integer, shown
from .width import check_block_size, resolve_block_size

if TYPE_CHECKING:
    from .loading import DrafterChoice

DTYPES = ("float32", "bfloat16", "float16")
ASKED_LEVELS = ("bitwise", "greedy", "distribution", "lossy")  # unproven is what a pair is without a verdict


def check_values(
    block_size: int | None,
    block_size_from: str,
    dtype: str | None,
    exactness: str,
    kv_bits: int | None,
    kv_group: int,
    prefill_step: int | None,
) -> None:
    """UsageError for a number out of range, or a dtype, level, K/V setting or kernel nobody has."""
    if block_size is not None:
        check_block_size(block_size, "block_size" if block_size_from == "operator" else block_size_from)
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(
            "--dtype", found=dtype, expected=" | ".join(DTYPES), next_step="Choose one of these", code="U25"
        )
    check_level(exactness)
    if prefill_step is not None and (as_integer(prefill_step) or 0) < 1:
        raise UsageError(
            "prefill_step",
            found=shown(prefill_step),
            expected="a whole number of at least 1",
            next_step="Give one, or leave it out",
            code="U50",
        )
    if kv_bits is not None:
        from .state.quantised import check_quantisation

        check_quantisation(kv_bits, kv_group)
    check_kernels()


def check_level(exactness: str) -> None:
    """UsageError for a level of exactness that cannot be asked for."""
    if exactness not in ASKED_LEVELS:
        raise UsageError(
            "--exactness",
            found=exactness,
            expected=" | ".join(ASKED_LEVELS),
            next_step="Choose one of these",
            code="U42",
        )


def check_arguments(options: object, probe: object, **functions: object) -> None:
    """UsageError for an argument of a load that is of the wrong type; `functions` may be None."""
    fitting = {
        "options": (options, options is None or isinstance(options, Mapping), "a mapping of drafting options by name"),
        "probe": (probe, isinstance(probe, bool), "True or False"),
    }
    for name, function in functions.items():
        fitting[name] = (function, function is None or callable(function), "a function")
    for name, (value, fits, expected) in fitting.items():
        if not fits:
            raise UsageError(
                name,
                found=f"{type(value).__name__} {shown(value)}",
                expected=expected,
                next_step="Correct it, or leave it out",
                code="U50",
            )


def check_width(choice: DrafterChoice | None, block_size: int | None, block_size_from: str) -> DrafterChoice | None:
    """`choice`; UsageError for a block size wider than its drafter says it can run, before weights."""
    if choice is not None and block_size is not None:
        resolve_block_size((block_size, block_size_from), choice.card, choice.kind)
    return choice
