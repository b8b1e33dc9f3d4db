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

const Kernels kernels[] = {table<false>("avx512bf16"), table<true>("avx512bf16 int8")};
}  // namespace

const Kernels* avx512bf16_kernels(bool rounded) { return kernels + rounded; }
}  // namespace spec
#else
const spec::Kernels* spec::avx512bf16_kernels(bool) { return nullptr; }
#endif
