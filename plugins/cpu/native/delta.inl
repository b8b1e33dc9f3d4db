// The gated delta rule. Included inside the kernel file's namespace.
//
// An element of the state is updated by two products and a sum, rounded one by one: the bytes of the rule in plain mlx,
// so that steps can be run again by either. A sum over a row of the state is one chain per lane and one fixed tree.
//
// Few rows at a time, a tile, go through everything that is to be done with them: read once, the steps of a tape in
// registers, each further step one pass over what lies in the nearest cache, written once. A pass adds a step's delta,
// reads the rows out and decays them for the step after. Two tiles take turns: one's sums are awaited while the other's
// pass runs, and the next two are on their way from memory.

constexpr int DELTA_ROWS = 4;        // rows of a tile; a row has two sums and what goes into them in registers
constexpr int DELTA_TILES = 2;       // tiles that take turns
constexpr int64_t DELTA_STEPS = 32;  // steps of a leg

// One pass over all rows: `owed` and `steps` are at most DELTA_STEPS, and what they need is in floats.
struct Leg {
  Series before;  // a step for each row
  float *settled, *after;
  int64_t owed, steps;
  const float *owed_keys, *owed_deltas, *owed_decay;
  const float *keys, *queries, *values, *decay, *rate;
  float *deltas, *y;
  int64_t delta_step, width, height;  // rounded up: D, and the rows
  float* tiles;
};

// Rows in whole vectors and whole tiles.
static int64_t delta_height(const Delta& d) {
  return round_up((d.rows + DELTA_ROWS - 1) / DELTA_ROWS * DELTA_ROWS);
}

static int64_t delta_floats(const Delta& d) {
  const int64_t width = round_up(d.D), height = delta_height(d);
  const int64_t kept = d.steps > DELTA_STEPS && !d.after ? d.rows * d.D : 0;
  return DELTA_STEPS * (3 * width + 3 * height + 3 * W) + DELTA_TILES * DELTA_ROWS * width + kept;
}

// Step t of a series as `count` floats, zeros up to whole vectors.
static void step_floats(const Series& s, int64_t t, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += W) {
    store(out + i, load_any(s.data, s.type, t * s.step + i * s.apart, s.apart, count - i));
  }
}

