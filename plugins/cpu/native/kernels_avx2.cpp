#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

namespace spec {
namespace {
#include "scalar.h"
#include "vec_avx2.h"
#include "table.inl"

const Kernels kernels[] = {table<false>("avx2"), table<true>("avx2 int8")};
}  // namespace

const Kernels* avx2_kernels(bool rounded) { return kernels + rounded; }
}  // namespace spec
#else
const spec::Kernels* spec::avx2_kernels(bool) { return nullptr; }
#endif
