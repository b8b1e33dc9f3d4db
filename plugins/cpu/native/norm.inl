// Row-wise operations that are not products. Included inside the kernel file's namespace.

template <Type type, Type y_type>
static void rms_typed(const char* x, int64_t rows, int64_t stride, const void* weight, Type weight_type, int64_t D, float eps, char* y) {
  constexpr int some = 8;  // rows whose scales are had together: one would wait for its root
  constexpr int64_t item = type == Type::f32 ? 4 : 2, y_item = y_type == Type::f32 ? 4 : 2;
  float scales[some];
  for (int64_t first = 0; first < rows; first += some) {
    const int count = rows - first < some ? int(rows - first) : some;
    for (int r = 0; r < count; r++) {
      const char* from = x + (first + r) * D * stride * item;
      vec squares = zero();
      for (int64_t d = 0; d < D; d += W) {
        const vec v = load_spread<type>(from, d * stride, stride, D - d);
        squares = fma(v, v, squares);
      }
      scales[r] = 1.0f / sqrtf(sum(squares) / float(D) + eps);
    }
    for (int r = 0; r < count; r++) {
      const char* from = x + (first + r) * D * stride * item;
      char* to = y + (first + r) * D * y_item;
      for (int64_t d = 0; d < D; d += W) {
        vec v = rounded_lanes<y_type>(times(load_spread<type>(from, d * stride, stride, D - d), ones(scales[r])));
        if (weight) v = times(v, load_any(weight, weight_type, d, 1, D - d));
        store_spread<y_type>(to, d, 1, D - d, v);
      }
    }
  }
}

// Rounded where mlx rounds: the normalised value first, then its product with the weight.
static void rms(const void* x, Type type, int64_t rows, int64_t stride, const void* weight, Type weight_type, int64_t D,
                float eps, void* y, Type y_type) {
  const char* from = static_cast<const char*>(x);
  char* to = static_cast<char*>(y);
  const bool wide = y_type == Type::f32;  // else it is the type of x
  switch (type) {
    case Type::bf16: return (wide ? rms_typed<Type::bf16, Type::f32> : rms_typed<Type::bf16, Type::bf16>)(from, rows, stride, weight, weight_type, D, eps, to);
    case Type::f16: return (wide ? rms_typed<Type::f16, Type::f32> : rms_typed<Type::f16, Type::f16>)(from, rows, stride, weight, weight_type, D, eps, to);
    default: return rms_typed<Type::f32, Type::f32>(from, rows, stride, weight, weight_type, D, eps, to);
  }
}
