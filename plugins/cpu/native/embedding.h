// Rows of an embedding table as an mlx primitive.
#pragma once

#include "linear.h"

namespace spec {

// Rows `indices` (...) of a table (V, D), packed or not: (..., D), with the bytes that mlx's take and dequantize give.
// Negative indices count from the end; rows that do not exist are NaN. Raises std::invalid_argument, naming shapes or
// dtypes, for what is no such table, or indices that are not int32, uint32 or int64.
mx::array rows(const mx::array& indices, const mx::array& w, const std::optional<mx::array>& scales,
               const std::optional<mx::array>& biases, const Layout& layout, mx::StreamOrDevice stream);

}  // namespace spec
