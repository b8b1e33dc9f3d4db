// What several operations do with whole vectors. Included inside the kernel file's namespace.

static int64_t round_up(int64_t n) { return (n + W - 1) / W * W; }

template <Type type>
static inline vec load_stored(const void* p, int64_t i) {
  if constexpr (type == Type::f32) return load(static_cast<const float*>(p) + i);
  if constexpr (type == Type::bf16) return load_bf16(static_cast<const uint16_t*>(p) + i);
  if constexpr (type == Type::f16) return load_f16(static_cast<const uint16_t*>(p) + i);
}

// The `count` elements from i on, zeros after them.
template <Type type>
static inline vec load_some(const void* p, int64_t i, int64_t count) {
  if (count >= W) return load_stored<type>(p, i);
  float buffer[W];
  for (int j = 0; j < W; j++) buffer[j] = j < count ? element(p, type, i + j) : 0.0f;
  return load(buffer);
}

// `count` elements from `first` on, `step` apart; zeros after them.
template <Type type>
static inline vec load_spread(const void* p, int64_t first, int64_t step, int64_t count) {
  if (step == 1) return load_some<type>(p, first, count);
  float buffer[W];
  for (int64_t j = 0; j < W; j++) buffer[j] = j < count ? element(p, type, first + j * step) : 0.0f;
  return load(buffer);
}

// The same way back: the first `count` lanes.
template <Type type>
static inline void store_spread(void* p, int64_t first, int64_t step, int64_t count, vec v) {
  if (step == 1 && count >= W) {
    if constexpr (type == Type::f32) return store(static_cast<float*>(p) + first, v);
    if constexpr (type == Type::bf16) return store_bf16(static_cast<uint16_t*>(p) + first, v);
    if constexpr (type == Type::f16) return store_f16(static_cast<uint16_t*>(p) + first, v);
  }
  float buffer[W];
  store(buffer, v);
  for (int64_t j = 0; j < W && j < count; j++) put(p, type, first + j * step, buffer[j]);
}

// Both for a type that is known when it runs.
static inline vec load_any(const void* p, Type type, int64_t first, int64_t step, int64_t count) {
  switch (type) {
    case Type::bf16: return load_spread<Type::bf16>(p, first, step, count);
    case Type::f16: return load_spread<Type::f16>(p, first, step, count);
    default: return load_spread<Type::f32>(p, first, step, count);
  }
}

static inline void store_any(void* p, Type type, int64_t first, int64_t step, int64_t count, vec v) {
  switch (type) {
    case Type::bf16: return store_spread<Type::bf16>(p, first, step, count, v);
    case Type::f16: return store_spread<Type::f16>(p, first, step, count, v);
    default: return store_spread<Type::f32>(p, first, step, count, v);
  }
}

// The values of a vector after being stored as `type`.
template <Type type>
static inline vec rounded_lanes(vec v) {
  if constexpr (type == Type::f32) return v;
  if constexpr (type == Type::bf16) return through_bf16(v);
  if constexpr (type == Type::f16) return through_f16(v);
}

// exp for x <= 0, within 2 ulp (the polynomial of Cephes' expf); below -87 it is zero.
static inline vec exponential(vec x) {
  const vec clamped = maximum(ones(-87.0f), x);  // in this order NaN stays
  const vec n = nearest(times(clamped, ones(1.44269504088896341f)));
  vec r = fma(n, ones(-0.693359375f), clamped);
  r = fma(n, ones(2.12194440e-4f), r);
  vec p = ones(1.9875691500e-4f);
  p = fma(p, r, ones(1.3981999507e-3f));
  p = fma(p, r, ones(8.3334519073e-3f));
  p = fma(p, r, ones(4.1665795894e-2f));
  p = fma(p, r, ones(1.6666665459e-1f));
  p = fma(p, r, ones(5.0000001201e-1f));
  p = fma(times(r, r), p, r);
  const vec scale = two_to(n);
  return unless_below(fma(p, scale, scale), x, -87.0f);
}
