// Rotary positions. Included inside the kernel file's namespace.
//
// Angles, sines and products are rounded where mlx's rope rounds, so that results have the bytes it gives.

constexpr float LARGEST_ANGLE = 8388608.0f;  // beyond it the reduction below is not exact

// Cephes' sinf and cosf: the angle less a multiple of pi/4 in three steps, then one of two polynomials.
static void waves(const float* angles, int64_t count, Type type, float* cosines, float* sines) {
  for (int64_t i = 0; i < count; i++) {
    const float angle = fabsf(angles[i]);
    const float inside = angle <= LARGEST_ANGLE ? angle : 0.0f;
    int32_t octant = int32_t(inside * 1.27323954473516f);
    octant = (octant + 1) & ~1;
    const float n = float(octant);
    float x = fmaf(n, -0.78515625f, inside);
    x = fmaf(n, -2.4187564849853515625e-4f, x);
    x = fmaf(n, -3.77489497744594108e-8f, x);
    const float z = x * x;
    float even = fmaf(z, 2.443315711809948e-5f, -1.388731625493765e-3f);
    even = fmaf(even, z, 4.166664568298827e-2f) * z * z;
    even = fmaf(z, -0.5f, even) + 1.0f;
    float odd = fmaf(z, -1.9515295891e-4f, 8.3321608736e-3f);
    odd = fmaf(odd, z, -1.6666654611e-1f) * z;
    odd = fmaf(x, odd, x);
    const bool swap = octant & 2;
    const float sine = swap ? even : odd, cosine = swap ? odd : even;
    sines[i] = (angles[i] < 0) != bool(octant & 4) ? -sine : sine;
    cosines[i] = (octant - 2) & 4 ? cosine : -cosine;
  }
  for (int64_t i = 0; i < count; i++) {
    if (!(fabsf(angles[i]) <= LARGEST_ANGLE)) sines[i] = sinf(angles[i]), cosines[i] = cosf(angles[i]);
  }
  if (type == Type::f32) return;
  for (int64_t i = 0; i < count; i++) {
    sines[i] = rounded(sines[i], type), cosines[i] = rounded(cosines[i], type);
  }
}

template <Type type>
static void rotate_typed(const Rotation& r) {
  const int64_t half = r.dims / 2, apart = r.neighbours ? 1 : half, step = r.neighbours ? 2 : 1;
  for (int64_t i = 0; i < half; i += W) {
    const int64_t count = half - i;
    const vec a = load_spread<type>(r.x, i * step * r.stride, step * r.stride, count);
    const vec b = load_spread<type>(r.x, (i * step + apart) * r.stride, step * r.stride, count);
    const vec c = load(r.cosines + i), s = load(r.sines + i);
    const vec ac = rounded_lanes<type>(times(a, c)), bs = rounded_lanes<type>(times(b, s));
    const vec as = rounded_lanes<type>(times(a, s)), bc = rounded_lanes<type>(times(b, c));
    store_spread<type>(r.y, i * step, step, count, minus(ac, bs));
    store_spread<type>(r.y, i * step + apart, step, count, plus(as, bc));
  }
  const int item = type == Type::f32 ? 4 : 2;
  const char* from = static_cast<const char*>(r.x);
  char* to = static_cast<char*>(r.y);
  for (int64_t d = r.dims; d < r.D; d++) memcpy(to + d * item, from + d * r.stride * item, item);
}

static void rotate(const Rotation& r) {
  switch (r.type) {
    case Type::bf16: return rotate_typed<Type::bf16>(r);
    case Type::f16: return rotate_typed<Type::f16>(r);
    default: return rotate_typed<Type::f32>(r);
  }
}
