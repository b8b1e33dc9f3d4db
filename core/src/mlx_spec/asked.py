"""What can be refused about the arguments of a load before a model is looked for, let alone read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import UsageError
from .kernels import check_kernels
from .types import LEVELS
from .values import as_integer, shown
from .width import check_block_size, resolve_block_size

if TYPE_CHECKING:
    from .loading import DrafterChoice

DTYPES = ("float32", "bfloat16", "float16")


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
    if exactness not in LEVELS:
        raise UsageError(
            "--exactness",
            found=exactness,
            expected="bitwise | greedy | distribution | lossy",
            next_step="Choose one of these",
            code="U42",
        )
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


def check_width(choice: DrafterChoice | None, block_size: int | None, block_size_from: str) -> DrafterChoice | None:
    """`choice`; UsageError for a block size wider than its drafter says it can run, before weights."""
    if choice is not None and block_size is not None:
        resolve_block_size((block_size, block_size_from), choice.card, choice.kind)
    return choice
