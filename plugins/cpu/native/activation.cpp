#include "activation.h"

#include <algorithm>

#include "arrays.h"
#include "pool.h"
#include "primitive.h"

namespace spec {
namespace {

constexpr int64_t SERIAL_ELEMENTS = 12'000;  // below this waking a thread costs more than it saves
constexpr int64_t STEP_ELEMENTS = 4'000;

template <class F>
void in_pieces(int64_t count, int64_t all, F&& piece) {
  if (all < SERIAL_ELEMENTS) {
    for (int64_t i = 0; i < count; i++) piece(i);
  } else {
    parallel_for(count, piece);
  }
}

struct Function {
  Act act;
  bool two, precise;
  bool operator==(const Function&) const = default;
};

// Rows of one array, read where they lie; all elements of a tidy array are one row.
struct RowsOf {
  RowsOf(const mx::array& a, bool flat) : data(a.data<char>()), item(int64_t(a.itemsize())), type(*stored_type(a.dtype())) {
    if (!flat) places = row_offsets(a.shape(), a.strides(), 1), apart = a.strides(-1);
  }
  const void* at(int64_t row, int64_t i) const { return data + ((places.empty() ? 0 : places[size_t(row)]) + i * apart) * item; }
  const char* data;
  int64_t item, apart = 1;
  Type type;
  std::vector<int64_t> places;
};

void activate(const Function& f, const std::vector<mx::array>& given, mx::array& y) {
  const Kernels& k = kernels();
  bool flat = true;
  for (auto& a : given) flat = flat && (a.flags().row_contiguous || a.ndim() == 0);
  const RowsOf gate(given[0], flat), x(given.back(), flat);
  const int64_t all = int64_t(y.size()), width = flat ? all : y.shape(-1), blocks = (width + STEP_ELEMENTS - 1) / STEP_ELEMENTS;
  in_pieces(all / width * blocks, all, [&](int64_t i) {
    const int64_t row = i / blocks, first = i % blocks * STEP_ELEMENTS;
    Activation a{};
    a.act = f.act, a.type = *stored_type(y.dtype()), a.gate_type = gate.type, a.x_type = x.type, a.precise = f.precise;
    a.gate = gate.at(row, first), a.gate_apart = gate.apart;
    a.x = f.two ? x.at(row, first) : nullptr, a.x_apart = x.apart;
    a.y = y.data<char>() + (row * width + first) * int64_t(y.itemsize());
    a.count = std::min(STEP_ELEMENTS, width - first);
    k.activate(a);
  });
}

class Activate : public CpuPrimitive {
 public:
  Activate(mx::Stream stream, Function f) : CpuPrimitive(stream), function_(f) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch(inputs, outputs, [f = function_](const std::vector<mx::array>& given, std::vector<mx::array>& made) {
      activate(f, given, made[0]);
    });
  }

  const char* name() const override { return "SpecActivation"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    return function_ == static_cast<const Activate&>(other).function_;
  }

 private:
  Function function_;
};

class SoftCap : public CpuPrimitive {
 public:
  SoftCap(mx::Stream stream, float cap) : CpuPrimitive(stream), cap_(cap) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch(inputs, outputs, [cap = cap_](const std::vector<mx::array>& given, std::vector<mx::array>& made) {
      const Contiguous x(given[0]);
      const int64_t all = int64_t(given[0].size()), item = int64_t(given[0].itemsize());
      in_pieces((all + STEP_ELEMENTS - 1) / STEP_ELEMENTS, all, [&](int64_t i) {
        const int64_t first = i * STEP_ELEMENTS;
        kernels().soft_cap(static_cast<const char*>(x.get()) + first * item, *stored_type(given[0].dtype()),
                           std::min(STEP_ELEMENTS, all - first), cap, made[0].data<char>() + first * item);
      });
    });
  }

  const char* name() const override { return "SpecSoftCap"; }
  bool is_equivalent(const mx::Primitive& other) const override { return cap_ == static_cast<const SoftCap&>(other).cap_; }

 private:
  float cap_;
};

