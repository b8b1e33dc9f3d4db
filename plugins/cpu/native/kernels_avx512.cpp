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

const Kernels kernels[] = {table<0>("avx512"), table<1>("avx512 int8"), table<2>("avx512 int16")};
}  // namespace

const Kernels* avx512_kernels(int bytes) { return kernels + bytes; }
}  // namespace spec
#else
const spec::Kernels* spec::avx512_kernels(int) { return nullptr; }
#endif
