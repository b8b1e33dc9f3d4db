// Attention of a few queries over stored keys and values. Included inside the kernel file's namespace.
//
// Row invariance, also when hidden keys lie before, between or behind the visible ones: the score of a key is one
// chain per lane over D and one fixed tree, whether stored plain or packed; the largest score does not depend on order; weights are added up, and
// values gathered, key after key from the first to the last, and a key of weight zero is left out.

// How a kind of storage is read: a row is one key or value, `at` its W elements from d on, in the order of `place`.
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

static int64_t attention_floats(const Attention& a) {
  return a.rows * (round_up(a.D) + round_up(a.count));
}

// scores[r][t] for every key some row may see.
template <class Row, int R>
static void score(const Attention& a, const float* q, int64_t width, float* scores, int64_t pitch, int64_t limit) {
  for (int64_t t = 0; t < limit; t += 4) {
    auto key = [&](int64_t j) { return Row(a, a.keys, t + j < limit ? t + j : limit - 1); };
    Row keys[4] = {key(0), key(1), key(2), key(3)};
    vec acc[R][4];
    for (auto& row : acc)
      for (auto& v : row) v = zero();
    for (int64_t d = 0; d < a.D; d += W) {
      vec k[4];
      for (int j = 0; j < 4; j++) k[j] = keys[j].at(d, a.D - d);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const vec v = load(q + r * width + d);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) acc[r][j] = fma(v, k[j], acc[r][j]);
      }
    }
    for (int r = 0; r < R; r++) {
      float out[4];
      sum4(acc[r], out);
      for (int64_t j = 0; j < 4 && t + j < limit; j++) scores[r * pitch + t + j] = out[j];
    }
  }
}

// Scores to weights in place; the sum of the weights is returned. Hidden keys get zero.
static float weigh(const Attention& a, int r, float* s, int64_t pitch) {
  const int64_t visible = a.visible[r];
  const float hidden = -bits_to_float(0x7f800000);
  const uint8_t* flags = a.mask_kind == Mask::flags ? static_cast<const uint8_t*>(a.mask[r]) : nullptr;
  const Type type = a.mask_kind == Mask::f16 ? Type::f16 : a.mask_kind == Mask::bf16 ? Type::bf16 : Type::f32;
  float largest = hidden;
  int64_t seen = 0;
  for (int64_t t = 0; t < visible; t++) {
    if (flags && !flags[t * a.mask_stride]) {
      s[t] = hidden;
      continue;
    }
    if (a.mask_kind > Mask::flags) s[t] += element(a.mask[r], type, t * a.mask_stride);
    largest = s[t] > largest ? s[t] : largest;
    seen++;
  }
  if (flags && seen == 0) {  // as mlx has it: a row that may see nothing weighs all keys alike
    for (int64_t t = 0; t < visible; t++) s[t] = 1;
    for (int64_t t = visible; t < pitch; t++) s[t] = 0;
    return float(visible);
  }
  for (int64_t t = visible; t < pitch; t++) s[t] = hidden;
  const vec shift = ones(largest);
  for (int64_t t = 0; t < visible; t += W) store(s + t, exponential(minus(load(s + t), shift)));
  float total = 0;
  for (int64_t t = 0; t < visible; t++) {
    if (flags && !flags[t * a.mask_stride]) s[t] = 0;  // also when the largest score is infinite or NaN
    total += s[t];
  }
  for (int64_t t = visible; t < pitch; t++) s[t] = 0;
  return total;
}

template <class Row, int R>
static void gather_values(const Attention& a, const float* weights, int64_t pitch, int64_t limit, const float* totals) {
  constexpr int C = VALUE_VECTORS;
  for (int64_t d = 0; d < a.value_D; d += C * W) {
    vec acc[R][C];
    for (auto& row : acc)
      for (auto& v : row) v = zero();
    for (int64_t t = 0; t < limit; t++) {
      Row value(a, a.values, t);
      vec v[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        const int64_t left = a.value_D - d - c * W;
        v[c] = left > 0 ? value.at(d + c * W, left) : zero();
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const float weight = weights[r * pitch + t];
        if (weight == 0) continue;
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) acc[r][c] = fma(ones(weight), v[c], acc[r][c]);
      }
    }
    for (int r = 0; r < R; r++) {
      const float scale = 1.0f / totals[r];
      for (int c = 0; c < C; c++) {
        float out[W];
        store(out, times(acc[r][c], ones(scale)));
        for (int64_t i = 0; i < W && d + c * W + i < a.value_D; i++) {
          put(a.y[r], a.y_type, place(Row::swapped, d + c * W + i), out[i]);
        }
      }
    }
  }
}

template <class Row, int R>
static void attend_rows(const Attention& a) {
  const int64_t width = round_up(a.D), pitch = round_up(a.count);
  float *q = a.scratch, *scores = a.scratch + R * width;
  int64_t limit = 0;
  for (int r = 0; r < R; r++) {
    for (int64_t d = 0; d < width; d++) {
      q[r * width + d] = d < a.D ? element(a.q[r], a.q_type, place(Row::swapped, d) * a.q_stride) * a.scale : 0.0f;
    }
    limit = a.visible[r] > limit ? a.visible[r] : limit;
  }
  score<Row, R>(a, q, width, scores, pitch, limit);
  float totals[R];
  for (int r = 0; r < R; r++) totals[r] = weigh(a, r, scores + r * pitch, pitch);
  gather_values<Row, R>(a, scores, pitch, limit, totals);
}

template <class Row>
static void attend_kind(const Attention& a) {
  switch (a.rows) {
    case 1: return attend_rows<Row, 1>(a);
    case 2: return attend_rows<Row, 2>(a);
    case 3: return attend_rows<Row, 3>(a);
    default: return attend_rows<Row, 4>(a);
  }
}

static void attend(const Attention& a) {
  if (a.bits == 4) return attend_kind<PackedRow<4>>(a);
  if (a.bits == 8) return attend_kind<PackedRow<8>>(a);
  switch (a.type) {
    case Type::bf16: return attend_kind<PlainRow<Type::bf16>>(a);
    case Type::f16: return attend_kind<PlainRow<Type::f16>>(a);
    default: return attend_kind<PlainRow<Type::f32>>(a);
  }
}
