#include "linear.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "arrays.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "pool.h"

namespace spec {
namespace {

constexpr int64_t SERIAL_WORK = 20'000;           // multiply-adds below which waking a thread costs more than it saves
constexpr int64_t PREPARED_ALONE = 150'000;        // elements of rows below which one thread prepares them
constexpr int64_t CHUNK_WORK = 32'000;            // multiply-adds a chunk of columns should have
constexpr int64_t MANY_ROWS = 8, MANY_ROWS_COLUMNS = 64;  // so many rows should find so many columns in a chunk
constexpr int64_t BLOCK_FLOATS = int64_t(8) << 20;  // activations prepared at a time

bool runs(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!strcmp(name, "avx512bf16")) {
    return runs("avx512") && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni") && __builtin_cpu_supports("avx512vnni");
  }
  if (!strcmp(name, "avx512")) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("f16c");
  }
  if (!strcmp(name, "avx2")) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  }
#endif
  return strncmp(name, "avx", 3) != 0;
}

// Best first.
std::vector<const Kernels*> available(int bytes = 0) {
  std::vector<const Kernels*> found;
  for (auto of : {avx512bf16_kernels, avx512_kernels, avx2_kernels, neon_kernels, portable_kernels})
    if (of(0) && runs(of(0)->name)) found.push_back(of(bytes));
  return found;
}

std::atomic<const Kernels*> chosen{nullptr};

thread_local Buffer rows_buffer, scratch_buffer;

// Floats from one prepared row to the next, at least 128: rows that begin at the same place of a page would drive each other out
// of the first-level cache.
int64_t apart(int64_t padded) { return padded + (128 - padded % 1024 + 1024) % 1024; }

// Rows of activations, ready for `product`. A thread has one at a time.
class Rows {
 public:
  Rows(const Kernels& k, const Weights& w, const char* base, size_t item, Type type, const int64_t* offsets,
       int64_t count, int64_t stride, int64_t K, int64_t padded, bool alone = false)
      : pointers_(pointers_buffer), compact_(compact_buffer) {
    const bool direct = stride == 1 && k.direct(w, type, K), compacts = k.compacts(w, type);
    const int64_t step = apart(padded);
    float* out = direct ? nullptr : rows_buffer.floats(size_t(count * step));
    pointers_.resize(size_t(count)), compact_.resize(size_t(count));
    auto one = [&](int64_t m) {
      const char* row = base + offsets[m] * int64_t(item);
      float* prepared = out + m * step;
      pointers_[size_t(m)] = direct ? reinterpret_cast<const float*>(row) : prepared;
      compact_[size_t(m)] = compacts && (direct || k.compact(w, row, type, stride, K, prepared));
      if (direct) return;
      if (!compact_[size_t(m)]) k.prepare(w, row, type, stride, K, padded, prepared);
    };
    if (direct || alone || count * padded < PREPARED_ALONE) {
      for (int64_t m = 0; m < count; m++) one(m);
    } else {
      const int64_t some = 8;
      parallel_for((count + some - 1) / some, [&](int64_t i) {
        for (int64_t m = i * some; m < std::min(count, (i + 1) * some); m++) one(m);
      });
    }
  }
  const float* row(int64_t m) const { return pointers_[size_t(m)]; }
  bool compact(int64_t m) const { return compact_[size_t(m)] != 0; }

 private:
  static thread_local std::vector<const float*> pointers_buffer;
  static thread_local std::vector<char> compact_buffer;
  std::vector<const float*>& pointers_;
  std::vector<char>& compact_;
};
thread_local std::vector<const float*> Rows::pointers_buffer;
thread_local std::vector<char> Rows::compact_buffer;

// Rows that are multiplied with the same weights in the same way, and where their results go.
struct Batch {
  std::vector<const float*> x;
  std::vector<void*> y;
  void add(const float* row, void* result) { x.push_back(row), y.push_back(result); }
};

void fill(Product& p, const Batch& batch, bool compact) {
  p.x = batch.x.data(), p.y = batch.y.data(), p.rows = int64_t(batch.x.size()), p.compact = compact;
}

struct Piece {
  const Product* product;
  int64_t first, last;
};

