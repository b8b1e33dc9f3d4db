// Rotary positions as an mlx primitive.
#pragma once

#include <variant>

#include "linear.h"

namespace spec {

// x (B, ..., L, D) with row l of batch b turned as for position offset[b] + l: the same shape and dtype.
// inverse (dims / 2,) float32: one over the wavelength of each pair, in radians; offset: one for all, or (B,) int32.
// neighbours: pairs are elements 2i and 2i + 1, else i and i + dims / 2. Elements from dims on are copied.
// Raises std::invalid_argument, naming shapes or dtypes, for anything else.
mx::array rope(const mx::array& x, int dims, bool neighbours, float scale, const mx::array& inverse,
               const std::variant<int, mx::array>& offset, mx::StreamOrDevice stream);

}  // namespace spec