void convolve(const std::vector<mx::array>& given, mx::array& y) {
  const Kernels& k = kernels();
  const mx::array& x = given[0];
  const Contiguous w(given[1]), bias(given.back());
  const int64_t T = y.shape(1), C = y.shape(2), blocks = (C + STEP_ELEMENTS - 1) / STEP_ELEMENTS, item = int64_t(x.itemsize());
  in_pieces(y.shape(0) * T * blocks, int64_t(y.size()), [&](int64_t i) {
    const int64_t first = i % blocks * STEP_ELEMENTS, t = i / blocks % T, b = i / blocks / T;
    Convolution v{};
    v.x = x.data<char>() + (b * x.strides(0) + t * x.strides(1) + first * x.strides(2)) * item;
    v.w = static_cast<const char*>(w.get()) + first * item;
    v.bias = given.size() > 2 ? static_cast<const char*>(bias.get()) + first * item : nullptr;
    v.y = y.data<char>() + ((b * T + t) * C + first) * item;
    v.type = *stored_type(x.dtype()), v.channels = std::min(STEP_ELEMENTS, C - first), v.taps = given[1].shape(0);
    v.step = x.strides(1), v.apart = x.strides(2), v.w_step = C;
    k.convolve(v);
  });
}

class ShortConvolution : public CpuPrimitive {
 public:
  explicit ShortConvolution(mx::Stream stream) : CpuPrimitive(stream) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch(inputs, outputs, [](const std::vector<mx::array>& given, std::vector<mx::array>& made) { convolve(given, made[0]); });
  }

  const char* name() const override { return "SpecShortConvolution"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
};

}  // namespace

mx::array activation(const mx::array& gate, const std::optional<mx::array>& x, const std::string& act,
                     std::optional<mx::Dtype> precise, mx::StreamOrDevice stream) {
  if (act != "silu" && act != "gelu-tanh") refuse("activation", act, "silu or gelu-tanh");
  if (x && x->shape() != gate.shape()) refuse("gate and x", text(gate.shape()) + " and " + text(x->shape()), "equal shapes");
  if (!stored_type(gate.dtype()) || (x && !stored_type(x->dtype())) || (precise && !stored_type(*precise))) {
    refuse("activations", text(gate.dtype()) + (x ? " and " + text(x->dtype()) : ""), "float32, float16 or bfloat16");
  }
  const mx::Dtype dtype = precise ? *precise : x ? mx::promote_types(gate.dtype(), x->dtype()) : gate.dtype();
  const Function f{act == "silu" ? Act::silu : Act::gelu_tanh, x.has_value(), precise.has_value()};
  std::vector<mx::array> inputs{gate};
  if (x) inputs.push_back(*x);
  return mx::array(gate.shape(), dtype, std::make_shared<Activate>(mx::to_stream(stream), f), std::move(inputs));
}

mx::array soft_cap(const mx::array& x, float cap, mx::StreamOrDevice stream) {
  if (!stored_type(x.dtype())) refuse("logits", text(x.dtype()), "float32, float16 or bfloat16");
  return mx::array(x.shape(), x.dtype(), std::make_shared<SoftCap>(mx::to_stream(stream), cap), {x});
}

mx::array short_convolution(const mx::array& x, const mx::array& w, const std::optional<mx::array>& bias,
                            mx::StreamOrDevice stream) {
  if (x.ndim() != 3 || !stored_type(x.dtype())) refuse("rows", text(x.dtype()) + " of shape " + text(x.shape()), "float32, float16 or bfloat16 (B, T, C)");
  const bool fits = w.ndim() == 2 && w.shape(1) == x.shape(2) && w.shape(0) > 0 && w.shape(0) <= x.shape(1) && w.dtype() == x.dtype();
  if (!fits) refuse("taps", text(w.dtype()) + " of shape " + text(w.shape()), text(x.dtype()) + " (K, " + text(x.shape(2)) + "), K from 1 to " + text(x.shape(1)));
  if (bias && (bias->shape() != mx::Shape{x.shape(2)} || bias->dtype() != x.dtype())) {
    refuse("bias", text(bias->dtype()) + " of shape " + text(bias->shape()), text(x.dtype()) + " of shape (" + text(x.shape(2)) + ",)");
  }
  std::vector<mx::array> inputs{x, w};
  if (bias) inputs.push_back(*bias);
  const mx::Shape shape{x.shape(0), x.shape(1) - w.shape(0) + 1, x.shape(2)};
  return mx::array(shape, x.dtype(), std::make_shared<ShortConvolution>(mx::to_stream(stream)), std::move(inputs));
}

}  // namespace spec
