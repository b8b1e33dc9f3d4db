// Linear layers as an mlx primitive.
#pragma once

#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "mlx/array.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"

namespace spec {

namespace mx = mlx::core;

// The kernels in use: the best this processor runs, unless `use_kernels` chose others.
const Kernels& kernels();
// False when this processor or build lacks them. With " int8" or " int16" behind a name, rows by packed codes of four or
// eight bits are rounded to one or two bytes.
bool use_kernels(const std::string& name);
std::string kernel_names();                 // what this processor runs, best first, separated by commas

std::optional<Type> stored_type(mx::Dtype dtype);

// The one form of what is refused.
[[noreturn]] inline void refuse(const std::string& what, const std::string& found, const std::string& expected) {
  throw std::invalid_argument(what + ": found " + found + ", expected " + expected + ".");
}

template <class T>
std::string text(const T& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

// Layout of the weights of a layer.
struct Layout {
  std::string mode;  // "dense", "affine", "mxfp4", "nvfp4"
  int group = 0, bits = 0;
  bool operator==(const Layout&) const = default;
};

// Raises std::invalid_argument unless w holds rows of K weights in that layout.
void check_weights(int64_t K, const mx::array& w, const std::optional<mx::array>& scales,
                   const std::optional<mx::array>& biases, const Layout& layout);

// x (..., K) times w (N, K) transposed, plus bias (N,): (..., N). Scales and biases belong to packed weights.
// Raises std::invalid_argument, naming shapes or dtypes, for what it cannot multiply.
mx::array linear(const mx::array& x, const mx::array& w, const std::optional<mx::array>& scales,
                 const std::optional<mx::array>& biases, const std::optional<mx::array>& bias, const Layout& layout,
                 mx::StreamOrDevice stream);

// x (..., M, K) times w[indices] (experts, N, K) transposed: (broadcast of x's and indices' leading axes, M, N).
mx::array gathered(const mx::array& x, const mx::array& w, const std::optional<mx::array>& scales,
                   const std::optional<mx::array>& biases, const mx::array& indices, const Layout& layout,
                   mx::StreamOrDevice stream);

// A linear layer inside another operation: contiguous, evaluated weights, checked once.
struct Factor {
  Layout layout;
  std::vector<mx::array> given;  // weights, then scales, biases and bias as far as there are any
  bool has_biases, has_bias;
  mx::Dtype result;  // of its rows
  std::shared_ptr<const float> lanes;  // the weights once more, where they are multiplied faster so
  Product product;                     // but for its rows
};
Factor factor_of(int64_t K, mx::Dtype x, const mx::array& w, const std::optional<mx::array>& scales,
                 const std::optional<mx::array>& biases, const std::optional<mx::array>& bias, const Layout& layout);

// A layer and where its rows go, one after the other.
struct Factored {
  const Factor* factor;
  void* y;
};
// The same rows, one after the other, through every layer; the layers run side by side. Of what is read soon, every thread
// fetches the part it will have when that is divided in its order.
void multiply_rows(const std::vector<Factored>& layers, const void* x, Type type, int64_t rows, const std::vector<Soon>& soon = {});
// The same through one layer, on this thread alone.
void multiply_here(const Factor& factor, const void* x, Type type, int64_t rows, void* y);

// mlx's fast rms_norm over the last axis; weight (D,) or none.
mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps, mx::StreamOrDevice stream);

}  // namespace spec
