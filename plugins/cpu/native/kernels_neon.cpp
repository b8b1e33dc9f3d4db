#include "kernels.h"

#if defined(__ARM_NEON)
#include <arm_neon.h>
#include <math.h>
#include <string.h>

namespace spec {
namespace {
#include "scalar.h"
#include "vec_neon.h"
#include "table.inl"

const Kernels kernels[] = {table<0>("neon"), table<1>("neon int8"), table<2>("neon int16")};
}  // namespace

const Kernels* neon_kernels(int bytes) { return kernels + bytes; }
}  // namespace spec
#else
const spec::Kernels* spec::neon_kernels(int) { return nullptr; }
#endif
