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
constexpr int64_t LEAST_ROWS = 8;        // of a state, in one task

thread_local Buffer scratch_buffer;

// Head `head` of row b of an array (B, L, heads, ...).
Series series(const mx::array& a, int64_t b, int64_t head) {
  const int64_t start = b * a.strides(0) + head * a.strides(2);
  return {a.data<char>() + start * int64_t(a.itemsize()), *stored_type(a.dtype()), a.strides(1), a.ndim() > 3 ? a.strides(3) : 0};
}

// The same of an array (B, L, heads, D), from element `first` on.
Series series(const mx::array& a, int64_t b, int64_t head, int64_t first) {
  Series s = series(a, b, head);
  s.data = static_cast<const char*>(s.data) + first * s.apart * int64_t(a.itemsize());
  return s;
}

// One part of a state: `count` of the rows of one head.
struct Rows {
  int64_t b, head, first, count;
};

// fill(delta, rows) completes what a part is given: steps and what comes of them. `work` is all steps, with those owed.
template <class F>
void run(const mx::array& state, int64_t work, F&& fill) {
  const int64_t B = state.shape(0), Hv = state.shape(1), Dv = state.shape(2), Dk = state.shape(3);
  const int64_t wanted = B * Hv * Dv / (threads() * 8) / LEAST_ROWS * LEAST_ROWS;
  const int64_t height = std::min(std::max(wanted, LEAST_ROWS), std::max(Dv, LEAST_ROWS)), blocks = (Dv + height - 1) / height;
  auto task = [&](int64_t i) {
    const int64_t first = i % blocks * height;
    const Rows rows{i / blocks / Hv, i / blocks % Hv, first, std::min(height, Dv - first)};
    Delta d{};
    d.rows = rows.count, d.D = Dk;
    d.before = state.data<float>() + rows.b * state.strides(0) + rows.head * state.strides(1) + first * state.strides(2);
    d.row_stride = state.strides(2), d.column_stride = state.strides(3);
    fill(d, rows);
    d.scratch = scratch_buffer.floats(size_t(kernels().delta_floats(d)));
    kernels().delta(d);
  };
  const int64_t tasks = B * Hv * blocks;
  if (B * Hv * Dv * Dk * std::max<int64_t>(work, 1) < SERIAL_WORK) {
    for (int64_t i = 0; i < tasks; i++) task(i);
  } else {
    parallel_for(tasks, task);
  }
}

// The part's place in a whole state that was made here.
float* place(mx::array& state, const Rows& rows) {
  return state.data<float>() + ((rows.b * state.shape(1) + rows.head) * state.shape(2) + rows.first) * state.shape(3);
}

// A run of steps, and what it gives beside the state.
struct Steps {
  const mx::array &q, &k, &v, &decay, &rate;
  mx::array &y, &deltas;

  int64_t count() const { return v.shape(1); }
  void fill(Delta& d, const Rows& at) const {
    const int64_t L = v.shape(1), Hv = v.shape(2), Dv = v.shape(3), shared = Hv / k.shape(2);
    const int64_t start = (at.b * L * Hv + at.head) * Dv + at.first;
    d.steps = L;
    d.decay = series(decay, at.b, at.head), d.rate = series(rate, at.b, at.head);
    d.keys = series(k, at.b, at.head / shared), d.queries = series(q, at.b, at.head / shared);
    d.values = series(v, at.b, at.head, at.first);
    d.deltas = deltas.data<float>() + start, d.delta_step = Hv * Dv;
    d.y = y.data<char>() + start * int64_t(y.itemsize()), d.y_type = *stored_type(y.dtype()), d.y_step = Hv * Dv;
  }
};

// The first keep[b] of the steps of a tape.
struct Tape {
  const mx::array &k, &decay, &deltas, &keep;

  int64_t count() const { return deltas.shape(1); }
  void fill(Delta& d, const Rows& at) const {
    d.owed = std::clamp<int64_t>(keep.data<int32_t>()[at.b * keep.strides(0)], 0, count());
    d.owed_decay = series(decay, at.b, at.head);
    d.owed_keys = series(k, at.b, at.head / (deltas.shape(2) / k.shape(2)));
    d.owed_deltas = series(deltas, at.b, at.head, at.first);
  }
};

class GatedDelta : public CpuPrimitive {
 public:
  explicit GatedDelta(mx::Stream stream) : CpuPrimitive(stream) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch(inputs, outputs, 5, 1, [](const std::vector<mx::array>& given, std::vector<mx::array>& made) {
      const Steps steps{given[0], given[1], given[2], given[3], given[4], made[0], made[2]};
      run(given[5], steps.count(), [&](Delta& d, const Rows& rows) {
        steps.fill(d, rows);
        d.after = place(made[1], rows);
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
    dispatch(inputs, outputs, 0, 0, [](const std::vector<mx::array>& given, std::vector<mx::array>& made) {
      const Tape tape{given[1], given[2], given[3], given[4]};
      run(given[0], tape.count(), [&](Delta& d, const Rows& rows) {
        tape.fill(d, rows);
        d.settled = place(made[0], rows);
      });
    });
  }

  const char* name() const override { return "SpecReplayDelta"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
};

class ResumeDelta : public CpuPrimitive {
 public:
  explicit ResumeDelta(mx::Stream stream) : CpuPrimitive(stream) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch(inputs, outputs, 5, 1, [](const std::vector<mx::array>& given, std::vector<mx::array>& made) {
      const Steps steps{given[0], given[1], given[2], given[3], given[4], made[0], made[2]};
      const Tape tape{given[6], given[7], given[8], given[9]};
      run(given[5], tape.count() + steps.count(), [&](Delta& d, const Rows& rows) {
        tape.fill(d, rows);
        steps.fill(d, rows);
        d.settled = place(made[1], rows);
      });
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
