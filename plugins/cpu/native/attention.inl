// Attention of a few queries over stored keys and values. Included inside the kernel file's namespace.
//
// Row invariance, also when hidden keys lie before, between or behind the visible ones: the score of a key is one
// chain per lane over D and one fixed tree, whether stored plain or packed, but for those of attention_pairs.inl; the
// largest score does not depend on order; weights are added up, and values gathered, key after key from the first to
// the last, and a key of weight zero is left out.

// How a kind of storage is read: a row is one key or value, `at` its W elements from d on, in the order of `place`.
constexpr int64_t AHEAD = 4096;  // bytes of rows that are fetched before they are read

template <Type type>
struct PlainRow {
  static constexpr bool swapped = false;
  const char* data;
  PlainRow(const Attention&, const Stored& s, int64_t t) : data(static_cast<const char*>(s.data) + t * s.stride) {}
  vec at(int64_t d, int64_t count) { return load_some<type>(data, d, count); }
};

// Codes are read in units that end where a group or a step of `gather_values` does.
constexpr int VALUE_VECTORS = 4;

template <int bits>
struct PackedRow {
  static constexpr bool swapped = Affine<bits>::swapped;
  const uint8_t* codes;
  const void *scales, *biases;
  int64_t first_scale, first_bias;
  int group, unit;
  Type type;
  typename Affine<bits>::Group values;
  PackedRow(const Attention& a, const Stored& s, int64_t t)
      : codes(static_cast<const uint8_t*>(s.data) + t * s.stride),
        scales(s.scales),
        biases(s.biases),
        first_scale(t * s.scale_stride),
        first_bias(t * s.bias_stride),
        group(a.group),
        unit(a.group < VALUE_VECTORS * W ? a.group : VALUE_VECTORS * W),
        type(a.type) {}
  vec at(int64_t d, int64_t) {
    const int k = int(d & (unit - 1));
    if (k == 0) {
      const float scale = element(scales, type, first_scale + d / group), bias = element(biases, type, first_bias + d / group);
      values = Affine<bits>::group(codes + d * bits / 8, scale, bias, unit);
    }
    return Affine<bits>::decode(codes + d * bits / 8, values, k);
  }
};

// Which element lane d of a row holds.
static inline int64_t place(bool swapped, int64_t d) { return swapped ? (d & ~15) + ((d & 15) >> 1) + (d & 1) * 8 : d; }

// Where a task keeps its queries, its scores, which become weights, and the sums of those.
struct Room {
  int64_t width, pitch;
  float *q, *scores, *totals;
  explicit Room(const Attention& a)
      : width((a.D + 31) / 32 * 32), pitch(round_up(a.count)), q(a.scratch), scores(q + a.rows * width), totals(scores + a.rows * pitch) {}
};

static int64_t attention_floats(const Attention& a) {
  const Room room(a);
  return a.rows * (room.width + room.pitch + 1);
}

// Keys that some row from `row` to `upto` may see.
static int64_t seen_keys(const Attention& a, int row, int upto) {
  int64_t limit = 0;
  for (int r = row; r < upto; r++) limit = a.visible[r] > limit ? a.visible[r] : limit;
  return limit;
}

// Fetches rows of `bytes` bytes while row t is read.
struct Ahead {
  const char* data;
  int64_t stride, bytes, rows;
  Ahead(const Attention& a, const Stored& s, int64_t D)
      : data(static_cast<const char*>(s.data)), stride(s.stride), bytes(D * (a.bits ? a.bits : a.type == Type::f32 ? 32 : 16) / 8), rows(AHEAD / (bytes ? bytes : 1) + 1) {}
  inline void fetch(int64_t t) const {
    const char* row = data + (t + rows) * stride;
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(row + byte, 0, 3);
  }
};

// Touches the pages of some keys or values before they are read; t is the next of those from `first` to `last`.
[[gnu::always_inline]] static inline void touch_rows(const Stored& s, int64_t first, int64_t t, int64_t last) {
  if (s.stride <= 0 || s.stride > PAGE) return;
  const int64_t some = (TOUCHED / s.stride + 15) / 16 * 16;
  if ((t - first) % some) return;
  const char* data = static_cast<const char*>(s.data);
  const int64_t upto = t + 2 * some < last ? t + 2 * some : last;
  touch_pages(data + (t == first ? t : t + some) * s.stride, data + upto * s.stride);
}

// The queries as floats, scaled, in the order keys are read in.
template <class Row>
static void take_queries(const Attention& a) {
  const Room room(a);
  for (int r = 0; r < a.rows; r++) {
    for (int64_t d = 0; !Row::swapped && d < room.width; d += W) {
      store(room.q + r * room.width + d, times(load_any(a.q[r], a.q_type, d * a.q_stride, a.q_stride, a.D - d), ones(a.scale)));
    }
    for (int64_t d = 0; Row::swapped && d < room.width; d++) {
      room.q[r * room.width + d] = d < a.D ? element(a.q[r], a.q_type, place(Row::swapped, d) * a.q_stride) * a.scale : 0.0f;
    }
  }
}

