#include "delta.h"

#include <algorithm>

#include "arrays.h"
#include "kernels.h"
#include "linear.h"
#include "pool.h"
#include "primitive.h"

namespace spec {
namespace {

constexpr int64_t SERIAL_WORK = 60'000;  // elements of states, times steps, below which waking a thread costs more
constexpr int64_t LEAST_ROWS = 4;        // of a state, in one task

thread_local Buffer scratch_buffer;

// Head `head` of row b of an array (B, L, heads, ...).
Series series(const mx::array& a, int64_t b, int64_t head) {
  const int64_t start = b * a.strides(0) + head * a.strides(2);
  return {a.data<char>() + start * int64_t(a.itemsize()), *stored_type(a.dtype()), a.strides(1), a.ndim() > 3 ? a.strides(3) : 0};
}

// fill(task, b, head, first row) completes what one task is given, then it runs.
template <class F>
void run(const mx::array& state, const mx::array& k, const mx::array& decay, mx::array& after, int64_t L, F&& fill) {
  const Kernels& kernel = kernels();
  const int64_t B = state.shape(0), Hv = state.shape(1), Dv = state.shape(2), Dk = state.shape(3), shared = Hv / k.shape(2);
  const int64_t wanted = B * Hv * Dv / (threads() * 8) / LEAST_ROWS * LEAST_ROWS;
  const int64_t rows = std::min(std::max(wanted, LEAST_ROWS), std::max(Dv, LEAST_ROWS)), blocks = (Dv + rows - 1) / rows;
  auto task = [&](int64_t i) {
    const int64_t first = i % blocks * rows, head = i / blocks % Hv, b = i / blocks / Hv;
    Delta d{};
    d.rows = std::min(rows, Dv - first), d.steps = L, d.D = Dk;
    d.before = state.data<float>() + b * state.strides(0) + head * state.strides(1) + first * state.strides(2);
    d.row_stride = state.strides(2), d.column_stride = state.strides(3);
    d.after = after.data<float>() + ((b * Hv + head) * Dv + first) * Dk;
    d.decay = series(decay, b, head), d.keys = series(k, b, head / shared);
    fill(d, b, head, first);
    d.scratch = scratch_buffer.floats(size_t(kernel.delta_floats(d)));
    kernel.delta(d);
  };
  const int64_t tasks = B * Hv * blocks;
  if (B * Hv * Dv * Dk * std::max<int64_t>(L, 1) < SERIAL_WORK) {
    for (int64_t i = 0; i < tasks; i++) task(i);
  } else {
    parallel_for(tasks, task);
  }
}

class GatedDelta : public CpuPrimitive {
 public:
  explicit GatedDelta(mx::Stream stream) : CpuPrimitive(stream) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch(inputs, outputs, [](const std::vector<mx::array>& given, std::vector<mx::array>& made) {
      const mx::array &q = given[0], &k = given[1], &v = given[2], &decay = given[3], &rate = given[4], &state = given[5];
      mx::array &y = made[0], &deltas = made[2];
      const int64_t L = v.shape(1), Hv = v.shape(2), Dv = v.shape(3), shared = Hv / k.shape(2);
      run(state, k, decay, made[1], L, [&](Delta& d, int64_t b, int64_t head, int64_t first) {
        const int64_t place = (b * L * Hv + head) * Dv + first;
        d.rate = series(rate, b, head), d.queries = series(q, b, head / shared), d.values = series(v, b, head);
        d.values.data = static_cast<const char*>(d.values.data) + first * d.values.apart * int64_t(v.itemsize());
        d.deltas = deltas.data<float>() + place, d.delta_step = Hv * Dv, d.delta_apart = 1;
        d.y = y.data<char>() + place * int64_t(y.itemsize()), d.y_type = *stored_type(y.dtype()), d.y_step = Hv * Dv;
      });
    });
  }

  const char* name() const override { return "SpecGatedDelta"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
};

class ReplayDelta : public CpuPrimitive {
 public:
  explicit ReplayDelta(mx::Stream stream) : CpuPrimitive(stream) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch(inputs, outputs, [](const std::vector<mx::array>& given, std::vector<mx::array>& made) {
      const mx::array &state = given[0], &k = given[1], &decay = given[2], &deltas = given[3], &keep = given[4];
      const int64_t L = deltas.shape(1);
      run(state, k, decay, made[0], L, [&](Delta& d, int64_t b, int64_t head, int64_t first) {
        d.replay = true;
        d.steps = std::clamp<int64_t>(keep.data<int32_t>()[b * keep.strides(0)], 0, L);
        const Series all = series(deltas, b, head);
        d.deltas = static_cast<float*>(const_cast<void*>(all.data)) + first * all.apart;
        d.delta_step = all.step, d.delta_apart = all.apart;
      });
    });
  }

  const char* name() const override { return "SpecReplayDelta"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
};

void check_array(const char* what, const mx::array& a, const mx::Shape& shape, bool float32) {
  if (a.shape() != shape) refuse(what, "shape " + text(a.shape()), text(shape));
  if (float32 ? a.dtype() != mx::float32 : !stored_type(a.dtype())) {
    refuse(what, text(a.dtype()), float32 ? "float32" : "float32, float16 or bfloat16");
  }
}

// Heads and widths are those of the state; steps those of the keys.
void check_steps(const mx::array& state, const mx::array& k, const mx::array& decay) {
  if (state.ndim() != 4 || state.dtype() != mx::float32) refuse("state", text(state.dtype()) + " of shape " + text(state.shape()), "float32 of shape (B, Hv, Dv, Dk)");
  const bool fits = k.ndim() == 4 && k.shape(0) == state.shape(0) && k.shape(3) == state.shape(3) && k.shape(2) > 0 &&
                    state.shape(1) % k.shape(2) == 0 && stored_type(k.dtype());
  if (!fits) refuse("keys", text(k.dtype()) + " of shape " + text(k.shape()), "floats (B, L, Hk, Dk) for a state " + text(state.shape()));
  check_array("decay", decay, {k.shape(0), k.shape(1), state.shape(1)}, true);
}

}  // namespace

std::vector<mx::array> gated_delta(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& decay,
                                   const mx::array& rate, const mx::array& state, mx::StreamOrDevice stream) {
  check_steps(state, k, decay);
  const int B = k.shape(0), L = k.shape(1), Hv = state.shape(1), Dv = state.shape(2);
  check_array("queries", q, k.shape(), false);
  check_array("values", v, {B, L, Hv, Dv}, false);
  check_array("rate", rate, {B, L, Hv}, false);
  auto primitive = std::make_shared<GatedDelta>(mx::to_stream(stream));
  return mx::array::make_arrays({v.shape(), state.shape(), v.shape()}, {v.dtype(), mx::float32, mx::float32}, primitive,
                                {q, k, v, decay, rate, state});
}

mx::array replay_delta(const mx::array& state, const mx::array& k, const mx::array& decay, const mx::array& delta,
                       const mx::array& keep, mx::StreamOrDevice stream) {
  check_steps(state, k, decay);
  check_array("delta", delta, {k.shape(0), k.shape(1), state.shape(1), state.shape(2)}, true);
  if (keep.dtype() != mx::int32 || keep.shape() != mx::Shape{k.shape(0)}) {
    refuse("keep", text(keep.dtype()) + " of shape " + text(keep.shape()), "int32 of shape (" + text(k.shape(0)) + ",)");
  }
  auto primitive = std::make_shared<ReplayDelta>(mx::to_stream(stream));
  return mx::array(state.shape(), mx::float32, primitive, {state, k, decay, delta, keep});
}

}  // namespace spec
