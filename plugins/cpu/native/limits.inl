// What benchmarks hold kernels against. Included inside the kernel file's namespace.

static float read(const float* p, int64_t n) {
  vec acc[4] = {zero(), zero(), zero(), zero()};
  for (int64_t i = 0; i + 4 * W <= n; i += 4 * W)
    for (int j = 0; j < 4; j++) acc[j] = fma(load(p + i + j * W), ones(1), acc[j]);
  return sum(acc[0]) + sum(acc[1]) + sum(acc[2]) + sum(acc[3]);
}

constexpr int CHAINS = 12;

static float multiply_add(int64_t rounds) {
  vec acc[CHAINS];
  for (auto& a : acc) a = ones(1);
  static const float factors[] = {0.999f, 0.001f};
  const float* given = held(factors);  // a compiler that knows both works the rounds out itself
  const vec x = ones(given[0]), y = ones(given[1]);
  for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 12
    for (int j = 0; j < CHAINS; j++) acc[j] = fma(acc[j], x, y);
  }
  float total = 0;
  for (auto& a : acc) total += sum(a);
  return total;
}
