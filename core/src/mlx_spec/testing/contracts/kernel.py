"""KernelContract: a kernel gives what its reference gives, and no row depends on its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import mlx.core as mx
import pytest

from ..compare import largest_gap
from ..faults import broken, require
from ..watch import same_bytes
from .base import Contract

if TYPE_CHECKING:
    from ...registry import Kernel

BACKENDS = ("cpu", "metal", "cuda")
ROWS = (1, 2, 3, 5, 8, 17)  # odd sizes on purpose
Arguments = Sequence[Any]


class KernelContract(Contract):
    """What core relies on in a `mlx_spec.Kernel`. Fixtures: `kernel` and `arguments`.

    Attributes:
        rows_axis: axis of the output, and of the arguments in `by_row`, along which rows lie.
        by_row: positions of the arguments that have one entry per row; the others are shared by all rows.
    """

    rows_axis: ClassVar[int] = 0
    by_row: ClassVar[tuple[int, ...]] = (0,)
    capabilities: ClassVar[frozenset[str] | set[str] | None] = frozenset()

    @pytest.fixture
    def kernel(self) -> Kernel:
        """The kernel under test."""
        broken("kernel under test", found="none", expected="a mlx_spec.Kernel", look="override the fixture `kernel`")

    @pytest.fixture
    def arguments(self) -> Callable[[int, int], Arguments]:
        """function(rows, seed) -> arguments of one call with that many rows; unequal sizes, unequal axes."""
        broken("arguments of the kernel", found="none", expected="a function", look="override the fixture `arguments`")

    @classmethod
    def notes(cls) -> list[str]:
        """What this machine cannot test."""
        missing = "kernels for metal and cuda: this machine has neither, of those only references were run"
        return [*super().notes(), *([missing] if backend() == "cpu" else [])]

    def test_it_describes_itself(self, kernel: Kernel) -> None:
        """An op, known backends, callables, and a claim that can be checked."""
        unknown = [name for name in kernel.backends if name not in BACKENDS]
        look = "the Kernel(...) record"
        require(bool(kernel.op), "op of the kernel", found=repr(kernel.op), expected="a name", look=look)
        require(
            not unknown, f"backends of kernel {kernel.op}", found=unknown, expected=f"some of {BACKENDS}", look=look
        )
        for name in ("build", "reference"):
            value = getattr(kernel, name)
            require(callable(value), f"{name} of kernel {kernel.op}", found=value, expected="a function", look=look)
        allowed(kernel)

    @pytest.mark.parametrize("rows", ROWS, ids=lambda n: f"rows{n}")
    def test_the_reference_gives_each_row_what_it_gets_alone(
        self, kernel: Kernel, arguments: Callable[[int, int], Arguments], seed: int, rows: int
    ) -> None:
        """Row r of one call equals a call with that row only, in bytes for a bitwise claim."""
        self.check_rows(kernel, kernel.reference, "reference", arguments(rows, seed), rows)

    @pytest.mark.parametrize("rows", ROWS, ids=lambda n: f"rows{n}")
    def test_the_build_gives_what_the_reference_gives(
        self, kernel: Kernel, arguments: Callable[[int, int], Arguments], seed: int, rows: int
    ) -> None:
        """Built for this machine's device: equal to the reference as claimed, and row by row.

        Where there is nothing to build there is nothing to prove.
        """
        if backend() not in kernel.backends:
            return
        given = arguments(rows, seed)
        built = kernel.build()
        agree(
            kernel,
            built(*given),
            kernel.reference(*given),
            f"kernel {kernel.op} over {rows} rows against its reference",
        )
        self.check_rows(kernel, built, "build", given, rows)

    def check_rows(self, kernel: Kernel, function: Callable[..., Any], name: str, given: Arguments, rows: int) -> None:
        """Row invariance of one function."""
        whole = function(*given)
        for row in range(rows):
            alone = [self.row_of(a, row) if i in self.by_row else a for i, a in enumerate(given)]
            what = f"row {row} of {rows} of the {name} of kernel {kernel.op}, against the row alone"
            agree(kernel, self.row_of(whole, row), function(*alone), what)

    def row_of(self, value: mx.array, row: int) -> mx.array:
        """One row, as an array that has one row."""
        return mx.take(value, mx.array([row]), axis=self.rows_axis)


def backend() -> str:
    """What kernels can be built for here."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def allowed(kernel: Kernel) -> float | None:
    """The largest difference a kernel claims, None for equal bytes."""
    if kernel.claim == "bitwise":
        return None
    try:
        return float(kernel.claim)
    except ValueError:  # reported to the author
        broken(
            f"claim of kernel {kernel.op}",
            found=repr(kernel.claim),
            expected='"bitwise" or a largest absolute difference, e.g. "1e-5"',
            look="the Kernel(...) record",
        )


def agree(kernel: Kernel, found: mx.array, expected: mx.array, what: str) -> None:
    """Equal as the kernel claims."""
    limit = allowed(kernel)
    gap = largest_gap(found, expected) if found.shape == expected.shape else float("inf")
    good = same_bytes(found, expected) if limit is None else gap <= limit
    require(
        good,
        what,
        found=f"a largest difference of {gap:.3g}, shapes {found.shape} and {expected.shape}",
        expected="the same bytes" if limit is None else f"at most {limit}",
        look="reductions whose order depends on the number of rows, and rows past the last full tile",
    )
