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

thread_local Buffer scratch_buffer, unwritten_buffer;

// Head `head` of row b of an array (B, L, heads, ...).
Series series(const mx::array& a, int64_t b, int64_t head) {
  const int64_t start = b * a.strides(0) + head * a.strides(2);
  return {a.data<char>() + start * int64_t(a.itemsize()), *stored_type(a.dtype()), a.strides(1), a.ndim() > 3 ? a.strides(3) : 0};
}

void run_one(Delta& d) {
  d.scratch = scratch_buffer.floats(size_t(kernels().delta_floats(d)));
  kernels().delta(d);
}

// fill(task, b, head, first row) completes what one task is given; it runs; then(task, b, head, first row) follows. `work`
// is the steps of both.
template <class F, class G>
void run(const mx::array& state, const mx::array& k, const mx::array& decay, mx::array& after, int64_t L, int64_t work, F&& fill,
         G&& then) {
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
    run_one(d);
    then(d, b, head, first);
  };
  const int64_t tasks = B * Hv * blocks;
  if (B * Hv * Dv * Dk * std::max<int64_t>(work, 1) < SERIAL_WORK) {
    for (int64_t i = 0; i < tasks; i++) task(i);
  } else {
    parallel_for(tasks, task);
  }
}

void nothing(const Delta&, int64_t, int64_t, int64_t) {}

// What a run of steps reads and writes beside the state: given are q, k, v, decay, rate.
void fill_steps(Delta& d, const std::vector<mx::array>& given, mx::array& y, mx::array& deltas, int64_t b, int64_t head, int64_t first) {
  const mx::array &q = given[0], &k = given[1], &v = given[2], &rate = given[4];
  const int64_t L = v.shape(1), Hv = v.shape(2), Dv = v.shape(3), shared = Hv / k.shape(2);
  const int64_t place = (b * L * Hv + head) * Dv + first;
  d.rate = series(rate, b, head), d.queries = series(q, b, head / shared), d.values = series(v, b, head);
  d.values.data = static_cast<const char*>(d.values.data) + first * d.values.apart * int64_t(v.itemsize());
  d.deltas = deltas.data<float>() + place, d.delta_step = Hv * Dv, d.delta_apart = 1;
  d.y = y.data<char>() + place * int64_t(y.itemsize()), d.y_type = *stored_type(y.dtype()), d.y_step = Hv * Dv;
}

// The first keep[b] of the steps of a tape, whose deltas are known.
void fill_replay(Delta& d, const mx::array& deltas, const mx::array& keep, int64_t b, int64_t head, int64_t first) {
  d.replay = true;
  d.steps = std::clamp<int64_t>(keep.data<int32_t>()[b * keep.strides(0)], 0, deltas.shape(1));
  const Series all = series(deltas, b, head);
  d.deltas = static_cast<float*>(const_cast<void*>(all.data)) + first * all.apart;
  d.delta_step = all.step, d.delta_apart = all.apart;
}

class GatedDelta : public CpuPrimitive {
 public:
  explicit GatedDelta(mx::Stream stream) : CpuPrimitive(stream) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch(inputs, outputs, [](const std::vector<mx::array>& given, std::vector<mx::array>& made) {
      const int64_t L = given[2].shape(1);
      auto fill = [&](Delta& d, int64_t b, int64_t head, int64_t first) { fill_steps(d, given, made[0], made[2], b, head, first); };
      run(given[5], given[1], given[3], made[1], L, L, fill, nothing);
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
      const int64_t L = given[3].shape(1);
      auto fill = [&](Delta& d, int64_t b, int64_t head, int64_t first) { fill_replay(d, given[3], given[4], b, head, first); };
      run(given[0], given[1], given[2], made[0], L, L, fill, nothing);
    });
  }

  const char* name() const override { return "SpecReplayDelta"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
};

