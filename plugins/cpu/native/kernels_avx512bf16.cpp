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

const Kernels kernels = table("avx512bf16");
}  // namespace

const Kernels* avx512bf16_kernels() { return &kernels; }
}  // namespace spec
#else
const spec::Kernels* spec::avx512bf16_kernels() { return nullptr; }
#endif
