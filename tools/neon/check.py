"""Compiles the CPU kernels for ARM64 and compares those of NEON, emulated, with this machine's.

`make neon` runs it. Every source is compiled for Linux and for macOS, warnings being errors. Then NEON's kernels of
both builds compute what two tables compiled for this machine compute from the same bytes: the portable kernels with
fused multiply-adds, which have to give the same bytes, and the portable kernels as they are, whose roundings differ
where an operation fuses. Rows computed together have to have the bytes of the rows computed alone.
"""

from __future__ import annotations

import sys

from arm import neon_tables
from attending import attentions
from building import LINUX, MACOS, Build
from deltas import deltas
from products import products
from rowwise import activations, choices, convolutions, norms, pairs_of_rows, rotations
from table import Room, host_tables
from trial import Trial

GROUPS = (products, norms, rotations, activations, pairs_of_rows, convolutions, choices, attentions, deltas)
MEMORY = 64 << 20
SHOWN = 5  # differences of a group


def main() -> None:
    print("Compiling plugins/cpu for ARM64: some minutes the first time.", flush=True)
    build = Build()
    images = []
    for target in (LINUX, MACOS):
        print(f"{target}: {build.objects(target)} files compile without a warning", flush=True)
        images.append(build.image(target))
    room = Room(MEMORY)
    fused, portable = host_tables(str(build.host()))
    failed = False
    for neon in neon_tables(*images, room):
        print(f"\nneon, built for {neon.name}, in emulation:", flush=True)
        trial = Trial(neon, fused, portable, room)
        for group in GROUPS:
            known = set(trial.counts)
            group(trial)
            for name in [name for name in trial.counts if name not in known]:
                count = trial.counts[name]
                print(count.line(), flush=True)
                for failure in count.failures[:SHOWN]:
                    print(f"  {failure}")
                failed |= bool(count.failures)
    sys.exit(failed)


if __name__ == "__main__":
    main()
