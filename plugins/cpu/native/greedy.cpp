#include "greedy.h"

#include <algorithm>
#include <cmath>

#include "arrays.h"
#include "linear.h"
#include "pool.h"
#include "primitive.h"

namespace spec {
namespace {

constexpr int64_t CHUNK = 4096;  // columns looked at together: fixed, so that sums do not depend on threads

// The chunks of a row as far as column `end`.
int64_t chunks(int64_t end) { return (end + CHUNK - 1) / CHUNK; }

}  // namespace

void choose_rows(const void* logits, Type type, int64_t rows, int64_t V, int64_t limit, int32_t* ids, float* largest) {
  const Kernels& k = kernels();
  const int64_t per_row = chunks(V), item = type == Type::f32 ? 4 : 2;
  const char* data = static_cast<const char*>(logits);
  auto in_chunks = [&](auto&& f) {
    auto one = [&](int64_t i) {
      const int64_t row = i / per_row, first = i % per_row * CHUNK;
      f(row, first, data + (row * V + first) * item, std::min(CHUNK, V - first), i);
    };
    if (rows * V < 2 * CHUNK) {
      for (int64_t i = 0; i < rows * per_row; i++) one(i);
    } else {
      parallel_for(rows * per_row, one);
    }
  };
  // of a chunk: its largest within the limit and over all, its sum, the first place of the row's largest
  struct Part {
    float within, all, sum;
    int64_t place;
  };
  std::vector<Part> parts(size_t(rows * per_row));
  std::vector<float> shifts(size_t(rows), 0.0f), tops(size_t(rows), 0.0f);
  in_chunks([&](int64_t, int64_t first, const char* at, int64_t count, int64_t i) {
    Part& part = parts[size_t(i)];
    part.within = k.largest(at, type, std::clamp<int64_t>(limit - first, 0, count));
    part.all = first + count <= limit ? part.within : k.largest(at, type, count);
  });
  for (int64_t row = 0; row < rows; row++) {
    float within = -INFINITY, all = -INFINITY;
    for (int64_t c = 0; c < per_row; c++) {
      const Part& part = parts[size_t(row * per_row + c)];
      if (std::isnan(part.within) || part.within > within) within = part.within;
      if (std::isnan(part.all) || part.all > all) all = part.all;
      if (std::isnan(within)) break;
    }
    largest[row] = within, tops[size_t(row)] = all;
  }
  if (type != Type::f32) {
    in_chunks([&](int64_t row, int64_t, const char* at, int64_t count, int64_t i) {
      parts[size_t(i)].sum = k.exp_sum(at, type, count, tops[size_t(row)]);
    });
    for (int64_t row = 0; row < rows; row++) {
      float sum = 0;
      for (int64_t c = 0; c < per_row; c++) sum += parts[size_t(row * per_row + c)].sum;
      shifts[size_t(row)] = k.round_to(tops[size_t(row)] + std::log(sum), type);
    }
  }
  in_chunks([&](int64_t row, int64_t first, const char* at, int64_t count, int64_t i) {
    parts[size_t(i)].place = k.first_best(at, type, std::clamp<int64_t>(limit - first, 0, count), shifts[size_t(row)], largest[row]);
  });
  for (int64_t row = 0; row < rows; row++) {
    int32_t id = 0;
    for (int64_t c = per_row - 1; c >= 0; c--) {
      const int64_t place = parts[size_t(row * per_row + c)].place;
      if (place >= 0) id = int32_t(c * CHUNK + place);
    }
    ids[row] = id;
  }
}

namespace {

class Greedy : public CpuPrimitive {
 public:
  Greedy(mx::Stream stream, int limit) : CpuPrimitive(stream), limit_(limit) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    dispatch(inputs, outputs, [limit = limit_](const std::vector<mx::array>& given, std::vector<mx::array>& made) {
      const mx::array& logits = given[0];
      const Contiguous whole(logits);
      const int64_t V = logits.shape(-1);
      choose_rows(whole.get(), *stored_type(logits.dtype()), int64_t(logits.size()) / V, V, limit, made[0].data<int32_t>(), made[1].data<float>());
    });
  }

  const char* name() const override { return "SpecGreedy"; }
  bool is_equivalent(const mx::Primitive& other) const override { return limit_ == static_cast<const Greedy&>(other).limit_; }

 private:
  int limit_;
};

}  // namespace

std::vector<mx::array> greedy(const mx::array& logits, int limit, mx::StreamOrDevice stream) {
  if (logits.ndim() == 0 || logits.shape(-1) == 0 || !stored_type(logits.dtype())) {
    refuse("logits", text(logits.dtype()) + " of shape " + text(logits.shape()), "rows of float32, float16 or bfloat16");
  }
  if (limit < 1 || limit > logits.shape(-1)) refuse("limit", text(limit), "1 to " + text(logits.shape(-1)));
  const mx::Shape shape(logits.shape().begin(), logits.shape().end() - 1);
  return mx::array::make_arrays({shape, shape}, {mx::int32, mx::float32}, std::make_shared<Greedy>(mx::to_stream(stream), limit), {logits});
}

}  // namespace spec
