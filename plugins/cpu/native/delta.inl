// The gated delta rule. Included inside the kernel file's namespace.
//
// An element of the state is updated by two products and a sum, rounded one by one: the bytes of the rule in plain mlx,
// so that steps can be run again by either. A sum over a row of the state is one chain per lane and one fixed tree.

constexpr int DELTA_ROWS = 8;        // rows of the state that go through a step together
constexpr int64_t DELTA_STEPS = 32;  // steps whose keys and queries are kept as floats

static int64_t delta_floats(const Delta& d) { return (2 * DELTA_STEPS + DELTA_ROWS) * round_up(d.D); }

static inline float at(const Series& s, int64_t t, int64_t i = 0) { return element(s.data, s.type, t * s.step + i * s.apart); }

// Step t of a series as `count` floats, zeros up to whole vectors.
static void step_floats(const Series& s, int64_t t, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += W) {
    store(out + i, load_any(s.data, s.type, t * s.step + i * s.apart, s.apart, count - i));
  }
}

// The lanes of a row's last vector that are its own: what fills it up stays zero whatever it is multiplied with.
// Rows of whole vectors have no such one.
template <bool ragged>
struct Last {
  int64_t at;
  vec own;
  explicit Last(int64_t D) : at(D / W * W), own(ones(1)) {
    float lanes[W];
    for (int i = 0; i < W; i++) lanes[i] = i < D % W ? 1.0f : 0.0f;
    own = load(lanes);
  }
  vec keep(vec v, int64_t i) const {
    if constexpr (ragged) {
      if (i == at) return unless_below(v, own, 0.5f);
    }
    return v;
  }
};

static inline void sum_rows(const vec* acc, float* products) {
  for (int r = 0; r < DELTA_ROWS; r += 4) sum4(acc + r, products + r);
}

// (g s) k for each row.
template <class Last>
static inline void read_rows(const float* s, int64_t width, float g, const float* k, const Last& last, float* products) {
  vec acc[DELTA_ROWS];
  for (auto& a : acc) a = zero();
  const vec factor = ones(g);
  for (int64_t i = 0; i < width; i += W) {
    const vec key = load(k + i);
#pragma GCC unroll 8
    for (int r = 0; r < DELTA_ROWS; r++) {
      acc[r] = fma(last.keep(times(load(s + r * width + i), factor), i), key, acc[r]);
    }
  }
  sum_rows(acc, products);
}

// s <- g s + delta k^T, and s q for each row when queries are given.
template <bool asked, class Last>
static inline void write_rows(float* s, int64_t width, float g, const float* delta, const float* k, const float* q,
                              const Last& last, float* products) {
  vec acc[DELTA_ROWS], added[DELTA_ROWS];
  for (int r = 0; r < DELTA_ROWS; r++) acc[r] = zero(), added[r] = ones(delta[r]);
  const vec factor = ones(g);
  for (int64_t i = 0; i < width; i += W) {
    const vec key = load(k + i), query = asked ? load(q + i) : zero();
#pragma GCC unroll 8
    for (int r = 0; r < DELTA_ROWS; r++) {
      const vec decayed = times(load(s + r * width + i), factor);
      const vec v = last.keep(plus(decayed, times(key, added[r])), i);
      store(s + r * width + i, v);
      if (asked) acc[r] = fma(v, query, acc[r]);
    }
  }
  if (asked) sum_rows(acc, products);
}

// `count` rows from `row` on through the steps from `first` to `last`.
template <class Last>
static void delta_tile(const Delta& d, int64_t row, int count, int64_t first, int64_t last, const Last& end, const float* keys,
                       const float* queries, float* s) {
  const int64_t width = round_up(d.D);
  for (int64_t t = first; t < last; t++) {
    const float g = at(d.decay, t), *k = keys + (t - first) * width;
    float deltas[DELTA_ROWS] = {}, products[DELTA_ROWS];
    float* stored = d.deltas + t * d.delta_step + row * d.delta_apart;
    if (d.replay) {
      for (int r = 0; r < count; r++) deltas[r] = stored[r * d.delta_apart];
      write_rows<false>(s, width, g, deltas, k, nullptr, end, products);
      continue;
    }
    const float rate = at(d.rate, t);
    read_rows(s, width, g, k, end, products);
    for (int r = 0; r < count; r++) {
      stored[r * d.delta_apart] = deltas[r] = (at(d.values, t, row + r) - products[r]) * rate;
    }
    write_rows<true>(s, width, g, deltas, k, queries + (t - first) * width, end, products);
    for (int r = 0; r < count; r++) put(d.y, d.y_type, t * d.y_step + row + r, products[r]);
  }
}

template <bool ragged>
static void delta_steps(const Delta& d) {
  const int64_t width = round_up(d.D);
  float *keys = d.scratch, *queries = keys + DELTA_STEPS * width, *s = queries + DELTA_STEPS * width;
  const Last<ragged> end(d.D);
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

static void delta(const Delta& d) { return d.D % W ? delta_steps<true>(d) : delta_steps<false>(d); }
