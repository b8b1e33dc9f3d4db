"""Bodies of GPU kernels on the CPU: compiled by the C++ compiler behind a small imitation of the device.

`metal_kernel` and `cuda_kernel` take what those of `mx.fast` take and run what they return over the whole grid.
The 32 threads that shuffle among themselves are fibres: each runs to its next shuffle, then the next one does.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

TYPES = {mx.float32: "float", mx.bfloat16: "bfloat", mx.int32: "int"}

COMMON = r"""
#define _XOPEN_SOURCE 700
#include <ucontext.h>
#include <cstdint>
#include <cstring>
#include <cstddef>
#include <algorithm>
#include <vector>
using std::size_t;
typedef unsigned int uint;
typedef unsigned short ushort;
struct uint3 { unsigned x, y, z; };

struct bfloat {
  uint16_t bits;
  bfloat() = default;
  explicit bfloat(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    bits = uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  explicit operator float() const {
    uint32_t u = uint32_t(bits) << 16;
    float x;
    std::memcpy(&x, &u, 4);
    return x;
  }
};

const int WIDTH = 32;
struct Fibre { ucontext_t context; std::vector<char> stack; bool done; uint3 thread; };
Fibre fibres[WIDTH];
ucontext_t scheduler;
int current;
float slots[2][WIDTH];
int turns[WIDTH];
uint3 group, size_of_group;

float shuffle(float x, int distance) {
  int me = current, turn = turns[me]++ & 1;
  slots[turn][me] = x;
  swapcontext(&fibres[me].context, &scheduler);
  return slots[turn][me ^ distance];
}
"""

METAL = r"""
#define simd_shuffle_xor(x, distance) shuffle(x, distance)
"""

CUDA = r"""
#define threadIdx (fibres[current].thread)
#define blockIdx group
#define blockDim size_of_group
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __shfl_xor_sync(unsigned mask, float x, int distance) {
  return mask == 0xffffffffu ? shuffle(x, distance) : x / 0.0f;
}
"""

RUN = r"""
extern "C" void run(void** given, int gx, int gy, int gz, int tx, int ty, int tz) {
  pointers = given;
  size_of_group = {unsigned(tx), unsigned(ty), unsigned(tz)};
  uint3 groups = {unsigned((gx + tx - 1) / tx), unsigned((gy + ty - 1) / ty), unsigned((gz + tz - 1) / tz)};
  for (group.z = 0; group.z < groups.z; ++group.z)
    for (group.y = 0; group.y < groups.y; ++group.y)
      for (group.x = 0; group.x < groups.x; ++group.x)
        for (int z = 0; z < tz; ++z)
          for (int y = 0; y < ty; ++y)
            for (int x = 0; x < tx; x += WIDTH) {
              int alive = 0;
              for (int i = 0; i < WIDTH && x + i < tx; ++i) {
                Fibre& f = fibres[i];
                f.thread = {unsigned(x + i), unsigned(y), unsigned(z)};
                f.done = outside(f.thread, gx, gy, gz);
                turns[i] = 0;
                if (f.done) continue;
                f.stack.resize(1 << 16);
                getcontext(&f.context);
                f.context.uc_stack.ss_sp = f.stack.data();
                f.context.uc_stack.ss_size = f.stack.size();
                f.context.uc_link = &scheduler;
                makecontext(&f.context, entry, 0);
                ++alive;
              }
              while (alive)
                for (current = 0; current < WIDTH && x + current < tx; ++current)
                  if (!fibres[current].done) {
                    swapcontext(&scheduler, &fibres[current].context);
                    alive -= fibres[current].done;
                  }
            }
}
"""


def compiler() -> str:
    """The C++ compiler of this machine, which the tests of kernels need."""
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    assert found, "no C++ compiler: the kernels' bodies cannot be tried"
    return found


class Emulated:
    """One kernel, callable as those of `mx.fast` are; a library per template and set of dtypes."""

    def __init__(self, backend: str, inputs: list[str], outputs: list[str], source: str, header: str):
        self.backend, self.inputs, self.outputs, self.source, self.header = backend, inputs, outputs, source, header

    def __call__(self, *, inputs, template, grid, threadgroup, output_shapes, output_dtypes):
        mx.eval(inputs)
        for name, x in zip(self.inputs, inputs, strict=True):
            assert x.dtype in TYPES, (name, x.dtype)
        library = compiled(self._program(inputs, template, output_dtypes))
        arrays = [_bytes(x) for x in inputs]
        shapes = [np.array(x.shape or (1,), dtype=np.int32) for x in inputs]
        made = [
            np.full(int(np.prod(s)) * d.size, 0xFF, np.uint8) for s, d in zip(output_shapes, output_dtypes, strict=True)
        ]
        pointers = [a.ctypes.data for a in (*arrays, *shapes, *made)]
        library.run((ctypes.c_void_p * len(pointers))(*pointers), *grid, *threadgroup)
        return [mx.array(m).view(d).reshape(s) for m, s, d in zip(made, output_shapes, output_dtypes, strict=True)]

    def _program(self, inputs, template, output_dtypes) -> str:
        """The whole C++ source, with the body in a function as MLX makes it."""
        declared = []
        for i, (name, x) in enumerate(zip(self.inputs, inputs, strict=True)):
            declared.append(f"const {TYPES[x.dtype]}* {name} = (const {TYPES[x.dtype]}*)pointers[{i}];")
            declared.append(f"const int* {name}_shape = (const int*)pointers[{i + len(inputs)}]; (void){name}_shape;")
        for i, (name, dtype) in enumerate(zip(self.outputs, output_dtypes, strict=True)):
            declared.append(f"{TYPES[dtype]}* {name} = ({TYPES[dtype]}*)pointers[{i + 2 * len(inputs)}];")
        for name, value in template:
            declared.append(
                f"constexpr int {name} = {value};" if isinstance(value, int) else f"using {name} = {TYPES[value]};"
            )
        declared += METAL_PLACES if self.backend == "metal" else []
        # a group that reaches past the grid is cut off by Metal and runs whole on CUDA
        cut = "t.x + group.x * size_of_group.x >= (unsigned)gx || t.y + group.y * size_of_group.y >= (unsigned)gy"
        outside = f"return {cut};" if self.backend == "metal" else "return (void)t, (void)gx, (void)gy, false;"
        return "\n".join(
            [
                COMMON,
                METAL if self.backend == "metal" else CUDA,
                self.header,
                "void** pointers;",
                "void body() {",
                *declared,
                self.source,
                "}",
                "void entry() { body(); fibres[current].done = true; }",
                f"bool outside(uint3 t, int gx, int gy, int gz) {{ (void)gz; {outside} }}",
                RUN,
            ]
        )


@cache
def compiled(text: str) -> ctypes.CDLL:
    """A program as a library; the file may go once it is loaded."""
    with tempfile.TemporaryDirectory(prefix="mlx-spec-kernel-") as folder:
        base = Path(folder) / "kernel"
        base.with_suffix(".cpp").write_text(text)
        quiet = ["-Wall", "-Wno-unknown-pragmas", "-Wno-deprecated-declarations"]
        command = [compiler(), "-std=c++17", "-O1", "-ffp-contract=off", *quiet, "-shared", "-fPIC"]
        done = subprocess.run(
            [*command, "-o", f"{base}.so", f"{base}.cpp"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(f"{base}.so")


METAL_PLACES = [
    "const uint3 me = fibres[current].thread;",
    "const uint thread_index_in_simdgroup = me.x % WIDTH; (void)thread_index_in_simdgroup;",
    "const uint3 thread_position_in_grid = {me.x + group.x * size_of_group.x, me.y + group.y * size_of_group.y,"
    " me.z + group.z * size_of_group.z};",
]


def _bytes(x: mx.array) -> np.ndarray:
    """A row-contiguous copy of the array's bytes, as MLX hands arrays to kernels."""
    return np.array(mx.contiguous(x).view(mx.uint8)) if x.ndim else np.array(x.reshape(1).view(mx.uint8))


def metal_kernel(name, input_names, output_names, source, header=""):
    """As mx.fast.metal_kernel."""
    return Emulated("metal", input_names, output_names, source, header)


def cuda_kernel(name, input_names, output_names, source, header=""):
    """As mx.fast.cuda_kernel."""
    return Emulated("cuda", input_names, output_names, source, header)
