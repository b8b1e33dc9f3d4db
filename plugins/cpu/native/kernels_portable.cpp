// Any machine: four lanes of plain C++.
#define SPEC_PORTABLE 1
#include "kernels.h"

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

const Kernels kernels = {"portable", scratch_floats, columns, product, prepare, W, direct, rms, attention_floats, attend, read, multiply_add, W * CHAINS};
}  // namespace

const Kernels* portable_kernels() { return &kernels; }
}  // namespace spec
