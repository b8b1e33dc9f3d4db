// Attention as an mlx primitive.
#pragma once

#include <optional>

#include "mlx/array.h"
#include "mlx/utils.h"

namespace spec {

// Keys or values (B, Hkv, T, D) as floats; or packed words (B, Hkv, T, D * bits / 32) with a scale and a bias per group.
struct Entries {
  mlx::core::array data;
  std::optional<mlx::core::array> scales, biases;
};

// How keys and values are packed: 4 or 8 bits in groups of 32, 64 or 128; zeros for floats.
struct Codes {
  int bits = 0, group = 0;
  bool operator==(const Codes&) const = default;
};

// q (B, H, L, D), keys (B, Hkv, T, D), values (B, Hkv, T, Dv), H a multiple of Hkv -> (B, H, L, Dv) in q's dtype.
// causal: query l sees the keys up to T - L + l. mask: bool or float, broadcast to (B, H, L, T), bool True where a key
// is seen. Raises std::invalid_argument for anything else.
mlx::core::array attention(const mlx::core::array& q, const Entries& keys, const Entries& values, Codes codes, float scale,
                           const std::optional<mlx::core::array>& mask, bool causal, mlx::core::StreamOrDevice stream);

}  // namespace spec
