#include "kernels.h"

#if defined(__ARM_NEON)
#include <arm_neon.h>
#include <math.h>
#include <string.h>

namespace spec {
namespace {
#include "scalar.h"
#include "vec_plain.h"
#include "linear.inl"
#include "norm.inl"
#include "attention.inl"
#include "limits.inl"

const Kernels kernels = {"neon", scratch_floats, columns, product, prepare, W, direct, rms, attention_floats, attend, read, multiply_add, W * CHAINS};
}  // namespace

const Kernels* neon_kernels() { return &kernels; }
}  // namespace spec
#else
const spec::Kernels* spec::neon_kernels() { return nullptr; }
#endif
