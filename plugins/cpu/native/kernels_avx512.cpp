#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

namespace spec {
namespace {
#include "scalar.h"
#include "vec_avx512.h"
#include "table.inl"

const Kernels kernels[] = {table<false>("avx512"), table<true>("avx512 int8")};
}  // namespace

const Kernels* avx512_kernels(bool rounded) { return kernels + rounded; }
}  // namespace spec
#else
const spec::Kernels* spec::avx512_kernels(bool) { return nullptr; }
#endif
