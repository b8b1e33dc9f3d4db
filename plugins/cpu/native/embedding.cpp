#include "embedding.h"

#include <algorithm>
#include <cmath>

#include "arrays.h"
#include "mlx/ops.h"
#include "pool.h"
#include "primitive.h"

namespace spec {
namespace {

#include "scalar.h"

constexpr int64_t STEP_ELEMENTS = 16'000;

// Where the rows of a table lie.
struct View {
  const char *data, *scales, *biases;
  int64_t rows, D, row_bytes, groups;
  Type type, scale_type;  // of what comes out, and of scales and biases
  int bits, group;        // 0 when it is not packed
};

// `scales` and `biases` are those of a packed table.
View view_of(const Layout& layout, const mx::array& w, const void* data, const void* scales, mx::Dtype scale_type, const void* biases, mx::Dtype result) {
  const bool packed = layout.mode != "dense";
  View t{};
  t.data = static_cast<const char*>(data), t.rows = w.shape(0), t.row_bytes = int64_t(w.shape(-1)) * int64_t(w.itemsize());
  t.D = packed ? int64_t(w.shape(-1)) * 32 / layout.bits : int64_t(w.shape(-1));
  t.type = *stored_type(result);
  if (!packed) return t;
  t.scales = static_cast<const char*>(scales), t.biases = static_cast<const char*>(biases);
  t.bits = layout.bits, t.group = layout.group, t.groups = t.D / layout.group;
  t.scale_type = layout.mode == "mxfp4" ? Type::e8m0 : layout.mode == "nvfp4" ? Type::e4m3 : *stored_type(scale_type);
  return t;
}

// Eight codes are `bits` bytes; product and sum are rounded where mlx rounds them.
void unpack(const View& t, int64_t row, void* y) {
  const uint8_t* codes = reinterpret_cast<const uint8_t*>(t.data) + row * t.row_bytes;
  const int bits = t.bits, group = t.group;
  const uint32_t mask = (1u << bits) - 1;
  static const float fp4[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  for (int64_t g = 0; g < t.groups; g++) {
    const float scale = element(t.scales, t.scale_type, row * t.groups + g);
    const float bias = t.biases ? element(t.biases, t.scale_type, row * t.groups + g) : 0.0f;
    for (int k = 0; k < group; k += 8, codes += bits) {
      uint64_t word = 0;
      for (int i = 0; i < bits; i++) word |= uint64_t(codes[i]) << (8 * i);
      for (int i = 0; i < 8; i++) {
        const uint32_t code = uint32_t(word >> (i * bits)) & mask;
        float value = t.biases ? rounded(float(code) * scale, t.type) + bias : fp4[code] * scale;
        put(y, t.type, g * group + k + i, value);
      }
    }
  }
}

// From the end when negative; NaN where there is none.
void read(const View& t, int64_t row, char* y) {
  if (row < 0) row += t.rows;
  if (row < 0 || row >= t.rows) {
    for (int64_t d = 0; d < t.D; d++) put(y, t.type, d, NAN);
  } else if (t.bits) {
    unpack(t, row, y);
  } else {
    memcpy(y, t.data + row * t.row_bytes, size_t(t.row_bytes));
  }
}

mx::Dtype result_of(const Layout& layout, const mx::array& w, const std::optional<mx::array>& scales) {
  if (layout.mode == "dense") return w.dtype();
  return layout.mode == "affine" && scales ? scales->dtype() : mx::bfloat16;
}

void compute(const Layout& layout, const std::vector<mx::array>& given, mx::array& y) {
  const mx::array &indices = given[0], &w = given[1];
  const bool packed = layout.mode != "dense";
  const Contiguous at(indices), data(w), scales(given[packed ? 2 : 1]), biases(given[given.size() > 3 ? 3 : 1]);
  const View t = view_of(layout, w, data.get(), scales.get(), given[packed ? 2 : 1].dtype(), given.size() > 3 ? biases.get() : nullptr, y.dtype());
  auto index = [&](int64_t i) -> int64_t {
    if (indices.itemsize() == 8) return static_cast<const int64_t*>(at.get())[i];
    if (indices.dtype() == mx::uint32) return static_cast<const uint32_t*>(at.get())[i];
    return static_cast<const int32_t*>(at.get())[i];
  };
  const int64_t count = int64_t(indices.size()), bytes = t.D * int64_t(y.itemsize());
  const int64_t step = std::max<int64_t>(1, STEP_ELEMENTS / std::max<int64_t>(t.D, 1));
  parallel_for((count + step - 1) / step, [&](int64_t s) {
    for (int64_t i = s * step; i < std::min(count, (s + 1) * step); i++) read(t, index(i), y.data<char>() + i * bytes);
  });
}

class Rows : public CpuPrimitive {
 public:
  Rows(mx::Stream stream, Layout layout) : CpuPrimitive(stream), layout_(std::move(layout)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch(inputs, outputs, [layout = layout_](const std::vector<mx::array>& given, std::vector<mx::array>& made) {
      compute(layout, given, made[0]);
    });
  }

  const char* name() const override { return "SpecRows"; }

  bool is_equivalent(const mx::Primitive& other) const override { return layout_ == static_cast<const Rows&>(other).layout_; }

 private:
  Layout layout_;
};

}  // namespace

mx::array rows(const mx::array& indices, const mx::array& w, const std::optional<mx::array>& scales,
               const std::optional<mx::array>& biases, const Layout& layout, mx::StreamOrDevice stream) {
  const auto kind = indices.dtype();
  if (kind != mx::int32 && kind != mx::uint32 && kind != mx::int64) refuse("indices", text(kind), "int32, uint32 or int64");
  const Table table = table_of(w, scales, biases, layout);
  auto shape = indices.shape();
  shape.push_back(mx::ShapeElem(table.width));
  std::vector<mx::array> inputs{indices};
  inputs.insert(inputs.end(), table.given.begin(), table.given.end());
  return mx::array(shape, table.result, std::make_shared<Rows>(mx::to_stream(stream), layout), std::move(inputs));
}

Table table_of(const mx::array& w, const std::optional<mx::array>& scales, const std::optional<mx::array>& biases, const Layout& layout) {
  if (w.ndim() != 2) refuse("weights", "shape " + text(w.shape()), "2 axes");
  const int64_t D = layout.mode != "dense" ? int64_t(w.shape(1)) * 32 / std::max(layout.bits, 1) : w.shape(1);
  check_weights(D, w, scales, biases, layout);
  Table table{layout, {w}, result_of(layout, w, scales), D};
  for (auto* extra : {&scales, &biases})
    if (*extra) table.given.push_back(**extra);
  return table;
}

void read_row(const Table& table, int64_t id, void* y) {
  auto data = [&](size_t i) -> const void* { return i < table.given.size() ? table.given[i].data<char>() : nullptr; };
  const View t = view_of(table.layout, table.given[0], data(0), data(1), table.given[table.given.size() > 1 ? 1 : 0].dtype(), data(2), table.result);
  read(t, id, static_cast<char*>(y));
}

}  // namespace spec
