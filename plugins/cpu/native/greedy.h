// The best of every row as an mlx primitive.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "mlx/array.h"
#include "mlx/utils.h"

namespace spec {

// logits (..., V) -> {ids (...) int32, largest (...) float32} over the first `limit` of V. An id is the first at which
// logits - logsumexp(logits), in their dtype, is largest; in float32 the first of the largest logits. `largest` is NaN
// when a logit is; ids mean nothing where it is not finite. Raises std::invalid_argument for other dtypes, for no
// columns and for a limit outside 1 to V.
std::vector<mlx::core::array> greedy(const mlx::core::array& logits, int limit, mlx::core::StreamOrDevice stream);

// The same for rows of V stored logits, one after the other, inside another operation.
void choose_rows(const void* logits, Type type, int64_t rows, int64_t V, int64_t limit, int32_t* ids, float* largest);

}  // namespace spec
