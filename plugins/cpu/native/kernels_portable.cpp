// Any machine: four lanes of plain C++.
#include "kernels.h"

#include <math.h>
#include <string.h>

namespace spec {
namespace {
#include "scalar.h"
#include "vec_plain.h"
#include "table.inl"

const Kernels kernels[] = {table<0>("portable"), table<1>("portable int8"), table<2>("portable int16")};
}  // namespace

const Kernels* portable_kernels(int bytes) { return kernels + bytes; }
}  // namespace spec
