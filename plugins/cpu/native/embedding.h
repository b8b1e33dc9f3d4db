// Rows of an embedding table as an mlx primitive.
#pragma once

#include "linear.h"

namespace spec {

// Rows `indices` (...) of a table (V, D), packed or not: (..., D), with the bytes that mlx's take and dequantize give.
// Negative indices count from the end; rows that do not exist are NaN. Raises std::invalid_argument, naming shapes or
// dtypes, for what is no such table, or indices that are not int32, uint32 or int64.
mx::array rows(const mx::array& indices, const mx::array& w, const std::optional<mx::array>& scales,
               const std::optional<mx::array>& biases, const Layout& layout, mx::StreamOrDevice stream);

// A checked table. Inside another operation, for `read_row`, its weights are contiguous and evaluated.
struct Table {
  Layout layout;
  std::vector<mx::array> given;  // weights, then scales and biases as far as there are any
  mx::Dtype result;              // of its rows
  int64_t width;                 // of a row
};
Table table_of(const mx::array& w, const std::optional<mx::array>& scales, const std::optional<mx::array>& biases, const Layout& layout);

// One row of it, as `rows` gives it.
void read_row(const Table& table, int64_t id, void* y);

}  // namespace spec
