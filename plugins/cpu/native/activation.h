// Functions of single elements and the short convolution of recurrent layers as mlx primitives.
#pragma once

#include "linear.h"

namespace spec {

// act(gate) * x, or act(gate) without x; of one shape, float32, float16 or bfloat16. act: "silu" or "gelu-tanh".
// Without `precise` every operation is rounded to the promoted dtype of both, as mlx's are; with it the result alone,
// to that dtype. Raises std::invalid_argument, naming shapes or dtypes, for anything else.
mx::array activation(const mx::array& gate, const std::optional<mx::array>& x, const std::string& act,
                     std::optional<mx::Dtype> precise, mx::StreamOrDevice stream);

// cap * tanh(x / cap), every operation rounded to the dtype of x, as mlx's are: float32, float16 or bfloat16. Raises
// std::invalid_argument, naming the dtype, for anything else.
mx::array soft_cap(const mx::array& x, float cap, mx::StreamOrDevice stream);

// x (B, T, C) with taps w (K, C), one convolution for each channel, plus bias (C,): (B, T - K + 1, C); one dtype.
mx::array short_convolution(const mx::array& x, const mx::array& w, const std::optional<mx::array>& bias,
                            mx::StreamOrDevice stream);

}  // namespace spec
