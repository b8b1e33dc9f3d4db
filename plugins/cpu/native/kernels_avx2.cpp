#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

namespace spec {
namespace {
#include "scalar.h"
#include "vec_avx2.h"
#include "linear.inl"
#include "norm.inl"
#include "attention.inl"
#include "limits.inl"

const Kernels kernels = {"avx2", scratch_floats, columns, product, prepare, W, direct, rms, attention_floats, attend, read, multiply_add, W * CHAINS};
}  // namespace

const Kernels* avx2_kernels() { return &kernels; }
}  // namespace spec
#else
const spec::Kernels* spec::avx2_kernels() { return nullptr; }
#endif
