#include "rope.h"

#include <algorithm>

#include "arrays.h"
#include "mlx/ops.h"
#include "pool.h"
#include "primitive.h"

namespace spec {
namespace {

constexpr int64_t SERIAL_ELEMENTS = 16'000;  // below this waking a thread costs more than it saves
constexpr int64_t STEP_ELEMENTS = 8'000;

thread_local Buffer table_buffer;

struct Turn {
  int dims;
  bool neighbours;
  float scale;
  int offset;  // when there is no array of them
  bool operator==(const Turn&) const = default;
};

// task(i) for blocks of rows of `width` elements.
template <class F>
void over_rows(int64_t rows, int64_t width, F&& task) {
  const int64_t step = std::max<int64_t>(1, STEP_ELEMENTS / std::max<int64_t>(width, 1));
  if (rows * width < SERIAL_ELEMENTS) {
    for (int64_t r = 0; r < rows; r++) task(r);
    return;
  }
  parallel_for((rows + step - 1) / step, [&](int64_t i) {
    for (int64_t r = i * step; r < std::min(rows, (i + 1) * step); r++) task(r);
  });
}

void compute(const Turn& turn, const mx::array& x, const mx::array& inverse, const mx::array* offsets, mx::array& y) {
  const Kernels& k = kernels();
  const int64_t B = x.shape(0), L = x.shape(-2), D = x.shape(-1), half = turn.dims / 2;
  const int64_t pitch = (half + k.width - 1) / k.width * k.width, item = int64_t(x.itemsize());
  const Type type = *stored_type(x.dtype());
  const Contiguous wavelengths(inverse);
  const float* per_pair = static_cast<const float*>(wavelengths.get());
  const int64_t starts = offsets ? offsets->shape(0) : 1;  // rows of the table are (starts, L)

  float* cosines = table_buffer.floats(size_t(3 * starts * L * pitch));
  float *sines = cosines + starts * L * pitch, *angles = sines + starts * L * pitch;
  over_rows(starts * L, half * 8, [&](int64_t r) {
    const int64_t start = r / L, l = r % L;
    const int offset = offsets ? offsets->data<int32_t>()[start * offsets->strides(0)] : turn.offset;
    const float position = (float(l) + float(offset)) * turn.scale;
    for (int64_t i = 0; i < half; i++) angles[r * pitch + i] = position * per_pair[i];
    k.waves(angles + r * pitch, half, type, cosines + r * pitch, sines + r * pitch);
    for (int64_t i = half; i < pitch; i++) cosines[r * pitch + i] = sines[r * pitch + i] = 0;
  });

  const std::vector<int64_t> places = row_offsets(x.shape(), x.strides(), 1);
  const int64_t rows = int64_t(places.size()), per_batch = rows / std::max<int64_t>(B, 1);
  const char* in = x.data<char>();
  char* out = y.data<char>();
  over_rows(rows, D, [&](int64_t r) {
    const int64_t row = (starts == 1 ? 0 : r / per_batch * L) + r % L;
    k.rotate({in + places[size_t(r)] * item, out + r * D * item, type, x.strides(-1), turn.dims, D, turn.neighbours,
              cosines + row * pitch, sines + row * pitch});
  });
}

class Rope : public CpuPrimitive {
 public:
  Rope(mx::Stream stream, Turn turn) : CpuPrimitive(stream), turn_(turn) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch(inputs, outputs, [turn = turn_](const std::vector<mx::array>& given, std::vector<mx::array>& made) {
      compute(turn, given[0], given[1], given.size() > 2 ? &given[2] : nullptr, made[0]);
    });
  }

  const char* name() const override { return "SpecRope"; }

  bool is_equivalent(const mx::Primitive& other) const override { return turn_ == static_cast<const Rope&>(other).turn_; }

 private:
  Turn turn_;
};

}  // namespace

mx::array rope(const mx::array& x, int dims, bool neighbours, float scale, const mx::array& inverse,
               const std::variant<int, mx::array>& offset, mx::StreamOrDevice stream) {
  if (x.ndim() < 3 || !stored_type(x.dtype())) refuse("activations", text(x.dtype()) + " of shape " + text(x.shape()), "float32, float16 or bfloat16 with at least three axes");
  if (dims < 0 || dims % 2 || dims > x.shape(-1)) refuse("dims", text(dims), "an even number up to " + text(x.shape(-1)));
  if (inverse.dtype() != mx::float32 || inverse.shape() != mx::Shape{dims / 2}) {
    refuse("inverse wavelengths", text(inverse.dtype()) + " of shape " + text(inverse.shape()), "float32 of shape (" + text(dims / 2) + ",)");
  }
  std::vector<mx::array> inputs{x, inverse};
  int start = 0;
  if (auto* each = std::get_if<mx::array>(&offset)) {
    const bool one = each->size() == 1, fits = one || each->shape() == mx::Shape{x.shape(0)};
    if (!fits || each->dtype() != mx::int32) refuse("offset", text(each->dtype()) + " of shape " + text(each->shape()), "int32, one for all or shape (" + text(x.shape(0)) + ",)");
    inputs.push_back(each->ndim() == 1 ? *each : mx::reshape(*each, {1}, stream));
  } else {
    start = std::get<int>(offset);
  }
  auto primitive = std::make_shared<Rope>(mx::to_stream(stream), Turn{dims, neighbours, scale, start});
  return mx::array(x.shape(), x.dtype(), primitive, std::move(inputs));
}

}  // namespace spec
