// Functions of single elements, and a short convolution along each channel. Included inside the kernel file's namespace.

// exp for x >= 0 as mlx has it, so that activations have its bytes: 2 to the whole part, Cephes' polynomial for the rest.
static inline vec exp_of_positive(vec x) {
  const vec inside = minus(zero(), maximum(ones(-88.0f), minus(zero(), x)));  // in this order NaN stays
  const vec power = times(inside, ones(1.442695f)), whole = lower(plus(power, ones(0.5f))), rest = minus(power, whole);
  vec p = ones(1.535336188319500e-4f);
  p = fma(p, rest, ones(1.339887440266574e-3f));
  p = fma(p, rest, ones(9.618437357674640e-3f));
  p = fma(p, rest, ones(5.550332471162809e-2f));
  p = fma(p, rest, ones(2.402264791363012e-1f));
  p = fma(p, rest, ones(6.931472028550421e-1f));
  p = fma(p, rest, ones(1.0f));
  const vec beyond = unless_below(ones(bits_to_float(0x7f800000)), x, 88.00000762939453f);
  return plus(times(two_to(whole), p), beyond);
}

// 1 / (1 + exp(-x)), the exponential rounded as `type` stores it.
template <Type type>
static inline vec sigmoid(vec x) {
  const vec e = rounded_lanes<type>(exp_of_positive(maximum(minus(zero(), x), x)));
  const vec low = over(ones(1), plus(ones(1), e)), high = minus(ones(1), low);
  return plus(unless_below(high, x, 0.0f), minus(low, unless_below(low, x, 0.0f)));
}

// x sigmoid(x), rounded where mlx rounds; or the tanh form of GELU, which is x sigmoid(2 u).
template <Type type>
static inline vec activated(Act act, vec x) {
  if (act == Act::silu) return rounded_lanes<type>(times(x, rounded_lanes<type>(sigmoid<type>(x))));
  const vec cube = times(times(x, x), times(x, ones(0.044715f)));
  return rounded_lanes<type>(times(x, sigmoid<Type::f32>(times(plus(x, cube), ones(1.5957691216057308f)))));
}

// Cephes' tanhf: a polynomial near zero, beyond it 1 - 2 / (exp(2 |x|) + 1) without its largest terms.
static inline vec hyperbolic_tangent(vec x) {
  constexpr float near = 0.625f;
  const vec size = maximum(minus(zero(), x), x);
  const vec inside = minus(zero(), maximum(ones(-1.0f), minus(zero(), maximum(ones(-1.0f), x))));  // in this order NaN stays
  const vec square = times(inside, inside);
  vec p = fma(square, ones(-5.70498872745e-3f), ones(2.06390887954e-2f));
  p = fma(p, square, ones(-5.37397155531e-2f));
  p = fma(p, square, ones(1.33314422036e-1f));
  p = fma(p, square, ones(-3.33332819422e-1f));
  const vec small = fma(times(p, square), inside, inside);
  const vec e = exponential(times(size, ones(-2.0f)));
  const vec positive = over(minus(ones(1), e), plus(ones(1), e)), above = unless_below(positive, x, 0.0f);
  const vec large = plus(above, minus(above, positive));
  return plus(minus(small, unless_below(small, size, near)), unless_below(large, size, near));
}

template <Type type>
static void soft_cap_as(const void* x, int64_t n, float cap, void* y) {
  const vec limit = ones(cap);
  for (int64_t i = 0; i < n; i += W) {
    const vec part = rounded_lanes<type>(over(load_some<type>(x, i, n - i), limit));
    store_spread<type>(y, i, 1, n - i, times(rounded_lanes<type>(hyperbolic_tangent(part)), limit));
  }
}

static void soft_cap(const void* x, Type type, int64_t n, float cap, void* y) {
  switch (type) {
    case Type::bf16: return soft_cap_as<Type::bf16>(x, n, rounded(cap, type), y);
    case Type::f16: return soft_cap_as<Type::f16>(x, n, rounded(cap, type), y);
    default: return soft_cap_as<Type::f32>(x, n, cap, y);
  }
}

template <Type within>
static void activate_within(const Activation& a) {
  for (int64_t i = 0; i < a.count; i += W) {
    const int64_t left = a.count - i;
    vec v = activated<within>(a.act, load_any(a.gate, a.gate_type, i * a.gate_apart, a.gate_apart, left));
    if (a.x) v = times(v, load_any(a.x, a.x_type, i * a.x_apart, a.x_apart, left));
    store_any(a.y, a.type, i, 1, left, v);
  }
}

static void activate(const Activation& a) {
  switch (a.precise ? Type::f32 : a.type) {
    case Type::bf16: return activate_within<Type::bf16>(a);
    case Type::f16: return activate_within<Type::f16>(a);
    default: return activate_within<Type::f32>(a);
  }
}

// y[c] = bias[c] + sum over j of w[j][c] x[j][c]: one chain, tap after tap.
template <Type type>
static void convolve_typed(const Convolution& v) {
  for (int64_t c = 0; c < v.channels; c += W) {
    const int64_t left = v.channels - c;
    vec acc = v.bias ? load_some<type>(v.bias, c, left) : zero();
    for (int64_t j = 0; j < v.taps; j++) {
      const vec x = load_spread<type>(v.x, j * v.step + c * v.apart, v.apart, left);
      acc = fma(x, load_some<type>(v.w, j * v.w_step + c, left), acc);
    }
    store_spread<type>(v.y, c, 1, left, acc);
  }
}

static void convolve(const Convolution& v) {
  switch (v.type) {
    case Type::bf16: return convolve_typed<Type::bf16>(v);
    case Type::f16: return convolve_typed<Type::f16>(v);
    default: return convolve_typed<Type::f32>(v);
  }
}
