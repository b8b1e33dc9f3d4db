// Any machine: four lanes of plain C++.
#include "kernels.h"

#include <math.h>
#include <string.h>

namespace spec {
namespace {
#include "scalar.h"
#include "vec_plain.h"
#include "table.inl"

const Kernels kernels = table("portable");
}  // namespace

const Kernels* portable_kernels() { return &kernels; }
}  // namespace spec
