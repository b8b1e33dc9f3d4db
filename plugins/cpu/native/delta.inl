// The gated delta rule. Included inside the kernel file's namespace.
//
// An element of the state is updated by two products and a sum, rounded one by one: the bytes of the rule in plain mlx,
// so that steps can be run again by either. A sum over a row of the state is one chain per lane and one fixed tree.

constexpr int DELTA_ROWS = 4;          // rows of the state that go through a step together
constexpr int64_t DELTA_STEPS = 32;    // steps whose keys and queries are kept as floats

static int64_t delta_floats(const Delta& d) { return (2 * DELTA_STEPS + DELTA_ROWS) * round_up(d.D); }

static inline float at(const Series& s, int64_t t, int64_t i = 0) { return element(s.data, s.type, t * s.step + i * s.apart); }

template <Type type>
static void floats_of(const Series& s, int64_t t, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += W) {
    store(out + i, load_spread<type>(s.data, t * s.step + i * s.apart, s.apart, count - i));
  }
}

// Step t of a series as `count` floats, zeros up to whole vectors.
static void step_floats(const Series& s, int64_t t, int64_t count, float* out) {
  switch (s.type) {
    case Type::bf16: return floats_of<Type::bf16>(s, t, count, out);
    case Type::f16: return floats_of<Type::f16>(s, t, count, out);
    default: return floats_of<Type::f32>(s, t, count, out);
  }
}

// The lanes of a row's last vector that are its own; what fills it up stays zero whatever it is multiplied with.
struct Last {
  int64_t at;
  vec own;
  explicit Last(int64_t D) : at(D % W ? D / W * W : -1), own(ones(1)) {
    float lanes[W];
    for (int i = 0; i < W; i++) lanes[i] = i < D % W ? 1.0f : 0.0f;
    if (at >= 0) own = load(lanes);
  }
  vec keep(vec v, int64_t i) const { return i == at ? unless_below(v, own, 0.5f) : v; }
};

// s <- g s, and s k for each row.
static inline void decay_rows(float* s, int64_t width, float g, const float* k, const Last& last, float* products) {
  vec acc[DELTA_ROWS];
  for (auto& a : acc) a = zero();
  const vec factor = ones(g);
  for (int64_t i = 0; i < width; i += W) {
    const vec key = load(k + i);
#pragma GCC unroll 4
    for (int r = 0; r < DELTA_ROWS; r++) {
      const vec v = last.keep(times(load(s + r * width + i), factor), i);
      store(s + r * width + i, v);
      acc[r] = fma(v, key, acc[r]);
    }
  }
  sum4(acc, products);
}

// s <- s + delta k^T, and s q for each row.
static inline void add_rows(float* s, int64_t width, const float* delta, const float* k, const float* q, const Last& last,
                            float* products) {
  vec acc[DELTA_ROWS];
  for (auto& a : acc) a = zero();
  for (int64_t i = 0; i < width; i += W) {
    const vec key = load(k + i), query = load(q + i);
#pragma GCC unroll 4
    for (int r = 0; r < DELTA_ROWS; r++) {
      const vec v = last.keep(plus(load(s + r * width + i), times(key, ones(delta[r]))), i);
      store(s + r * width + i, v);
      acc[r] = fma(v, query, acc[r]);
    }
  }
  sum4(acc, products);
}

// Both at once for steps whose deltas are known.
static inline void repeat_rows(float* s, int64_t width, float g, const float* delta, const float* k, const Last& last) {
  const vec factor = ones(g);
  for (int64_t i = 0; i < width; i += W) {
    const vec key = load(k + i);
#pragma GCC unroll 4
    for (int r = 0; r < DELTA_ROWS; r++) {
      const vec decayed = last.keep(times(load(s + r * width + i), factor), i);
      store(s + r * width + i, last.keep(plus(decayed, times(key, ones(delta[r]))), i));
    }
  }
}

// `count` rows from `row` on through the steps from `first` to `last`.
static void delta_tile(const Delta& d, int64_t row, int count, int64_t first, int64_t last, const Last& end, const float* keys,
                       const float* queries, float* s) {
  const int64_t width = round_up(d.D);
  for (int64_t t = first; t < last; t++) {
    const float g = at(d.decay, t), *k = keys + (t - first) * width;
    float deltas[DELTA_ROWS] = {}, products[DELTA_ROWS];
    float* stored = d.deltas + t * d.delta_step + row * d.delta_apart;
    if (d.replay) {
      for (int r = 0; r < count; r++) deltas[r] = stored[r * d.delta_apart];
      repeat_rows(s, width, g, deltas, k, end);
      continue;
    }
    const float rate = at(d.rate, t);
    decay_rows(s, width, g, k, end, products);
    for (int r = 0; r < count; r++) {
      stored[r * d.delta_apart] = deltas[r] = (at(d.values, t, row + r) - products[r]) * rate;
    }
    add_rows(s, width, deltas, k, queries + (t - first) * width, end, products);
    for (int r = 0; r < count; r++) put(d.y, d.y_type, t * d.y_step + row + r, products[r]);
  }
}

static void delta(const Delta& d) {
  const int64_t width = round_up(d.D);
  float *keys = d.scratch, *queries = keys + DELTA_STEPS * width, *s = queries + DELTA_STEPS * width;
  const Last end(d.D);
  int64_t t = 0;
  do {  // once also when there are no steps: the state is still to be written
    const int64_t until = d.steps - t < DELTA_STEPS ? d.steps : t + DELTA_STEPS;
    for (int64_t i = t; i < until; i++) {
      step_floats(d.keys, i, d.D, keys + (i - t) * width);
      if (!d.replay) step_floats(d.queries, i, d.D, queries + (i - t) * width);
    }
    const Series before = t == 0 ? Series{d.before, Type::f32, d.row_stride, d.column_stride} : Series{d.after, Type::f32, d.D, 1};
    for (int64_t row = 0; row < d.rows; row += DELTA_ROWS) {
      const int count = int(d.rows - row < DELTA_ROWS ? d.rows - row : DELTA_ROWS);
      for (int64_t i = 0; i < DELTA_ROWS * width; i++) s[i] = 0;
      for (int r = 0; r < count; r++) step_floats(before, row + r, d.D, s + r * width);
      delta_tile(d, row, count, t, until, end, keys, queries, s);
      for (int r = 0; r < count; r++) memcpy(d.after + (row + r) * d.D, s + r * width, size_t(d.D) * 4);
    }
    t = until;
  } while (t < d.steps);
}
