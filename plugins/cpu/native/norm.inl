// Row-wise operations that are not products. Included inside the kernel file's namespace.

template <Type type, Type y_type>
static void rms_typed(const void* x, int64_t stride, const void* weight, Type weight_type, int64_t D, float eps, void* y) {
  vec squares = zero();
  for (int64_t d = 0; d < D; d += W) {
    const vec v = load_spread<type>(x, d * stride, stride, D - d);
    squares = fma(v, v, squares);
  }
  const vec scale = ones(1.0f / sqrtf(sum(squares) / float(D) + eps));
  for (int64_t d = 0; d < D; d += W) {
    vec v = rounded_lanes<y_type>(times(load_spread<type>(x, d * stride, stride, D - d), scale));
    if (weight) v = times(v, load_any(weight, weight_type, d, 1, D - d));
    store_spread<y_type>(y, d, 1, D - d, v);
  }
}

// Rounded where mlx rounds: the normalised value first, then its product with the weight.
static void rms(const void* x, Type type, int64_t stride, const void* weight, Type weight_type, int64_t D, float eps,
                void* y, Type y_type) {
  const bool wide = y_type == Type::f32;  // else it is the type of x
  switch (type) {
    case Type::bf16: return (wide ? rms_typed<Type::bf16, Type::f32> : rms_typed<Type::bf16, Type::bf16>)(x, stride, weight, weight_type, D, eps, y);
    case Type::f16: return (wide ? rms_typed<Type::f16, Type::f32> : rms_typed<Type::f16, Type::f16>)(x, stride, weight, weight_type, D, eps, y);
    default: return rms_typed<Type::f32, Type::f32>(x, stride, weight, weight_type, D, eps, y);
  }
}