// Scores of the keys from `first`, a multiple of 4, to `last` for R rows from `row` on.
template <class Row, int R>
static void score_rows(const Attention& a, int row, int64_t first, int64_t last) {
  const Room room(a);
  const Ahead ahead(a, a.keys, a.D);
  for (int64_t t = first; t < last; t += 4) {
    if (row == 0) touch_rows(a.keys, first, t, last);
    auto key = [&](int64_t j) { return Row(a, a.keys, t + j < last ? t + j : last - 1); };
    Row keys[4] = {key(0), key(1), key(2), key(3)};
    for (int j = 0; j < 4; j++) ahead.fetch(t + j);
    vec acc[R][4];
    for (auto& row : acc)
      for (auto& v : row) v = zero();
    for (int64_t d = 0; d < a.D; d += W) {
      vec k[4];
      for (int j = 0; j < 4; j++) k[j] = keys[j].at(d, a.D - d);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const vec v = load(room.q + (row + r) * room.width + d);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) acc[r][j] = fma(v, k[j], acc[r][j]);
      }
    }
    for (int r = 0; r < R; r++) {
      float out[4];
      sum4(acc[r], out);
      for (int64_t j = 0; j < 4 && t + j < last; j++) room.scores[(row + r) * room.pitch + t + j] = out[j];
    }
  }
}

// Scores to weights that are not yet divided by their sum; hidden keys get zero.
static void weigh_row(const Attention& a, int r, float* s, int64_t pitch) {
  const int64_t first = a.first[r], visible = a.visible[r];
  const float hidden = -bits_to_float(0x7f800000);
  const uint8_t* flags = a.mask_kind == Mask::flags ? static_cast<const uint8_t*>(a.mask[r]) : nullptr;
  const Type type = a.mask_kind == Mask::f16 ? Type::f16 : a.mask_kind == Mask::bf16 ? Type::bf16 : Type::f32;
  float largest = hidden;
  int64_t seen = 0, t = first;
  if (a.mask_kind == Mask::none) {
    float lanes[W];
    vec most = ones(hidden);
    for (; t + W <= visible; t += W) most = maximum(load(s + t), most);
    store(lanes, most);
    for (float one : lanes) largest = one > largest ? one : largest;
  }
  for (; t < visible; t++) {
    if (flags && !flags[t * a.mask_stride]) {
      s[t] = hidden;
      continue;
    }
    if (a.mask_kind > Mask::flags) s[t] += element(a.mask[r], type, t * a.mask_stride);
    largest = s[t] > largest ? s[t] : largest;
    seen++;
  }
  if (flags && seen == 0) {  // as mlx has it: a row that may see nothing weighs all keys alike
    for (t = 0; t < pitch; t++) s[t] = t >= first && t < visible ? 1 : 0;
    return;
  }
  for (t = 0; t < first; t++) s[t] = hidden;
  for (t = visible; t < pitch; t++) s[t] = hidden;
  const vec shift = ones(largest);
  for (t = 0; t < visible; t += W) store(s + t, exponential(minus(load(s + t), shift)));
  for (t = 0; flags && t < visible; t++) {
    if (!flags[t * a.mask_stride]) s[t] = 0;  // also when the largest score is infinite or NaN
  }
  for (t = 0; t < first; t++) s[t] = 0;  // likewise
  for (t = visible; t < pitch; t++) s[t] = 0;
}

// The same for R rows from `row` on, and the sums of their weights.
template <int R>
static void weigh_rows(const Attention& a, int row) {
  const Room room(a);
  float* weights = room.scores + row * room.pitch;
  for (int r = 0; r < R; r++) weigh_row(a, row + r, weights + r * room.pitch, room.pitch);
  float totals[R] = {};
  const int64_t limit = seen_keys(a, row, row + R);
  for (int64_t t = 0; t < limit; t++) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) totals[r] += weights[r * room.pitch + t];
  }
  for (int r = 0; r < R; r++) room.totals[row + r] = totals[r];
}

