// The gated delta rule as an mlx primitive; mlx_spec/gated_delta.py says what it computes.
#pragma once

#include <vector>

#include "mlx/array.h"
#include "mlx/utils.h"

namespace spec {

// q, k (B, L, Hk, Dk), v (B, L, Hv, Dv), decay (B, L, Hv) float32, rate (B, L, Hv), state (B, Hv, Dv, Dk) float32 ->
// y (B, L, Hv, Dv) in v's dtype, the state after L steps, delta (B, L, Hv, Dv) float32.
// Raises std::invalid_argument, naming shapes or dtypes, for anything else.
std::vector<mlx::core::array> gated_delta(const mlx::core::array& q, const mlx::core::array& k, const mlx::core::array& v,
                                          const mlx::core::array& decay, const mlx::core::array& rate,
                                          const mlx::core::array& state, mlx::core::StreamOrDevice stream);

// The state after the first keep[b] steps of row b, keep (B,) int32: the bytes that running only those leaves.
mlx::core::array replay_delta(const mlx::core::array& state, const mlx::core::array& k, const mlx::core::array& decay,
                              const mlx::core::array& delta, const mlx::core::array& keep, mlx::core::StreamOrDevice stream);

// What a tape still owes, run first, then L steps from there -> y, the state before those steps, delta: the bytes of
// `replay_delta` and `gated_delta`. Each part of a state goes through both while it is in the caches, and what it is
// after the last step is not written: those steps are owed in turn.
std::vector<mlx::core::array> resume_delta(const mlx::core::array& q, const mlx::core::array& k, const mlx::core::array& v,
                                           const mlx::core::array& decay, const mlx::core::array& rate,
                                           const mlx::core::array& state, const mlx::core::array& owed_k,
                                           const mlx::core::array& owed_decay, const mlx::core::array& owed_delta,
                                           const mlx::core::array& keep, mlx::core::StreamOrDevice stream);

}  // namespace spec
