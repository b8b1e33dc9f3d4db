// The four lanes of plain C++ with fused multiply-adds: the arithmetic that NEON's kernels have to have, byte for byte.
#include "kernels.h"

#include <math.h>
#include <string.h>

namespace spec {
namespace {
#include "scalar.h"
#define fma unfused [[maybe_unused]]
#include "vec_plain.h"
#undef fma
static inline vec fma(vec a, vec b, vec c) {
  vec r;
  for (int i = 0; i < W; i++) r.v[i] = fmaf(a.v[i], b.v[i], c.v[i]);
  return r;
}
#include "table.inl"

const Kernels kernels[] = {table<0>("fused"), table<1>("fused int8"), table<2>("fused int16")};
}  // namespace
}  // namespace spec

extern "C" {
const void* fused_table(int bytes) { return spec::kernels + bytes; }
const void* portable_table(int bytes) { return spec::portable_kernels(bytes); }

// Of the structures that tools/neon/table.py declares again.
extern const int64_t sizes[8] = {sizeof(spec::Weights),     sizeof(spec::Soon),     sizeof(spec::Product),
                                 sizeof(spec::Attention),   sizeof(spec::Rotation), sizeof(spec::Activation),
                                 sizeof(spec::Convolution), sizeof(spec::Delta)};
}
