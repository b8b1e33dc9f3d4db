// Attention as an mlx primitive.
#pragma once

#include <optional>

#include "mlx/array.h"
#include "mlx/utils.h"

namespace spec {

// q (B, H, L, D), k (B, Hkv, T, D), v (B, Hkv, T, Dv), H a multiple of Hkv -> (B, H, L, Dv) in q's dtype.
// causal: query l sees the keys up to T - L + l. mask: bool or float, broadcast to (B, H, L, T), bool True where a key
// is seen. Raises std::invalid_argument for anything else.
mlx::core::array attention(const mlx::core::array& q, const mlx::core::array& k, const mlx::core::array& v, float scale,
                           const std::optional<mlx::core::array>& mask, bool causal, mlx::core::StreamOrDevice stream);

}  // namespace spec
