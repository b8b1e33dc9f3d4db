"""Compiles the CPU kernels for ARM64 and compares those of NEON, emulated, with this machine's.

`make neon` runs it. Every source is compiled for Linux and for macOS, warnings being errors. Then NEON's kernels of
both builds compute what two tables compiled for this machine compute from the same bytes: the portable kernels with
fused multiply-adds, which have to give the same bytes, and the portable kernels as they are, whose roundings differ
where an operation fuses. Rows computed together have to have the bytes of the rows computed alone. The tables that
round rows are compared likewise, and where they do not round with the exact ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from arm import neon_tables
from attending import attentions
from building import LINUX, MACOS, Build
from deltas import deltas
from products import products
from rounded import exact_products, rounded_products
from rowwise import activations, choices, convolutions, norms, pairs_of_rows, rotations
from table import FORMS, Room, host_tables
from trial import Trial

Group = Callable[[Trial], None]
GROUPS = (products, norms, rotations, activations, pairs_of_rows, convolutions, choices, attentions, deltas)
MEMORY = 64 << 20
SHOWN = 5  # differences of a group


def compare(trial: Trial, groups: tuple[Group, ...]) -> bool:
    """Whether there are differences."""
    for group in groups:
        known = set(trial.counts)
        group(trial)
        for name in [name for name in trial.counts if name not in known]:
            count = trial.counts[name]
            print(count.line(), flush=True)
            for failure in count.failures[:SHOWN]:
                print(f"  {failure}")
    return any(count.failures for count in trial.counts.values())


def main() -> None:
    print("Compiling plugins/cpu for ARM64: some minutes the first time.", flush=True)
    build = Build()
    images = []
    for target in (LINUX, MACOS):
        print(f"{target}: {build.objects(target)} files compile without a warning", flush=True)
        images.append(build.image(target))
    room = Room(MEMORY)
    host = str(build.host())
    exact, *rounded = (host_tables(host, form) for form in range(len(FORMS)))
    failed = False
    for neon, *neon_rounded in neon_tables(*images, room):
        print(f"\nneon, built for {neon.name}, in emulation:", flush=True)
        failed |= compare(Trial(neon, *exact, room), GROUPS)
        for form, ours, theirs in zip(FORMS[1:], neon_rounded, rounded, strict=True):
            print(f"\nneon {form}, built for {neon.name}, in emulation:", flush=True)
            failed |= compare(Trial(ours, *theirs, room, form=form), (rounded_products,))
            print("\nwhere it does not round:", flush=True)
            failed |= compare(Trial(ours, neon, theirs[1], room, "the exact table", form), (exact_products,))
    sys.exit(failed)


if __name__ == "__main__":
    main()
