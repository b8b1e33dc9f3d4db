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

const Kernels kernels = table("neon");
}  // namespace

const Kernels* neon_kernels() { return &kernels; }
}  // namespace spec
#else
const spec::Kernels* spec::neon_kernels() { return nullptr; }
#endif
