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

const Kernels kernels[] = {table<0>("avx2"), table<1>("avx2 int8"), table<2>("avx2 int16")};
}  // namespace

const Kernels* avx2_kernels(int bytes) { return kernels + bytes; }
}  // namespace spec
#else
const spec::Kernels* spec::avx2_kernels(int) { return nullptr; }
#endif
