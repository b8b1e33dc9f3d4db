// Row-wise operations that are not products. Included inside the kernel file's namespace.

// Rounded where mlx rounds: the normalised value first, then its product with the weight.
static void rms(const void* x, Type type, int64_t stride, const void* weight, Type weight_type, int64_t D, float eps,
                void* y, Type y_type) {
  vec squares = zero();
  float buffer[W];
  for (int64_t d = 0; d < D; d += W) {
    int64_t count = D - d < W ? D - d : W;
    for (int i = 0; i < W; i++) buffer[i] = i < count ? element(x, type, (d + i) * stride) : 0.0f;
    vec v = load(buffer);
    squares = fma(v, v, squares);
  }
  const float scale = 1.0f / sqrtf(sum(squares) / float(D) + eps);
  for (int64_t d = 0; d < D; d++) {
    float value = rounded(element(x, type, d * stride) * scale, y_type);
    put(y, y_type, d, weight ? value * element(weight, weight_type, d) : value);
  }
}
