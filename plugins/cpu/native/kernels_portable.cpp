// Any machine: four lanes of plain C++.
#include "kernels.h"

#include <math.h>
#include <string.h>

namespace spec {
namespace {
#include "scalar.h"
#include "vec_plain.h"
#include "table.inl"

const Kernels kernels[] = {table<false>("portable"), table<true>("portable int8")};
}  // namespace

const Kernels* portable_kernels(bool rounded) { return kernels + rounded; }
}  // namespace spec
