// Reading mlx arrays whatever their strides, and memory that a thread keeps between calls.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "mlx/array.h"

namespace spec {

// Offsets, in elements, of every row (all axes but the last) of a shape with strides.
inline std::vector<int64_t> row_offsets(const mlx::core::Shape& shape, const mlx::core::Strides& strides, int skip) {
  const int axes = int(shape.size()) - skip;
  int64_t rows = 1;
  for (int i = 0; i < axes; i++) rows *= shape[i];
  std::vector<int64_t> offsets;
  offsets.reserve(size_t(rows));
  std::vector<int64_t> at(size_t(axes), 0);
  int64_t offset = 0;
  for (int64_t r = 0; r < rows; r++) {
    offsets.push_back(offset);
    for (int i = axes - 1; i >= 0; i--) {
      offset += strides[i];
      if (++at[size_t(i)] < shape[i]) break;
      offset -= strides[i] * shape[i];
      at[size_t(i)] = 0;
    }
  }
  return offsets;
}

// The elements of an array one after the other: its own memory, or a copy when it is strided.
class Contiguous {
 public:
  explicit Contiguous(const mlx::core::array& a) : data_(a.data<char>()) {
    if (a.flags().row_contiguous || a.size() == 0) return;
    const size_t item = a.itemsize(), last = a.ndim() ? size_t(a.shape(-1)) : 1;
    const int64_t stride = a.ndim() ? a.strides(-1) : 1;
    copy_.resize(a.size() * item);
    char* out = copy_.data();
    for (int64_t offset : row_offsets(a.shape(), a.strides(), 1)) {
      const char* in = data_ + offset * int64_t(item);
      for (size_t i = 0; i < last; i++, out += item) memcpy(out, in + int64_t(i) * stride * int64_t(item), item);
    }
    data_ = copy_.data();
  }
  const void* get() const { return data_; }

 private:
  const char* data_;
  std::vector<char> copy_;
};

// Floats that stay with the thread, so that a call does not pay for fresh pages.
class Buffer {
 public:
  float* floats(size_t count) {
    if (count > size_ || size_ > KEEP) {
      free(data_);
      data_ = static_cast<float*>(aligned_alloc(64, (count * 4 + 63) / 64 * 64 + 64));
      if (!data_) throw std::bad_alloc();
      size_ = count;
    }
    return data_;
  }
  ~Buffer() { free(data_); }

 private:
  static constexpr size_t KEEP = size_t(16) << 20;
  float* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace spec