// Cut a product into chunks of columns; how it is cut never changes a result.
void cut(const Kernels& k, const Product& p, std::vector<Piece>& pieces) {
  if (p.N == 0 || p.rows == 0) return;
  const int64_t unit = k.columns(p), per_column = std::max<int64_t>(p.K * (p.rows + 3) / 4, 1);
  int64_t columns = p.N;
  if (p.N * per_column > SERIAL_WORK && threads() > 1) {
    const int64_t least = p.rows > MANY_ROWS ? MANY_ROWS_COLUMNS : CHUNK_WORK / per_column;
    const int64_t most = (std::max(p.N / (threads() * 6), least) + unit - 1) / unit, units = (p.N + unit - 1) / unit;
    // about as many units in all chunks, and as many chunks for every thread
    const int64_t rounds = std::max<int64_t>((2 * units / std::max<int64_t>(most, 1) / threads() + 1) / 2, 1);
    columns = (units + rounds * threads() - 1) / (rounds * threads()) * unit;
  }
  for (int64_t n = 0; n < p.N; n += columns) pieces.push_back({&p, n, std::min(p.N, n + columns)});
}

void run(const Kernels& k, const std::vector<Piece>& pieces, const std::vector<Soon>& soon = {}) {
  const int64_t count = int64_t(pieces.size());
  parallel_for(count, [&](int64_t i) {
    const Piece& piece = pieces[size_t(i)];
    Product p = *piece.product;
    if (!soon.empty()) {
      p.soon = soon.data(), p.soon_count = int64_t(soon.size());
      p.soon_from = double(i) / double(count), p.soon_to = double(i + 1) / double(count);
    }
    p.scratch = scratch_buffer.floats(size_t(k.scratch_floats(p)));
    k.product(p, piece.first, piece.last);
  });
}

// A product with the weights of a layer, whose bytes lie together at the pointers given.
Product describe(const Kernels& k, const Layout& layout, int64_t K, const mx::array& w, const void* data, const mx::array* scales,
                 const void* scale_data, const void* bias_data, const mx::array* bias, const void* added, Type y_type) {
  const bool packed = layout.mode != "dense";
  Weights weights{};
  weights.format = !packed ? Format::dense : layout.mode == "affine" ? Format::affine : Format::fp4;
  weights.type = packed ? Type::f32 : *stored_type(w.dtype());
  weights.bits = layout.bits, weights.group = layout.group;
  weights.data = data;
  weights.row_bytes = int64_t(w.shape(-1)) * int64_t(w.itemsize());
  if (packed) {
    weights.scales = scale_data;
    weights.biases = bias_data;
    weights.scale_type = layout.mode == "mxfp4"   ? Type::e8m0
                         : layout.mode == "nvfp4" ? Type::e4m3
                                                  : *stored_type(scales->dtype());
  }
  Product p{};
  p.w = weights, p.N = w.shape(-2), p.K = K, p.padded = (K + k.width - 1) / k.width * k.width, p.y_type = y_type;
  if (bias) p.bias = added, p.bias_type = *stored_type(bias->dtype());
  return p;
}

Product describe(const Kernels& k, const Factor& factor) {
  const bool packed = factor.layout.mode != "dense";
  const mx::array& w = factor.given[0];
  const mx::array* scales = packed ? &factor.given[1] : nullptr;
  const mx::array* biases = factor.has_biases ? &factor.given[2] : nullptr;
  const mx::array* bias = factor.has_bias ? &factor.given.back() : nullptr;
  auto bytes = [](const mx::array* a) -> const void* { return a ? a->data<char>() : nullptr; };
  const int64_t K = packed ? int64_t(w.shape(-1)) * 32 / factor.layout.bits : w.shape(-1);
  return describe(k, factor.layout, K, w, w.data<char>(), scales, bytes(scales), bytes(biases), bias, bytes(bias), *stored_type(factor.result));
}

