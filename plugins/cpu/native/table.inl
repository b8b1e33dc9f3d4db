// Every operation for the lanes of one instruction set. Included last inside the kernel file's namespace.

#include "lanes.inl"
#include "linear.inl"
#include "norm.inl"
#include "attention.inl"
#include "rope.inl"
#include "activation.inl"
#include "delta.inl"
#include "rowwise.inl"
#include "greedy.inl"
#include "limits.inl"

// `bytes`: what rows by packed codes of four or eight bits are rounded to, 0 where they are not.
template <int bytes>
static constexpr Kernels table(const char* name) {
  return {
      .name = name,
      .scratch_floats = scratch_floats<bytes>,
      .columns = columns,
      .product = product<bytes>,
      .prepare = prepare,
      .compacts = compacts<bytes>,
      .compact = compact<bytes>,
      .lane_floats = lane_floats,
      .put_in_lanes = put_in_lanes,
      .width = W,
      .direct = direct<bytes>,
      .rms = rms,
      .attention_floats = attention_floats,
      .begin = begin,
      .score = score,
      .weigh = weigh,
      .gathered_apart = gathered_apart,
      .gather = gather,
      .waves = waves,
      .rotate = rotate,
      .activate = activate,
      .soft_cap = soft_cap,
      .convolve = convolve,
      .delta_floats = delta_floats,
      .delta = delta,
      .largest = largest,
      .exp_sum = exp_sum,
      .first_best = first_best,
      .round_to = round_to,
      .rowwise = rowwise,
      .read = read,
      .multiply_add = multiply_add,
      .multiply_adds_a_round = W * CHAINS,
  };
}
