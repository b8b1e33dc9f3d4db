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

const Kernels kernels[] = {table<false>("neon"), table<true>("neon int8")};
}  // namespace

const Kernels* neon_kernels(bool rounded) { return kernels + rounded; }
}  // namespace spec
#else
const spec::Kernels* spec::neon_kernels(bool) { return nullptr; }
#endif