class Linear : public mx::Primitive {
 public:
  Linear(mx::Stream stream, Layout layout, bool biases, bool bias, bool gather)
      : Primitive(stream), layout_(std::move(layout)), has_biases_(biases), has_bias_(bias), gather_(gather) {}

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
    encoder.dispatch([this_layout = layout_, biases = has_biases_, bias = has_bias_, gather = gather_,
                      given = std::move(given), y = mx::array::unsafe_weak_copy(out)]() mutable {
      compute(this_layout, biases, bias, gather, given, y);
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("mlx-spec-cpu kernels: found a GPU stream, expected a CPU stream.");
  }

  const char* name() const override { return gather_ ? "SpecGatheredLinear" : "SpecLinear"; }

  bool is_equivalent(const Primitive& other) const override {
    auto& o = static_cast<const Linear&>(other);
    return layout_ == o.layout_ && has_biases_ == o.has_biases_ && has_bias_ == o.has_bias_ && gather_ == o.gather_;
  }

 private:
  static void compute(const Layout& layout, bool has_biases, bool has_bias, bool gather,
                      const std::vector<mx::array>& given, mx::array& y) {
    const Kernels& k = kernels();
    const bool packed = layout.mode != "dense";
    const mx::array &x = given[0], &w = given[1];
    const Contiguous data(w), scales(given[packed ? 2 : 1]), biases(given[has_biases ? 3 : 1]);
    const size_t next = 2 + packed + has_biases;
    const Contiguous bias(given[has_bias ? next : 1]);
    const Product p = describe(k, layout, x.shape(-1), w, data.get(), packed ? &given[2] : nullptr, scales.get(), has_biases ? biases.get() : nullptr,
                               has_bias ? &given[next] : nullptr, bias.get(), *stored_type(y.dtype()));
    if (gather) {
      gathered_rows(k, p, x, given[next], w, given, packed, y);
    } else {
      all_rows(k, p, x, y);
    }
  }

  static void all_rows(const Kernels& k, const Product& base, const mx::array& x, mx::array& y) {
    const std::vector<int64_t> offsets = row_offsets(x.shape(), x.strides(), 1);
    const int64_t M = int64_t(offsets.size()), at_once = std::max<int64_t>(BLOCK_FLOATS / std::max<int64_t>(base.padded, 1), 64);
    char* out = y.data<char>();
    const size_t y_item = y.itemsize();
    for (int64_t m = 0; m < M; m += at_once) {
      const int64_t count = std::min(at_once, M - m);
      Rows rows(k, base.w, x.data<char>(), x.itemsize(), *stored_type(x.dtype()), offsets.data() + m, count,
                x.strides(-1), base.K, base.padded);
      Batch batches[2];
      for (int64_t i = 0; i < count; i++) batches[rows.compact(i)].add(rows.row(i), out + size_t((m + i) * base.N) * y_item);
      Product products[2] = {base, base};
      std::vector<Piece> pieces;
      for (int compact = 0; compact < 2; compact++) {
        fill(products[compact], batches[compact], compact != 0);
        cut(k, products[compact], pieces);
      }
      run(k, pieces);
    }
  }

  // Rows that chose the same expert are multiplied together.
  static void gathered_rows(const Kernels& k, const Product& base, const mx::array& x, const mx::array& indices,
                            const mx::array& w, const std::vector<mx::array>& given, bool packed, mx::array& y) {
    const int64_t M = x.shape(-2), experts = w.shape(0);
    const mx::Shape batch(y.shape().begin(), y.shape().end() - 2);
    const std::vector<int64_t> x_rows = batch_offsets(batch, x, 2), picks = batch_offsets(batch, indices, 0);
    const int64_t B = int64_t(x_rows.size());
    // distinct rows of x, each prepared once however many experts read it
    std::vector<int64_t> distinct(x_rows);
    std::sort(distinct.begin(), distinct.end());
    distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
    std::vector<int64_t> offsets;
    for (int64_t start : distinct)
      for (int64_t m = 0; m < M; m++) offsets.push_back(start + m * x.strides(-2));
    Rows rows(k, base.w, x.data<char>(), x.itemsize(), *stored_type(x.dtype()), offsets.data(), int64_t(offsets.size()),
              x.strides(-1), base.K, base.padded);

    std::vector<Batch> batches(static_cast<size_t>(2 * experts));
    const uint32_t* chosen_experts = indices.data<uint32_t>();
    char* out = y.data<char>();
    const int64_t row_bytes = base.N * int64_t(y.itemsize());
    for (int64_t b = 0; b < B; b++) {
      const int64_t e = chosen_experts[picks[size_t(b)]];
      const int64_t place = std::lower_bound(distinct.begin(), distinct.end(), x_rows[size_t(b)]) - distinct.begin();
      for (int64_t m = 0; m < M; m++) {
        char* result = out + (b * M + m) * row_bytes;
        if (e >= experts) {  // nothing to read: say so in the numbers
          memset(result, 0xff, size_t(row_bytes));
          continue;
        }
        const int64_t row = place * M + m;
        batches[size_t(2 * e + rows.compact(row))].add(rows.row(row), result);
      }
    }
    std::vector<Product> products;
    products.reserve(batches.size());
    std::vector<Piece> pieces;
    const int64_t groups = packed ? base.K / base.w.group : 0;
    const int64_t group_bytes = packed ? int64_t(given[2].itemsize()) : 0;
    for (size_t i = 0; i < batches.size(); i++) {
      if (batches[i].x.empty()) continue;
      const int64_t e = int64_t(i / 2);
      Product p = base;
      p.w.data = static_cast<const char*>(base.w.data) + e * base.N * base.w.row_bytes;
      const int64_t skip = e * base.N * groups * group_bytes;
      if (p.w.scales) p.w.scales = static_cast<const char*>(base.w.scales) + skip;
      if (p.w.biases) p.w.biases = static_cast<const char*>(base.w.biases) + skip;
      fill(p, batches[i], i % 2 != 0);
      products.push_back(p);
      cut(k, products.back(), pieces);
    }
    run(k, pieces);
  }

  // Offset of each batch entry in an array whose leading axes are broadcast to `batch`.
  static std::vector<int64_t> batch_offsets(const mx::Shape& batch, const mx::array& a, int own) {
    mx::Strides strides(batch.size(), int64_t(0));
    const int axes = int(a.ndim()) - own, missing = int(batch.size()) - axes;
    for (int i = 0; i < axes; i++)
      if (a.shape(i) != 1) strides[size_t(missing + i)] = a.strides(i);
    return row_offsets(batch, strides, 0);
  }

  Layout layout_;
  bool has_biases_, has_bias_, gather_;
};

class RmsNorm : public mx::Primitive {
 public:
  RmsNorm(mx::Stream stream, bool weight, float eps) : Primitive(stream), has_weight_(weight), eps_(eps) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    auto& out = outputs[0];
    out.set_data(mx::allocator::malloc(out.nbytes()));
    if (out.size() == 0) return;
    auto& encoder = mx::cpu::get_command_encoder(stream());
    for (auto& input : inputs) encoder.set_input_array(input);
    encoder.set_output_array(out);
    encoder.dispatch([x = mx::array::unsafe_weak_copy(inputs[0]), w = mx::array::unsafe_weak_copy(inputs.back()),
                      y = mx::array::unsafe_weak_copy(out), has_weight = has_weight_, eps = eps_]() mutable {
      const Kernels& k = kernels();
      const std::vector<int64_t> offsets = row_offsets(x.shape(), x.strides(), 1);
      const Contiguous weight(w);
      const int64_t D = x.shape(-1), rows = int64_t(offsets.size());
      const Type type = *stored_type(x.dtype()), w_type = *stored_type(w.dtype()), y_type = *stored_type(y.dtype());
      const char* in = x.data<char>();
      char* result = y.data<char>();
      const int64_t item = int64_t(x.itemsize()), y_item = int64_t(y.itemsize()), stride = x.strides(-1);
      const int64_t step = std::max<int64_t>(1, 16'000 / D);
      parallel_for((rows + step - 1) / step, [&](int64_t i) {
        for (int64_t r = i * step; r < std::min(rows, (i + 1) * step); r++) {
          k.rms(in + offsets[size_t(r)] * item, type, 1, stride, has_weight ? weight.get() : nullptr, w_type, D, eps,
                result + r * D * y_item, y_type);
        }
      });
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("mlx-spec-cpu kernels: found a GPU stream, expected a CPU stream.");
  }

  const char* name() const override { return "SpecRmsNorm"; }

  bool is_equivalent(const Primitive& other) const override {
    auto& o = static_cast<const RmsNorm&>(other);
    return has_weight_ == o.has_weight_ && eps_ == o.eps_;
  }

 private:
  bool has_weight_;
  float eps_;
};

void check_packed(int64_t K, const mx::array& w, const std::optional<mx::array>& scales,
                  const std::optional<mx::array>& biases, const Layout& l) {
  const bool affine = l.mode == "affine";
  if (!affine && l.mode != "mxfp4" && l.mode != "nvfp4") refuse("quantisation mode", l.mode, "affine, mxfp4 or nvfp4");
  const bool good_bits = affine ? (l.bits >= 2 && l.bits <= 8 && l.bits != 7) : l.bits == 4;
  if (!good_bits) refuse("bits of " + l.mode + " weights", text(l.bits), affine ? "2, 3, 4, 5, 6 or 8" : "4");
  const bool good_group = affine ? (l.group == 32 || l.group == 64 || l.group == 128) : l.group == (l.mode == "nvfp4" ? 16 : 32);
  if (!good_group) refuse("group size of " + l.mode + " weights", text(l.group), affine ? "32, 64 or 128" : l.mode == "nvfp4" ? "16" : "32");
  if (w.dtype() != mx::uint32) refuse("packed weights", text(w.dtype()), "uint32");
  if (int64_t(w.shape(-1)) * 32 != K * l.bits || K % l.group) {
    refuse("packed weights", "shape " + text(w.shape()), text(K) + " columns of " + text(l.bits) + " bits, in whole groups");
  }
  if (!scales) refuse("scales", "none", "one per group");
  auto expected = w.shape();
  expected.back() = mx::ShapeElem(K / l.group);
  for (auto* given : {&scales, &biases}) {
    if (*given && (*given)->shape() != expected) refuse("scales and biases", "shape " + text((*given)->shape()), text(expected));
  }
  if (affine && !biases) refuse("biases", "none", "one per group");
  if (affine && (!stored_type(scales->dtype()) || biases->dtype() != scales->dtype())) {
    refuse("scales and biases", text(scales->dtype()) + " and " + text(biases->dtype()), "one of float32, float16, bfloat16");
  }
  if (!affine && (scales->dtype() != mx::uint8 || biases)) refuse("scales", text(scales->dtype()), "uint8 scales without biases");
}

void check(const mx::array& x, const mx::array& w, const std::optional<mx::array>& scales,
           const std::optional<mx::array>& biases, const std::optional<mx::array>& bias, const Layout& layout, int axes) {
  if (x.ndim() < size_t(axes - 1) || x.ndim() == 0) refuse("activations", "shape " + text(x.shape()), "rows");
  if (!stored_type(x.dtype())) refuse("activations", text(x.dtype()), "float32, float16 or bfloat16");
  if (w.ndim() != size_t(axes)) refuse("weights", "shape " + text(w.shape()), text(axes) + " axes");
  check_weights(x.shape(-1), w, scales, biases, layout);
  if (bias && (bias->shape() != mx::Shape{w.shape(-2)} || !stored_type(bias->dtype()))) {
    refuse("bias", text(bias->dtype()) + " of shape " + text(bias->shape()), "floats of shape (" + text(w.shape(-2)) + ",)");
  }
}

mx::Dtype result(const mx::array& x, const mx::array& w, const std::optional<mx::array>& scales,
                 const std::optional<mx::array>& bias, const Layout& layout) {
  mx::Dtype dtype = x.dtype();
  if (layout.mode == "dense") dtype = mx::promote_types(dtype, w.dtype());
  if (layout.mode == "affine") dtype = mx::promote_types(dtype, scales->dtype());
  return bias ? mx::promote_types(dtype, bias->dtype()) : dtype;
}

std::vector<mx::array> present(const mx::array& x, const mx::array& w, std::initializer_list<const std::optional<mx::array>*> rest) {
  std::vector<mx::array> inputs{x, w};
  for (auto* extra : rest)
    if (*extra) inputs.push_back(**extra);
  return inputs;
}

}  // namespace

void check_weights(int64_t K, const mx::array& w, const std::optional<mx::array>& scales,
                   const std::optional<mx::array>& biases, const Layout& layout) {
  if (layout.mode != "dense") return check_packed(K, w, scales, biases, layout);
  if (!stored_type(w.dtype())) refuse("weights", text(w.dtype()), "float32, float16 or bfloat16");
  if (w.shape(-1) != K) refuse("weights", "shape " + text(w.shape()), text(K) + " columns");
}

std::optional<Type> stored_type(mx::Dtype dtype) {
  switch (dtype.val()) {
    case mx::Dtype::Val::float32: return Type::f32;
    case mx::Dtype::Val::float16: return Type::f16;
    case mx::Dtype::Val::bfloat16: return Type::bf16;
    default: return std::nullopt;
  }
}

const Kernels& kernels() {
  const Kernels* k = chosen.load(std::memory_order_relaxed);
  if (!k) {
    k = available().front();
    chosen.store(k, std::memory_order_relaxed);
  }
  return *k;
}

bool use_kernels(const std::string& name) {
  for (int bytes : {0, 1, 2}) {
    for (auto* k : available(bytes)) {
      if (name != k->name) continue;
      chosen.store(k);
      return true;
    }
  }
  return false;
}

std::string kernel_names() {
  std::string names;
  for (auto* k : available()) {
    if (!names.empty()) names += ",";
    names += k->name;
  }
  return names;
}

mx::array linear(const mx::array& x, const mx::array& w, const std::optional<mx::array>& scales,
                 const std::optional<mx::array>& biases, const std::optional<mx::array>& bias, const Layout& layout,
                 mx::StreamOrDevice stream) {
  check(x, w, scales, biases, bias, layout, 2);
  auto shape = x.shape();
  shape.back() = w.shape(-2);
  auto primitive = std::make_shared<Linear>(mx::to_stream(stream), layout, biases.has_value(), bias.has_value(), false);
  return mx::array(shape, result(x, w, scales, bias, layout), primitive, present(x, w, {&scales, &biases, &bias}));
}

mx::array gathered(const mx::array& x, const mx::array& w, const std::optional<mx::array>& scales,
                   const std::optional<mx::array>& biases, const mx::array& indices, const Layout& layout,
                   mx::StreamOrDevice stream) {
  check(x, w, scales, biases, std::nullopt, layout, 3);
  if (x.ndim() < 2) refuse("activations", "shape " + text(x.shape()), "at least two axes");
  if (indices.dtype() != mx::uint32) refuse("indices", text(indices.dtype()), "uint32");
  auto shape = mx::broadcast_shapes(mx::Shape(x.shape().begin(), x.shape().end() - 2), indices.shape());
  shape.push_back(x.shape(-2));
  shape.push_back(w.shape(-2));
  auto primitive = std::make_shared<Linear>(mx::to_stream(stream), layout, biases.has_value(), false, true);
  auto inputs = present(x, w, {&scales, &biases});
  inputs.push_back(indices);
  return mx::array(shape, result(x, w, scales, std::nullopt, layout), primitive, std::move(inputs));
}

Factor factor_of(int64_t K, mx::Dtype x, const mx::array& w, const std::optional<mx::array>& scales,
                 const std::optional<mx::array>& biases, const std::optional<mx::array>& bias, const Layout& layout) {
  const mx::array rows = mx::zeros({1, mx::ShapeElem(K)}, x);  // never computed
  check(rows, w, scales, biases, bias, layout, 2);
  std::vector<mx::array> given = present(rows, w, {&scales, &biases, &bias});
  given.erase(given.begin());
  Factor factor{layout, std::move(given), biases.has_value(), bias.has_value(), result(rows, w, scales, bias, layout), nullptr, {}};
  const Kernels& k = kernels();
  Product& p = factor.product = describe(k, factor);
  if (const int64_t floats = k.compacts(p.w, *stored_type(x)) ? k.lane_floats(p.w, p.N, p.K) : 0) {
    std::shared_ptr<float> lanes(static_cast<float*>(aligned_alloc(64, size_t(floats * 4 + 63) / 64 * 64)), free);
    if (!lanes) throw std::bad_alloc();
    k.put_in_lanes(p.w, p.N, p.K, lanes.get());
    p.w.lanes = lanes.get();
    factor.lanes = std::move(lanes);
  }
  return factor;
}

namespace {

// What a product of rows with some layers needs, kept from one to the next.
struct Plan {
  std::vector<int64_t> offsets;
  std::vector<const float*> x;  // rows that are multiplied as floats, then compact ones
  std::vector<void*> y;         // the same for each layer
  std::vector<Product> products;
  std::vector<Piece> pieces;
};
thread_local Plan plan;

bool prepared_alike(const Weights& a, const Weights& b) {
  return a.format == b.format && a.type == b.type && a.bits == b.bits && a.group == b.group && a.scale_type == b.scale_type;
}

// Rows are prepared and given to `run(products)` as many at a time as memory should hold.
template <class F>
void multiply(const Factored* layers, size_t count, const void* x, Type type, int64_t rows, bool alone, F&& run) {
  const Kernels& k = kernels();
  const Product& first = layers[0].factor->product;
  const int64_t K = first.K, padded = (K + k.width - 1) / k.width * k.width, item = type == Type::f32 ? 4 : 2;
  const int64_t at_once = std::max<int64_t>(BLOCK_FLOATS / std::max<int64_t>(padded, 1), 64);
  for (int64_t m = 0; m < rows; m += at_once) {
    const int64_t some = std::min(at_once, rows - m);
    plan.offsets.resize(size_t(some)), plan.x.resize(size_t(some)), plan.y.resize(size_t(some) * count), plan.products.clear();
    for (int64_t i = 0; i < some; i++) plan.offsets[size_t(i)] = (m + i) * K;
    const Rows prepared(k, first.w, static_cast<const char*>(x), size_t(item), type, plan.offsets.data(), some, 1, K, padded, alone);
    int64_t singles = 0;
    for (int64_t i = 0; i < some; i++) singles += !prepared.compact(i);
    int64_t next[2] = {0, singles};
    for (int64_t i = 0; i < some; i++) {
      const int64_t place = next[prepared.compact(i)]++;
      plan.x[size_t(place)] = prepared.row(i);
      for (size_t l = 0; l < count; l++) {
        const Product& p = layers[l].factor->product;
        plan.y[l * size_t(some) + size_t(place)] = static_cast<char*>(layers[l].y) + (m + i) * p.N * (p.y_type == Type::f32 ? 4 : 2);
      }
    }
    for (size_t l = 0; l < count; l++) {
      Product p = layers[l].factor->product;
      p.padded = padded;
      for (bool compact : {false, true}) {
        const int64_t begin = compact ? singles : 0;
        p.x = plan.x.data() + begin, p.y = plan.y.data() + l * size_t(some) + size_t(begin);
        p.rows = (compact ? some : singles) - begin, p.compact = compact;
        if (p.rows > 0) plan.products.push_back(p);
      }
    }
    run(k, plan.products);
  }
}

}  // namespace

void multiply_rows(const std::vector<Factored>& layers, const void* x, Type type, int64_t rows, const std::vector<Soon>& soon) {
  for (auto& layer : layers) {
    if (prepared_alike(layer.factor->product.w, layers[0].factor->product.w)) continue;
    for (auto& one : layers) multiply_rows({one}, x, type, rows, &one == &layers.back() ? soon : std::vector<Soon>{});  // rows are prepared in another way for each
    return;
  }
  multiply(layers.data(), layers.size(), x, type, rows, false, [&](const Kernels& k, const std::vector<Product>& products) {
    plan.pieces.clear();
    for (const Product& p : products) cut(k, p, plan.pieces);
    run(k, plan.pieces, soon);
  });
}

void multiply_here(const Factor& factor, const void* x, Type type, int64_t rows, void* y) {
  const Factored layer{&factor, y};
  multiply(&layer, 1, x, type, rows, true, [](const Kernels& k, const std::vector<Product>& products) {
    for (Product p : products) {
      p.scratch = scratch_buffer.floats(size_t(k.scratch_floats(p)));
      k.product(p, 0, p.N);
    }
  });
}

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps, mx::StreamOrDevice stream) {
  if (x.ndim() == 0 || !stored_type(x.dtype())) refuse("activations", text(x.dtype()) + " of shape " + text(x.shape()), "rows of float32, float16 or bfloat16");
  if (weight && (weight->shape() != mx::Shape{x.shape(-1)} || !stored_type(weight->dtype()))) {
    refuse("norm weight", text(weight->dtype()) + " of shape " + text(weight->shape()), "floats of shape (" + text(x.shape(-1)) + ",)");
  }
  auto dtype = weight ? mx::promote_types(x.dtype(), weight->dtype()) : x.dtype();
  auto primitive = std::make_shared<RmsNorm>(mx::to_stream(stream), weight.has_value(), eps);
  std::vector<mx::array> inputs{x};
  if (weight) inputs.push_back(*weight);
  return mx::array(x.shape(), dtype, primitive, std::move(inputs));
}

}  // namespace spec
