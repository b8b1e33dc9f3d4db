#include "attention.h"

#include <algorithm>

#include "arrays.h"
#include "kernels.h"
#include "linear.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "pool.h"

namespace spec {
namespace {

constexpr int64_t SERIAL_WORK = 100'000;  // multiply-adds below which waking a thread costs more than it saves

thread_local Buffer scratch_buffer;

Mask mask_kind(const mx::array& mask) {
  if (mask.dtype() == mx::bool_) return Mask::flags;
  switch (*stored_type(mask.dtype())) {
    case Type::f16: return Mask::f16;
    case Type::bf16: return Mask::bf16;
    default: return Mask::f32;
  }
}

// Keys or values whose last axis lies together; a copy when it does not.
struct Stored {
  explicit Stored(const mx::array& a) {
    if (a.strides(-1) == 1 || a.shape(-1) == 1) {
      data = a.data<char>(), batch = a.strides(0), head = a.strides(1), key = a.strides(2);
      return;
    }
    copy = std::make_unique<Contiguous>(a);
    data = static_cast<const char*>(copy->get());
    key = a.shape(3), head = key * a.shape(2), batch = head * a.shape(1);
  }
  const char* data;
  int64_t batch, head, key;
  std::unique_ptr<Contiguous> copy;
};

void compute(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array* mask, float scale, bool causal,
             mx::array& y) {
  const Kernels& kernel = kernels();
  const Stored keys(k), values(v);
  const int64_t H = q.shape(1), L = q.shape(2), T = k.shape(2), group = H / k.shape(1), Dv = v.shape(3);
  const int64_t q_item = int64_t(q.itemsize()), item = int64_t(k.itemsize()), y_item = int64_t(y.itemsize());
  Attention base{};
  base.mask_kind = mask ? mask_kind(*mask) : Mask::none;
  base.mask_stride = mask && mask->shape(3) != 1 ? mask->strides(3) : 0;
  base.q_stride = q.strides(3), base.count = T, base.key_stride = keys.key, base.value_stride = values.key;
  base.D = q.shape(3), base.value_D = Dv, base.scale = scale;
  base.q_type = *stored_type(q.dtype()), base.type = *stored_type(k.dtype()), base.y_type = *stored_type(y.dtype());

  // The rows of a task share a key head: query heads of its group and positions, positions slowest.
  const int64_t rows = group * L, blocks = (rows + ATTENTION_ROWS - 1) / ATTENTION_ROWS, kv_heads = k.shape(1);
  auto task = [&](int64_t i) {
    const int64_t block = i % blocks, kv_head = i / blocks % kv_heads, b = i / blocks / kv_heads;
    Attention a = base;
    a.keys = keys.data + (b * keys.batch + kv_head * keys.head) * item;
    a.values = values.data + (b * values.batch + kv_head * values.head) * item;
    a.rows = int(std::min<int64_t>(ATTENTION_ROWS, rows - block * ATTENTION_ROWS));
    for (int r = 0; r < a.rows; r++) {
      const int64_t row = block * ATTENTION_ROWS + r, l = row / group, h = kv_head * group + row % group;
      a.q[r] = q.data<char>() + (b * q.strides(0) + h * q.strides(1) + l * q.strides(2)) * q_item;
      a.y[r] = y.data<char>() + ((b * H + h) * L + l) * Dv * y_item;
      a.visible[r] = causal ? std::max<int64_t>(T - L + l + 1, 0) : T;
      if (mask) {
        auto step = [&](int axis, int64_t at) { return mask->shape(axis) == 1 ? 0 : at * mask->strides(axis); };
        a.mask[r] = mask->data<char>() + (step(0, b) + step(1, h) + step(2, l)) * int64_t(mask->itemsize());
      }
    }
    a.scratch = scratch_buffer.floats(size_t(kernel.attention_floats(a)));
    kernel.attend(a);
  };
  const int64_t tasks = q.shape(0) * kv_heads * blocks;
  if (int64_t(q.shape(0)) * H * L * T * (base.D + Dv) < SERIAL_WORK) {
    for (int64_t i = 0; i < tasks; i++) task(i);
  } else {
    parallel_for(tasks, task);
  }
}

class RowAttention : public mx::Primitive {
 public:
  RowAttention(mx::Stream stream, float scale, bool mask, bool causal)
      : Primitive(stream), scale_(scale), has_mask_(mask), causal_(causal) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& out = outputs[0];
    out.set_data(mx::allocator::malloc(out.nbytes()));
    if (out.size() == 0) return;
    auto& encoder = mx::cpu::get_command_encoder(stream());
    std::vector<mx::array> given;
    for (auto& input : inputs) {
      encoder.set_input_array(input);
      given.push_back(mx::array::unsafe_weak_copy(input));
    }
    encoder.set_output_array(out);
    encoder.dispatch([given = std::move(given), has_mask = has_mask_, scale = scale_, causal = causal_,
                      y = mx::array::unsafe_weak_copy(out)]() mutable {
      compute(given[0], given[1], given[2], has_mask ? &given[3] : nullptr, scale, causal, y);
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("mlx-spec-cpu kernels: found a GPU stream, expected a CPU stream.");
  }

  const char* name() const override { return "SpecAttention"; }

  bool is_equivalent(const Primitive& other) const override {
    auto& o = static_cast<const RowAttention&>(other);
    return scale_ == o.scale_ && has_mask_ == o.has_mask_ && causal_ == o.causal_;
  }

 private:
  float scale_;
  bool has_mask_, causal_;
};

void check(const mx::array& q, const mx::array& k, const mx::array& v, const std::optional<mx::array>& mask) {
  if (q.ndim() != 4 || k.ndim() != 4 || v.ndim() != 4) refuse("queries, keys and values", text(q.ndim()) + ", " + text(k.ndim()) + " and " + text(v.ndim()) + " axes", "four each");
  if (!stored_type(q.dtype()) || !stored_type(k.dtype()) || k.dtype() != v.dtype()) {
    refuse("queries, keys and values", text(q.dtype()) + ", " + text(k.dtype()) + " and " + text(v.dtype()), "float32, float16 or bfloat16, keys and values alike");
  }
  const bool fits = k.shape(0) == q.shape(0) && v.shape(0) == q.shape(0) && k.shape(1) == v.shape(1) && k.shape(2) == v.shape(2) &&
                    k.shape(3) == q.shape(3) && k.shape(1) > 0 && q.shape(1) % k.shape(1) == 0;
  if (!fits) refuse("keys and values", text(k.shape()) + " and " + text(v.shape()), "those that queries " + text(q.shape()) + " can read");
  if (!mask) return;
  if (mask->dtype() != mx::bool_ && !stored_type(mask->dtype())) refuse("mask", text(mask->dtype()), "bool or floats");
  const mx::Shape full{q.shape(0), q.shape(1), q.shape(2), k.shape(2)};
  bool spreads = mask->ndim() == 4;
  for (int i = 0; spreads && i < 4; i++) spreads = mask->shape(i) == 1 || mask->shape(i) == full[size_t(i)];
  if (!spreads) refuse("mask", "shape " + text(mask->shape()), "one that broadcasts to " + text(full));
}

}  // namespace

mx::array attention(const mx::array& q, const mx::array& k, const mx::array& v, float scale,
                    const std::optional<mx::array>& mask, bool causal, mx::StreamOrDevice stream) {
  std::optional<mx::array> spread = mask;
  if (mask && mask->ndim() < 4) {
    auto shape = mask->shape();
    while (shape.size() < 4) shape.insert(shape.begin(), 1);
    spread = mx::reshape(*mask, shape, stream);
  }
  check(q, k, v, spread);
  auto shape = q.shape();
  shape.back() = v.shape(3);
  std::vector<mx::array> inputs{q, k, v};
  if (spread) inputs.push_back(*spread);
  auto primitive = std::make_shared<RowAttention>(mx::to_stream(stream), scale, spread.has_value(), causal);
  return mx::array(shape, q.dtype(), primitive, std::move(inputs));
}

}  // namespace spec
