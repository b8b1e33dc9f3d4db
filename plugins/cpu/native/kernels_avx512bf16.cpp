// AVX-512 with its bfloat16 products and byte tables.
#define SPEC_PAIRS 1
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <type_traits>
#include <string.h>

namespace spec {
namespace {
#include "scalar.h"
#include "vec_avx512.h"
#include "table.inl"

const Kernels kernels[] = {table<0>("avx512bf16"), table<1>("avx512bf16 int8"), table<2>("avx512bf16 int16")};
}  // namespace

const Kernels* avx512bf16_kernels(int bytes) { return kernels + bytes; }
}  // namespace spec
#else
const spec::Kernels* spec::avx512bf16_kernels(int) { return nullptr; }
#endif
