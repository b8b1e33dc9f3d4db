#include "attention.h"

#include <algorithm>
#include <memory>

#include "arrays.h"
#include "attending.h"
#include "linear.h"
#include "mlx/ops.h"
#include "primitive.h"

namespace spec {
namespace {

struct Options {
  Codes codes;
  float scale;
  bool mask, causal;
  bool operator==(const Options&) const = default;
};

Mask mask_kind(const mx::array& mask) {
  if (mask.dtype() == mx::bool_) return Mask::flags;
  switch (*stored_type(mask.dtype())) {
    case Type::f16: return Mask::f16;
    case Type::bf16: return Mask::bf16;
    default: return Mask::f32;
  }
}

// An array (B, Hkv, T, n) whose last axis lies together; a copy when it does not. Strides are in bytes.
class Heads {
 public:
  explicit Heads(const mx::array& a) : item_(int64_t(a.itemsize())) {
    if (a.strides(-1) == 1 || a.shape(-1) == 1) {
      data_ = a.data<char>(), batch_ = a.strides(0) * item_, head_ = a.strides(1) * item_, entry_ = a.strides(2) * item_;
      return;
    }
    copy_ = std::make_unique<Contiguous>(a);
    data_ = static_cast<const char*>(copy_->get());
    entry_ = a.shape(3) * item_, head_ = entry_ * a.shape(2), batch_ = head_ * a.shape(1);
  }
  const void* at(int64_t b, int64_t head) const { return data_ + b * batch_ + head * head_; }
  int64_t bytes() const { return entry_; }
  int64_t elements() const { return entry_ / item_; }

 private:
  const char* data_;
  int64_t batch_, head_, entry_, item_;
  std::unique_ptr<Contiguous> copy_;
};

// Keys or values of all heads, from one array or three.
class Store {
 public:
  Store(const mx::array* arrays, bool packed) {
    for (int i = 0; i < (packed ? 3 : 1); i++) parts_.emplace_back(arrays[i]);
  }
  Stored at(int64_t b, int64_t head) const {
    const Heads& data = parts_[0];
    if (parts_.size() == 1) return {data.at(b, head), data.bytes(), nullptr, nullptr, 0, 0};
    return {data.at(b, head), data.bytes(), parts_[1].at(b, head), parts_[2].at(b, head), parts_[1].elements(), parts_[2].elements()};
  }
 private:
  std::vector<Heads> parts_;
};

void compute(const Options& options, const std::vector<mx::array>& given, mx::array& y) {
  const bool packed = options.codes.bits != 0;
  const int each = packed ? 3 : 1;
  const mx::array &q = given[0], &k = given[1];
  const mx::array* mask = options.mask ? &given.back() : nullptr;
  const Store keys(&given[1], packed), values(&given[size_t(1 + each)], packed);
  const int64_t H = q.shape(1), L = q.shape(2), T = k.shape(2), group = H / k.shape(1), Dv = y.shape(3);
  const int64_t q_item = int64_t(q.itemsize()), y_item = int64_t(y.itemsize());
  Attention base{};
  base.mask_kind = mask ? mask_kind(*mask) : Mask::none;
  base.mask_stride = mask && mask->shape(3) != 1 ? mask->strides(3) : 0;
  base.q_stride = q.strides(3), base.count = T, base.D = q.shape(3), base.value_D = Dv, base.scale = options.scale;
  base.bits = options.codes.bits, base.group = options.codes.group;
  base.q_type = *stored_type(q.dtype()), base.type = *stored_type(given[packed ? 2 : 1].dtype());
  base.y_type = *stored_type(y.dtype());

  // The rows of a task share a key head: query heads of its group and positions, positions slowest.
  const int64_t rows = group * L, blocks = (rows + ATTENTION_ROWS - 1) / ATTENTION_ROWS, kv_heads = k.shape(1);
  std::vector<Attention> tasks(size_t(q.shape(0) * kv_heads * blocks), base);
  for (size_t n = 0; n < tasks.size(); n++) {
    const int64_t i = int64_t(n);
    const int64_t block = i % blocks, kv_head = i / blocks % kv_heads, b = i / blocks / kv_heads;
    Attention& a = tasks[n];
    a.keys = keys.at(b, kv_head), a.values = values.at(b, kv_head);
    a.rows = int(std::min<int64_t>(ATTENTION_ROWS, rows - block * ATTENTION_ROWS));
    for (int r = 0; r < a.rows; r++) {
      const int64_t row = block * ATTENTION_ROWS + r, l = row / group, h = kv_head * group + row % group;
      a.q[r] = q.data<char>() + (b * q.strides(0) + h * q.strides(1) + l * q.strides(2)) * q_item;
      a.y[r] = y.data<char>() + ((b * H + h) * L + l) * Dv * y_item;
      a.visible[r] = options.causal ? std::max<int64_t>(T - L + l + 1, 0) : T;
      if (mask) {
        auto step = [&](int axis, int64_t at) { return mask->shape(axis) == 1 ? 0 : at * mask->strides(axis); };
        a.mask[r] = mask->data<char>() + (step(0, b) + step(1, h) + step(2, l)) * int64_t(mask->itemsize());
      }
    }
  }
  attend_all(tasks, int64_t(q.shape(0)) * H * L * T * (base.D + Dv));
}

class RowAttention : public CpuPrimitive {
 public:
  RowAttention(mx::Stream stream, Options options) : CpuPrimitive(stream), options_(options) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch(inputs, outputs, [options = options_](const std::vector<mx::array>& given, std::vector<mx::array>& made) {
      compute(options, given, made[0]);
    });
  }