// Elements of the results from `first`, a multiple of C vectors, to `last` for R rows from `row` on.
template <class Row, int R, int C>
static void gather_rows(const Attention& a, int row, int64_t first, int64_t last) {
  const Room room(a);
  const Ahead ahead(a, a.values, a.value_D);
  const int64_t limit = seen_keys(a, row, row + R);
  for (int64_t d = first; d < last; d += C * W) {
    vec acc[R][C];
    for (auto& row : acc)
      for (auto& v : row) v = zero();
    for (int64_t t = 0; t < limit; t++) {
      if (d == first && t % 16 == 0) touch_rows(a.values, 0, t, limit);
      Row value(a, a.values, t);
      if (d == first) ahead.fetch(t);
      vec v[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        const int64_t left = a.value_D - d - c * W;
        v[c] = left > 0 ? value.at(d + c * W, left) : zero();
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const float weight = room.scores[(row + r) * room.pitch + t];
        if (weight == 0) continue;
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) acc[r][c] = fma(ones(weight), v[c], acc[r][c]);
      }
    }
    for (int r = 0; r < R; r++) {
      const float scale = 1.0f / room.totals[row + r];
      for (int c = 0; c < C; c++) {
        const vec y = times(acc[r][c], ones(scale));
        const int64_t left = a.value_D - d - c * W;
        if (!Row::swapped && left > 0) store_any(a.y[row + r], a.y_type, d + c * W, 1, left, y);
        float out[W];
        if (Row::swapped) store(out, y);
        for (int64_t i = 0; Row::swapped && i < W && d + c * W + i < a.value_D; i++) {
          put(a.y[row + r], a.y_type, place(Row::swapped, d + c * W + i), out[i]);
        }
      }
    }
  }
}

// f.template operator()<R>(row) for the rows from `first` to `last`, R of them from `row` on, at most `most`.
template <int most, class F>
static void with_rows(int first, int last, F&& f) {
  for (int row = first; row < last; row += most) {
    switch (last - row < most ? last - row : most) {
      case 1: f.template operator()<1>(row); break;
      case 2: f.template operator()<2>(row); break;
      case 3: f.template operator()<3>(row); break;
      case 4: f.template operator()<4>(row); break;
      case 5: if constexpr (most > 4) f.template operator()<5>(row); break;
      case 6: if constexpr (most > 4) f.template operator()<6>(row); break;
      case 7: if constexpr (most > 4) f.template operator()<7>(row); break;
      case 8: if constexpr (most > 4) f.template operator()<8>(row); break;
    }
  }
}

#ifdef SPEC_KEYS_IN_LANES
#include "attention_pairs.inl"
#endif

// f.template operator()<Row>() for how keys and values are stored.
template <class F>
static void with_storage(const Attention& a, F&& f) {
  if (a.bits == 4) return f.template operator()<PackedRow<4>>();
  if (a.bits == 8) return f.template operator()<PackedRow<8>>();
  switch (a.type) {
    case Type::bf16: return f.template operator()<PlainRow<Type::bf16>>();
    case Type::f16: return f.template operator()<PlainRow<Type::f16>>();
    default: return f.template operator()<PlainRow<Type::f32>>();
  }
}

static void begin(const Attention& a) {
#ifdef SPEC_KEYS_IN_LANES
  if (in_lanes(a) && in_pairs(a)) return take_pairs(a);
#endif
  with_storage(a, [&]<class Row>() { take_queries<Row>(a); });
}

static void score(const Attention& a, int64_t first, int64_t last) {
  const int64_t limit = seen_keys(a, 0, a.rows);
  last = last < limit ? last : limit;
#ifdef SPEC_KEYS_IN_LANES
  if (in_lanes(a)) {
    return in_pairs(a) ? score_lanes<true>(a, first, last) : score_lanes<false>(a, first, last);
  }
#endif
  with_storage(a, [&]<class Row>() { with_rows<4>(0, a.rows, [&]<int R>(int row) { score_rows<Row, R>(a, row, first, last); }); });
}

static void weigh(const Attention& a, int row, int upto) {
  with_rows<AT_ONCE>(row, upto, [&]<int R>(int row) { weigh_rows<R>(a, row); });
}

// Elements that two threads may gather apart.
static int64_t gathered_apart(const Attention& a) { return (a.bits ? VALUE_VECTORS : VALUE_VECTORS / 2) * W; }

static void gather(const Attention& a, int row, int upto, int64_t first, int64_t last) {
  const bool whole = last - first > gathered_apart(a) || a.bits;
#ifdef SPEC_KEYS_IN_LANES
  if (in_lanes(a)) {
    return with_rows<AT_ONCE>(row, upto, [&]<int R>(int row) {
      constexpr int C = R <= 4 ? 2 : 1;  // what registers hold
      (whole ? gather_lanes<R, C> : gather_lanes<R, 1>)(a, row, first, last);
    });
  }
#endif
  with_storage(a, [&]<class Row>() {
    with_rows<4>(row, upto, [&]<int R>(int row) {
      (whole ? gather_rows<Row, R, VALUE_VECTORS> : gather_rows<Row, R, VALUE_VECTORS / 2>)(a, row, first, last);
    });
  });
}