class ResumeDelta : public CpuPrimitive {
 public:
  explicit ResumeDelta(mx::Stream stream) : CpuPrimitive(stream) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch(inputs, outputs, [](const std::vector<mx::array>& given, std::vector<mx::array>& made) {
      const mx::array &k = given[1], &decay = given[3], &owed_k = given[6], &owed_decay = given[7], &owed = given[8], &keep = given[9];
      const int64_t L = k.shape(1), shared = owed.shape(2) / k.shape(2), Dk = k.shape(3);
      auto fill = [&](Delta& d, int64_t b, int64_t head, int64_t first) { fill_replay(d, owed, keep, b, head, first); };
      auto steps = [&](const Delta& before, int64_t b, int64_t head, int64_t first) {
        Delta d{};
        d.rows = before.rows, d.steps = L, d.D = Dk;
        d.before = before.after, d.row_stride = Dk, d.column_stride = 1;
        d.after = unwritten_buffer.floats(size_t(d.rows * Dk));
        d.decay = series(decay, b, head), d.keys = series(k, b, head / shared);
        fill_steps(d, given, made[0], made[2], b, head, first);
        run_one(d);
      };
      run(given[5], owed_k, owed_decay, made[1], owed.shape(1), owed.shape(1) + L, fill, steps);
    });
  }

  const char* name() const override { return "SpecResumeDelta"; }
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

void check_run(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& decay, const mx::array& rate,
               const mx::array& state) {
  check_steps(state, k, decay);
  const int B = k.shape(0), L = k.shape(1), Hv = state.shape(1), Dv = state.shape(2);
  check_array("queries", q, k.shape(), false);
  check_array("values", v, {B, L, Hv, Dv}, false);
  check_array("rate", rate, {B, L, Hv}, false);
}

void check_tape(const mx::array& state, const mx::array& k, const mx::array& decay, const mx::array& delta, const mx::array& keep) {
  check_steps(state, k, decay);
  check_array("delta", delta, {k.shape(0), k.shape(1), state.shape(1), state.shape(2)}, true);
  if (keep.dtype() != mx::int32 || keep.shape() != mx::Shape{k.shape(0)}) {
    refuse("keep", text(keep.dtype()) + " of shape " + text(keep.shape()), "int32 of shape (" + text(k.shape(0)) + ",)");
  }
}

}  // namespace

std::vector<mx::array> gated_delta(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& decay,
                                   const mx::array& rate, const mx::array& state, mx::StreamOrDevice stream) {
  check_run(q, k, v, decay, rate, state);
  auto primitive = std::make_shared<GatedDelta>(mx::to_stream(stream));
  return mx::array::make_arrays({v.shape(), state.shape(), v.shape()}, {v.dtype(), mx::float32, mx::float32}, primitive,
                                {q, k, v, decay, rate, state});
}

mx::array replay_delta(const mx::array& state, const mx::array& k, const mx::array& decay, const mx::array& delta,
                       const mx::array& keep, mx::StreamOrDevice stream) {
  check_tape(state, k, decay, delta, keep);
  auto primitive = std::make_shared<ReplayDelta>(mx::to_stream(stream));
  return mx::array(state.shape(), mx::float32, primitive, {state, k, decay, delta, keep});
}

std::vector<mx::array> resume_delta(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& decay,
                                    const mx::array& rate, const mx::array& state, const mx::array& owed_k,
                                    const mx::array& owed_decay, const mx::array& owed_delta, const mx::array& keep,
                                    mx::StreamOrDevice stream) {
  check_run(q, k, v, decay, rate, state);
  check_tape(state, owed_k, owed_decay, owed_delta, keep);
  auto primitive = std::make_shared<ResumeDelta>(mx::to_stream(stream));
  return mx::array::make_arrays({v.shape(), state.shape(), v.shape()}, {v.dtype(), mx::float32, mx::float32}, primitive,
                                {q, k, v, decay, rate, state, owed_k, owed_decay, owed_delta, keep});
}

}  // namespace spec