// Steps from `first` to `last`, a multiple of `apart` floats from each other.
static const float* steps_floats(const Series& s, int64_t first, int64_t last, int64_t count, int64_t apart, float*& room) {
  float* out = room;
  for (int64_t t = first; t < last; t++) step_floats(s, t, count, out + (t - first) * apart);
  room += DELTA_STEPS * apart;
  return out;
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

// Where a tile's rows are read and written. A plain tile has all its rows, of whole vectors lying together.
template <bool plain>
struct Place {
  Series before;
  float* tile;
  int64_t row, count, D;

  vec read(int r, int64_t i) const {
    const float* data = static_cast<const float*>(before.data);
    if constexpr (plain) return load(data + (row + r) * before.step + i);
    const int64_t own = r < count ? row + r : row;  // what fills up a tile is not written
    return load_any(data, Type::f32, own * before.step + i * before.apart, before.apart, D - i);
  }
  void ahead(int r, int64_t i) const {
    if constexpr (plain) {
      __builtin_prefetch(static_cast<const float*>(before.data) + (row + DELTA_TILES * DELTA_ROWS + r) * before.step + i);
    }
  }
  void write(float* to, int r, int64_t i, vec v) const {
    if constexpr (plain) return store(to + (row + r) * D + i, v);
    if (r < count) store_any(to + (row + r) * D, Type::f32, i, 1, D - i, v);
  }
};

// Reads the rows, pays what is owed to them and begins the first step: what is left in the tile has decayed for it, and
// its products with the key are in `sums`. What the loops need is copied: a store could be to anything.
template <class Last, class Place>
static void begin_tile(const Leg& leg, const Place place, const Last last, float* sums) {
  const int64_t width = leg.width, height = leg.height, owed = leg.owed;
  const float *owed_keys = leg.owed_keys, *owed_decay = leg.owed_decay, *owed_deltas = leg.owed_deltas + place.row;
  const float* keys = leg.keys;
  float *const settled = leg.settled, *const after = leg.after;
  const bool steps = leg.steps > 0;
  const vec first = ones(steps ? leg.decay[0] : 0);
  vec acc[DELTA_ROWS];
  for (auto& a : acc) a = zero();
  for (int64_t i = 0; i < width; i += W) {
    vec s[DELTA_ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < DELTA_ROWS; r++) s[r] = place.read(r, i), place.ahead(r, i);
    for (int64_t t = 0; t < owed; t++) {
      const vec key = load(owed_keys + t * width + i), factor = ones(owed_decay[t * W]);
      const float* delta = owed_deltas + t * height;
#pragma GCC unroll 4
      for (int r = 0; r < DELTA_ROWS; r++) s[r] = last.keep(plus(times(s[r], factor), times(key, ones(delta[r]))), i);
    }
    if (settled) {
#pragma GCC unroll 4
      for (int r = 0; r < DELTA_ROWS; r++) place.write(settled, r, i, s[r]);
    }
    if (steps) {
      const vec key = load(keys + i);
#pragma GCC unroll 4
      for (int r = 0; r < DELTA_ROWS; r++) {
        const vec decayed = last.keep(times(s[r], first), i);
        acc[r] = fma(decayed, key, acc[r]);
        store(place.tile + r * width + i, decayed);
      }
    } else if (after) {
#pragma GCC unroll 4
      for (int r = 0; r < DELTA_ROWS; r++) place.write(after, r, i, s[r]);
    }
  }
  sum4(acc, sums);
}

// Ends step t, whose deltas are given, and begins the next when there are `more`.
template <bool more, class Last, class Place>
static void step_tile(const Leg& leg, const Place place, const Last last, int64_t t, const float* delta, float* read, float* sums) {
  const int64_t width = leg.width;
  const float *k = leg.keys + t * width, *q = leg.queries + t * width;
  float *const tile = place.tile, *const after = leg.after;
  const vec factor = ones(more ? leg.decay[(t + 1) * W] : 0);
  vec out[DELTA_ROWS], acc[DELTA_ROWS];
  for (int r = 0; r < DELTA_ROWS; r++) out[r] = acc[r] = zero();
  for (int64_t i = 0; i < width; i += W) {
    const vec key = load(k + i), query = load(q + i), next = more ? load(k + width + i) : zero();
#pragma GCC unroll 4
    for (int r = 0; r < DELTA_ROWS; r++) {
      float* s = tile + r * width + i;
      const vec v = last.keep(plus(load(s), times(key, ones(delta[r]))), i);
      out[r] = fma(v, query, out[r]);
      if constexpr (more) {
        const vec decayed = last.keep(times(v, factor), i);
        acc[r] = fma(decayed, next, acc[r]);
        store(s, decayed);
      } else if (after) {
        place.write(after, r, i, v);
      }
    }
  }
  sum4(out, read);
  if (more) sum4(acc, sums);
}

template <int tiles, class Last, class Place>
static void delta_tiles(const Leg& leg, const Place* places, const Last& last) {
  float sums[tiles][DELTA_ROWS], delta[DELTA_ROWS] = {}, read[DELTA_ROWS];
  for (int n = 0; n < tiles; n++) begin_tile(leg, places[n], last, sums[n]);
  for (int64_t t = 0; t < leg.steps; t++) {
    const float rate = leg.rate[t * W];
    for (int n = 0; n < tiles; n++) {
      const Place& place = places[n];
      const float* values = leg.values + t * leg.height + place.row;
      float *stored = leg.deltas + t * leg.delta_step + place.row, *y = leg.y + t * leg.height + place.row;
      for (int r = 0; r < place.count; r++) stored[r] = delta[r] = (values[r] - sums[n][r]) * rate;
      if (t + 1 < leg.steps) {
        step_tile<true>(leg, place, last, t, delta, read, sums[n]);
      } else {
        step_tile<false>(leg, place, last, t, delta, read, sums[n]);
      }
      for (int r = 0; r < place.count; r++) y[r] = read[r];
    }
  }
}

template <bool ragged>
static void delta_leg(const Delta& d, const Leg& leg) {
  constexpr int64_t together = DELTA_TILES * DELTA_ROWS;
  const Last<ragged> last(d.D);
  int64_t row = 0;
  for (; !ragged && leg.before.apart == 1 && row + together <= d.rows; row += together) {
    Place<true> places[DELTA_TILES];
    for (int n = 0; n < DELTA_TILES; n++) {
      places[n] = {leg.before, leg.tiles + n * DELTA_ROWS * leg.width, row + n * DELTA_ROWS, DELTA_ROWS, d.D};
    }
    delta_tiles<DELTA_TILES>(leg, places, last);
  }
  for (; row < d.rows; row += DELTA_ROWS) {
    const Place<false> place{leg.before, leg.tiles, row, d.rows - row < DELTA_ROWS ? d.rows - row : DELTA_ROWS, d.D};
    delta_tiles<1>(leg, &place, last);
  }
}

// What step `first` and up to DELTA_STEPS - 1 more of the tape need, in floats. Rooms are the same for every leg.
static void take_owed(const Delta& d, Leg& leg, int64_t first, int64_t last, float*& room) {
  leg.owed = last - first;
  leg.owed_keys = steps_floats(d.owed_keys, first, last, d.D, leg.width, room);
  leg.owed_deltas = steps_floats(d.owed_deltas, first, last, d.rows, leg.height, room);
  leg.owed_decay = steps_floats(d.owed_decay, first, last, 1, W, room);
}

static void take_steps(const Delta& d, Leg& leg, int64_t first, int64_t last, float*& room) {
  leg.steps = last - first;
  leg.keys = steps_floats(d.keys, first, last, d.D, leg.width, room);
  leg.queries = steps_floats(d.queries, first, last, d.D, leg.width, room);
  leg.values = steps_floats(d.values, first, last, d.rows, leg.height, room);
  leg.decay = steps_floats(d.decay, first, last, 1, W, room);
  leg.rate = steps_floats(d.rate, first, last, 1, W, room);
  leg.y = room;
  leg.deltas = d.deltas + first * d.delta_step;
}

static int64_t at_most(int64_t n) { return n < DELTA_STEPS ? n : DELTA_STEPS; }

static void delta(const Delta& d) {
  Leg leg{};
  leg.width = round_up(d.D), leg.height = delta_height(d), leg.delta_step = d.delta_step;
  leg.tiles = d.scratch;
  float* const rooms = leg.tiles + DELTA_TILES * DELTA_ROWS * leg.width;
  float* const kept = rooms + DELTA_STEPS * (3 * leg.width + 3 * leg.height + 3 * W);  // between legs, when `after` is not wanted
  leg.before = {d.before, Type::f32, d.row_stride, d.column_stride};
  auto run = [&](float* to) {
    d.D % W ? delta_leg<true>(d, leg) : delta_leg<false>(d, leg);
    leg.before = {to, Type::f32, d.D, 1};
  };
  int64_t t = 0;
  for (; d.owed - t > DELTA_STEPS; t += DELTA_STEPS) {
    float* room = rooms;
    take_owed(d, leg, t, t + DELTA_STEPS, room);
    leg.settled = d.settled;
    run(d.settled);
  }
  float* room = rooms;
  take_owed(d, leg, t, d.owed, room);
  leg.settled = d.settled == leg.before.data && !leg.owed ? nullptr : d.settled;
  t = 0;
  do {  // once also when there are no steps: the state is still to be written
    const int64_t until = t + at_most(d.steps - t);
    take_steps(d, leg, t, until, room);
    float* const to = d.after ? d.after : kept;
    leg.after = until < d.steps ? to : d.after;
    run(to);
    for (int64_t i = t; i < until; i++) {
      const float* y = leg.y + (i - t) * leg.height;
      for (int64_t r = 0; r < d.rows; r += W) store_any(d.y, d.y_type, i * d.y_step + r, 1, d.rows - r, load(y + r));
    }
    t = until;
    leg.owed = 0, leg.settled = nullptr;
    room = rooms;
  } while (t < d.steps);
}