  const char* name() const override { return "SpecAttention"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return options_ == static_cast<const RowAttention&>(other).options_;
  }

 private:
  Options options_;
};

void check_codes(const char* what, const Entries& e, Codes codes) {
  if ((codes.bits != 4 && codes.bits != 8) || (codes.group != 32 && codes.group != 64 && codes.group != 128)) {
    refuse("packed keys and values", text(codes.bits) + " bits in groups of " + text(codes.group), "4 or 8 bits in groups of 32, 64 or 128");
  }
  if (!e.scales || !e.biases) refuse(what, "no scales or biases", "both");
  if (e.data.dtype() != mx::uint32 || !stored_type(e.scales->dtype()) || e.biases->dtype() != e.scales->dtype()) {
    refuse(what, text(e.data.dtype()) + ", " + text(e.scales->dtype()) + " and " + text(e.biases->dtype()), "uint32 with scales and biases in one of float32, float16, bfloat16");
  }
  bool fits = e.data.ndim() == 4 && e.scales->ndim() == 4;
  fits = fits && int64_t(e.data.shape(3)) * 32 == int64_t(e.scales->shape(3)) * codes.group * codes.bits;
  for (int axis = 0; fits && axis < 3; axis++) fits = e.data.shape(axis) == e.scales->shape(axis);
  if (!fits || e.biases->shape() != e.scales->shape()) {
    refuse(what, text(e.data.shape()) + ", scales " + text(e.scales->shape()) + " and biases " + text(e.biases->shape()), "four axes each, a scale and a bias for every group");
  }
}

int width(const Entries& e, Codes codes) { return codes.bits ? e.data.shape(3) * 32 / codes.bits : e.data.shape(3); }

void check(const mx::array& q, const Entries& keys, const Entries& values, Codes codes, const std::optional<mx::array>& mask) {
  const mx::array &k = keys.data, &v = values.data;
  if (q.ndim() != 4 || k.ndim() != 4 || v.ndim() != 4) refuse("queries, keys and values", text(q.ndim()) + ", " + text(k.ndim()) + " and " + text(v.ndim()) + " axes", "four each");
  if (codes.bits) {
    check_codes("packed keys", keys, codes);
    check_codes("packed values", values, codes);
  }
  const mx::Dtype k_dtype = codes.bits ? keys.scales->dtype() : k.dtype(), v_dtype = codes.bits ? values.scales->dtype() : v.dtype();
  if (!stored_type(q.dtype()) || !stored_type(k_dtype) || k_dtype != v_dtype) {
    refuse("queries, keys and values", text(q.dtype()) + ", " + text(k_dtype) + " and " + text(v_dtype), "float32, float16 or bfloat16, keys and values alike");
  }
  const bool fits = k.shape(0) == q.shape(0) && v.shape(0) == q.shape(0) && k.shape(1) == v.shape(1) && k.shape(2) == v.shape(2) &&
                    width(keys, codes) == q.shape(3) && k.shape(1) > 0 && q.shape(1) % k.shape(1) == 0;
  if (!fits) refuse("keys and values", text(k.shape()) + " and " + text(v.shape()), "those that queries " + text(q.shape()) + " can read");
  if (!mask) return;
  if (mask->dtype() != mx::bool_ && !stored_type(mask->dtype())) refuse("mask", text(mask->dtype()), "bool or floats");
  const mx::Shape full{q.shape(0), q.shape(1), q.shape(2), k.shape(2)};
  bool spreads = mask->ndim() == 4;
  for (int i = 0; spreads && i < 4; i++) spreads = mask->shape(i) == 1 || mask->shape(i) == full[size_t(i)];
  if (!spreads) refuse("mask", "shape " + text(mask->shape()), "one that broadcasts to " + text(full));
}

}  // namespace

mx::array attention(const mx::array& q, const Entries& keys, const Entries& values, Codes codes, float scale,
                    const std::optional<mx::array>& mask, bool causal, mx::StreamOrDevice stream) {
  std::optional<mx::array> spread = mask;
  if (mask && mask->ndim() < 4) {
    auto shape = mask->shape();
    while (shape.size() < 4) shape.insert(shape.begin(), 1);
    spread = mx::reshape(*mask, shape, stream);
  }
  check(q, keys, values, codes, spread);
  auto shape = q.shape();
  shape.back() = width(values, codes);
  std::vector<mx::array> inputs{q};
  for (auto* entries : {&keys, &values}) {
    inputs.push_back(entries->data);
    if (codes.bits) inputs.push_back(*entries->scales), inputs.push_back(*entries->biases);
  }
  if (spread) inputs.push_back(*spread);
  auto primitive = std::make_shared<RowAttention>(mx::to_stream(stream), Options{codes, scale, spread.has_value(), causal});
  return mx::array(shape, q.dtype(), primitive, std::move(inputs));
}

}  // namespace spec
