// Parts of choosing the best of many numbers. Included inside the kernel file's namespace.

// The largest of n values; NaN when one of them is, minus infinity when there are none.
static float largest(const void* data, Type type, int64_t n) {
  bool odd = false;
  if (type == Type::f32) {
    const float* p = static_cast<const float*>(data);
    for (int64_t i = 0; i < n; i++) odd |= p[i] != p[i];
  } else {
    const uint16_t infinite = type == Type::bf16 ? 0x7f80 : 0x7c00, *p = static_cast<const uint16_t*>(data);
    for (int64_t i = 0; i < n; i++) odd |= uint16_t(p[i] & 0x7fff) > infinite;
  }
  if (odd) return bits_to_float(0x7fc00000);
  float best = -bits_to_float(0x7f800000);
  vec most = ones(best);
  int64_t i = 0;
  for (; i + W <= n; i += W) most = maximum(most, load_any(data, type, i, 1, W));
  float lanes[W];
  store(lanes, most);
  for (float one : lanes) best = one > best ? one : best;
  for (; i < n; i++) {
    const float one = element(data, type, i);
    best = one > best ? one : best;
  }
  return best;
}

// The sum of exp(x - shift), shift at least every x: a chain per lane, then the tree over the lanes.
static float exp_sum(const void* data, Type type, int64_t n, float shift) {
  vec total = zero();
  int64_t i = 0;
  for (; i + W <= n; i += W) total = plus(total, exponential(minus(load_any(data, type, i, 1, W), ones(shift))));
  if (i < n) {
    float rest[W];
    for (int64_t j = 0; j < W; j++) rest[j] = i + j < n ? element(data, type, i + j) - shift : -1e30f;  // whose exp is zero
    total = plus(total, exponential(load(rest)));
  }
  return sum(total);
}

template <Type type>
static int64_t first_typed(const void* data, int64_t n, float shift, float best) {
  constexpr int64_t block = 16 * W;
  const float wanted = rounded(best - shift, type);
  float lanes[W];
  for (int64_t from = 0; from < n; from += block) {
    const int64_t to = from + block < n ? from + block : n;
    if (to - from == block) {  // nothing is larger: whether it is here is told by the largest
      vec most = ones(-bits_to_float(0x7f800000));
      for (int64_t i = from; i < to; i += W) most = maximum(most, rounded_lanes<type>(minus(load_stored<type>(data, i), ones(shift))));
      store(lanes, most);
      bool here = false;
      for (float one : lanes) here |= one == wanted;
      if (!here) continue;
    }
    for (int64_t i = from; i < to; i++) {
      if (rounded(element(data, type, i) - shift, type) == wanted) return i;
    }
  }
  return -1;
}

// The first of n values whose difference from shift is stored as that of the largest, `best`; -1 when there is none.
static int64_t first_best(const void* data, Type type, int64_t n, float shift, float best) {
  switch (type) {
    case Type::bf16: return first_typed<Type::bf16>(data, n, shift, best);
    case Type::f16: return first_typed<Type::f16>(data, n, shift, best);
    default: return first_typed<Type::f32>(data, n, shift, best);
  }
}

static float round_to(float value, Type type) { return rounded(value, type); }
