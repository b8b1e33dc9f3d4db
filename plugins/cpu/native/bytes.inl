// Rows rounded to whole numbers by packed codes of four or eight bits. Included by linear.inl.
//
// Every BYTE_GROUP elements of a row share a factor and are stored as whole numbers q of factors, to nearest with ties to
// even. In one byte q is at most 127 and the factor the largest magnitude over 127; in two, 128 high + low with low from
// -64 to 63, it is at most 127 * 128. What is computed is the product with the row so rounded: sums of codes times q
// are whole numbers and exact. Row invariance: a column is one lane's chain over the row's groups, bias * sum(x) at the
// begin of each group of weights, then scale * sum(code * q) * factor for every group of the row.
// Codes of W columns are turned around for that, which costs as much as a product of one or two rows; memory is slower.

constexpr int BYTE_GROUP = 32;
constexpr int64_t UNIT_BYTES = 64;         // of a column, turned around at a time
constexpr int64_t UNIT_WORDS = UNIT_BYTES / 4;
constexpr int64_t NEXT_NEAR = 512;         // bytes of a column: the next block of such fits into the first-level cache

static bool in_bytes(const Weights& w) { return w.format == Format::affine && (w.bits == 4 || w.bits == 8); }

// The largest of the whole numbers.
static constexpr int largest_whole(int bytes) { return bytes == 1 ? 127 : 127 * 128; }

// Floats from the beginning of a row to its factors, to the sums of its groups (as whole numbers, times 128) and to the
// sums of rounded elements of each group of weights.
template <int bytes>
static int64_t factors_at(int64_t K) { return bytes * (K / 4); }
template <int bytes>
static int64_t starts_at(int64_t K) { return factors_at<bytes>(K) + K / BYTE_GROUP; }
template <int bytes>
static int64_t weight_sums_at(int64_t K) { return factors_at<bytes>(K) + 2 * (K / BYTE_GROUP); }

// The largest magnitude of a group's elements, in bits of a float: those of NaN and infinities are the largest.
#ifndef SPEC_GROUPS
static inline uint32_t largest_of_group(const float* x) {
  uint32_t most = 0;
  for (int i = 0; i < BYTE_GROUP; i++) {
    const uint32_t magnitude = float_to_bits(x[i]) & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  return most;
}

// Elements times `inverse` as whole numbers, and their sum. Of four-bit codes those of even places come before those of odd
// ones in every eight, as the nibbles of a word do; of two bytes four high ones before their low ones.
template <int bits, int bytes>
static inline int32_t round_group(const float* x, float inverse, int8_t* out) {
  int32_t q[BYTE_GROUP], sum = 0;
  for (int i = 0; i < BYTE_GROUP; i++) {
    q[i] = int32_t(float_to_bits(x[i] * inverse + 12582912.0f)) - 0x4b400000;  // in the last bits of 1.5 * 2^23
    sum += q[i];
  }
  for (int i = 0; i < BYTE_GROUP; i++) {
    const int32_t one = bits == 8 ? q[i] : q[i / 8 * 8 + i % 4 * 2 + i % 8 / 4];
    if constexpr (bytes == 1) {
      out[i] = int8_t(one);
    } else {
      const int32_t high = (one + 64) >> 7;
      int8_t* four = out + i / 4 * 8 + i % 4;
      four[0] = int8_t(high), four[4] = int8_t(one - high * 128);
    }
  }
  return sum;
}
#endif

// False for a row with NaN, infinities, or values so large or small that factors could not be told from those.
template <int bits, int bytes>
static bool round_row(const void* x, Type type, int64_t stride, int64_t K, int group, float* out) {
  constexpr float most_whole = float(largest_whole(bytes));
  int8_t* whole = reinterpret_cast<int8_t*>(out);
  float *factors = out + factors_at<bytes>(K), *sums = out + weight_sums_at<bytes>(K);
  int32_t* starts = reinterpret_cast<int32_t*>(out + starts_at<bytes>(K));
  float weight_sum = 0;
  for (int64_t k = 0; k < K; k += BYTE_GROUP) {
    float v[BYTE_GROUP];
    if (stride == 1) {
      widen(x, type, k, BYTE_GROUP, v);
    } else {
      for (int i = 0; i < BYTE_GROUP; i++) v[i] = element(x, type, (k + i) * stride);
    }
    const uint32_t most = largest_of_group(v);
    if (most >= uint32_t(127 + 112) << 23 || (most && most < uint32_t(127 - 100) << 23)) return false;
    const float largest = bits_to_float(most), factor = largest / most_whole;
    const int32_t sum = round_group<bits, bytes>(v, most ? most_whole / largest : 0.0f, whole + bytes * k);
    factors[k / BYTE_GROUP] = factor, starts[k / BYTE_GROUP] = 128 * sum;
    weight_sum += factor * float(sum);
    if ((k + BYTE_GROUP) % group == 0) sums[k / group] = weight_sum, weight_sum = 0;
  }
  return true;
}

#ifndef SPEC_BROADCASTS
// sum + x * v in every lane.
static inline vec add_times(vec sum, const float* x, vec v) { return fma(ones(*x), v, sum); }
#endif

// W words of each of W columns from byte `from` on, as vectors of a word of every column. Zeros behind the first `bytes`.
static inline void turn_words(const uint8_t* const* at, int64_t from, int64_t bytes, ints (&v)[W]) {
  for (int c = 0; c < W; c++) v[c] = bytes >= 4 * W ? load_words(at[c] + from) : load_words(at[c] + from, bytes > 0 ? bytes : 0);
  transpose(v);
}

// A block of up to W columns from n on. `room` has `byte_floats`.
template <int bits, int bytes>
struct ByteBlock {
  static constexpr int group_words = BYTE_GROUP * bits / 32, unit_groups = UNIT_WORDS / group_words;
  const Product& p;
  const int64_t n, columns;
  const uint8_t* at[W];
  float *scales, *biases;  // a vector for every group of weights
  float* words;            // of all units, turned around; before that, scales as floats

  ByteBlock(const Product& p, int64_t n, int64_t columns, float* room) : p(p), n(n), columns(columns) {
    const int64_t groups = p.K / p.w.group, last = columns - 1;
    const uint8_t* codes = static_cast<const uint8_t*>(p.w.data) + n * p.w.row_bytes;
    for (int64_t c = 0; c < W; c++) at[c] = codes + (c < last ? c : last) * p.w.row_bytes;
    scales = room, biases = scales + groups * W, words = biases + groups * W;
    put_scales(p.w.scales, scales), put_scales(p.w.biases, biases);
    // memory may take longer than one block does
    const int64_t size = W * groups * size_of(p.w.scale_type), next = 2 * size + n * groups * size_of(p.w.scale_type);
    fetch(static_cast<const char*>(p.w.scales) + next, size, 0, BLOCK);
    fetch(static_cast<const char*>(p.w.biases) + next, size, 0, BLOCK);
  }

  // Scales or biases of the block, a vector for each group.
  inline void put_scales(const void* stored, float* out) const {
    const int64_t groups = p.K / p.w.group, last = columns - 1;
    if (p.w.scale_type == Type::bf16) {  // two in a word
      const uint8_t* from[W];
      for (int64_t c = 0; c < W; c++) from[c] = static_cast<const uint8_t*>(stored) + 2 * (n + (c < last ? c : last)) * groups;
      for (int64_t g = 0; g < groups; g += 2 * W) {
        ints v[W];
        turn_words(from, 2 * g, 2 * (groups - g), v);
        for (int64_t i = 0; i < W && g + 2 * i < groups; i++) {
          store(out + (g + 2 * i) * W, as_floats(low_halves(v[i])));
          if (g + 2 * i + 1 < groups) store(out + (g + 2 * i + 1) * W, as_floats(high_halves(v[i])));
        }
      }
      return;
    }
    const bool floats = p.w.scale_type == Type::f32;
    if (!floats) widen(stored, p.w.scale_type, n * groups, columns * groups, words);
    const float* rows = floats ? static_cast<const float*>(stored) + n * groups : words;
    const uint8_t* from[W];
    for (int64_t c = 0; c < W; c++) from[c] = reinterpret_cast<const uint8_t*>(rows + (c < last ? c : last) * groups);
    for (int64_t g = 0; g < groups; g += W) {
      ints v[W];
      turn_words(from, 4 * g, 4 * (groups - g), v);
      for (int64_t i = 0; i < W && g + i < groups; i++) store(out + (g + i) * W, as_floats(v[i]));
    }
  }

  // The words of a unit: turned around now, or before.
  template <bool kept>
  [[gnu::always_inline]] inline void take(int64_t u, ints (&v)[UNIT_WORDS]) const {
    if constexpr (kept) {
#pragma GCC unroll 16
      for (int i = 0; i < UNIT_WORDS; i++) v[i] = load_words(words + (u * UNIT_WORDS + i) * W);
      return;
    }
    const int64_t from = u * UNIT_BYTES, left = p.w.row_bytes - from;
#pragma GCC unroll 4
    for (int i = 0; i < UNIT_WORDS; i += W) {
      ints some[W];
      turn_words(at, from + 4 * i, left - 4 * i, some);
#pragma GCC unroll 16
      for (int j = 0; j < W; j++) v[i + j] = some[j];
    }
  }

  // The rows from m on. What lies at `next` is fetched.
  template <int MR, bool kept>
  [[gnu::noinline]] void rows(int64_t m, const char* next) const {
    const float* x[MR];
    vec chain[MR];
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) x[r] = p.x[m + r], chain[r] = zero();
    const int64_t groups = p.K / BYTE_GROUP, factors = factors_at<bytes>(p.K), sums = weight_sums_at<bytes>(p.K);
    const bool near = p.w.row_bytes <= NEXT_NEAR;
    const int shift = p.w.group == 32 ? 0 : p.w.group == 64 ? 1 : 2;
    for (int64_t u = 0, g = 0; g < groups; u++) {
      ints v[UNIT_WORDS];
      take<kept>(u, v);
#pragma GCC unroll 4
      for (int j = 0; j < unit_groups; j++, g++) {
        if (j && g >= groups) break;
        if (next) {
          for (int i = 0; i < W * UNIT_BYTES / unit_groups; i += 64) near ? __builtin_prefetch(next + i, 0, 3) : __builtin_prefetch(next + i, 0, 2);
          next += W * UNIT_BYTES / unit_groups;
        }
        if ((g & ((1 << shift) - 1)) == 0) {
          const vec bias = load(biases + (g >> shift) * W);
#pragma GCC unroll 8
          for (int r = 0; r < MR; r++) chain[r] = add_times(chain[r], x[r] + sums + (g >> shift), bias);
        }
        constexpr bool apart = MR < 3;  // two sums of a group, which few rows would wait for: whole numbers do not tell
        ints sum[MR], other[MR];
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) sum[r] = all_words(0);
#pragma GCC unroll 2
        for (int byte = 0; byte < bytes; byte++) {  // of an element, the high one first
#pragma GCC unroll 8
          for (int r = 0; r < MR; r++) {
            if (byte) sum[r] = times_128(apart ? plus(sum[r], other[r]) : sum[r]);
            other[r] = all_words(0);
            if constexpr (bits == 8 && CENTRED) {
              int32_t start;
              memcpy(&start, x[r] + starts_at<bytes>(p.K) + g, 4);
              if (byte + 1 == bytes) sum[r] = plus(sum[r], all_words(start));
            }
          }
#pragma GCC unroll 8
          for (int i = 0; i < group_words; i++) {
            const ints stored = v[j * group_words + i];
            if constexpr (bits == 8) {
              const ints codes = CENTRED ? less_128(stored) : stored;
#pragma GCC unroll 8
              for (int r = 0; r < MR; r++) {
                ints& to = apart && i % 2 ? other[r] : sum[r];
                to = add_bytes<8>(to, codes, x[r] + bytes * (8 * g + i) + byte);
              }
            } else {
              const ints low = low_nibbles(stored), high = high_nibbles(stored);
#pragma GCC unroll 8
              for (int r = 0; r < MR; r++) sum[r] = add_bytes<4>(sum[r], low, x[r] + bytes * (8 * g + 2 * i) + byte);
#pragma GCC unroll 8
              for (int r = 0; r < MR; r++) {
                ints& to = apart ? other[r] : sum[r];
                to = add_bytes<4>(to, high, x[r] + bytes * (8 * g + 2 * i + 1) + byte);
              }
            }
          }
        }
        const vec scale = load(scales + (g >> shift) * W);
#pragma GCC unroll 8
        for (int r = 0; r < MR; r++) chain[r] = add_times(chain[r], x[r] + factors + g, times(to_floats(apart ? plus(sum[r], other[r]) : sum[r]), scale));
      }
    }
    const vec bias = p.bias ? load_any(p.bias, p.bias_type, n, 1, columns) : zero();
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) store_any(p.y[m + r], p.y_type, n, 1, columns, with_one_nan(p.bias ? plus(chain[r], bias) : chain[r]));
  }

  template <int MR, bool kept>
  void last_rows(int64_t m, const char* next) const {
    if constexpr (MR > 0) {
      if (p.rows - m == MR) return rows<MR, kept>(m, next);
      last_rows<MR - 1, kept>(m, next);
    }
  }

  void all_rows() const {
    const char* next = static_cast<const char*>(p.w.data) + (n + W) * p.w.row_bytes;
    if (p.rows <= BYTE_ROWS) return last_rows<BYTE_ROWS, false>(0, next);
    const int64_t units = (p.w.row_bytes + UNIT_BYTES - 1) / UNIT_BYTES;
    for (int64_t u = 0; u < units; u++) {
      ints v[UNIT_WORDS];
      take<false>(u, v);
      for (int i = 0; i < UNIT_WORDS; i++) store_words(words + (u * UNIT_WORDS + i) * W, v[i]);
    }
    int64_t m = 0;
    for (; m + BYTE_ROWS <= p.rows; m += BYTE_ROWS, next = nullptr) rows<BYTE_ROWS, true>(m, next);
    last_rows<BYTE_ROWS - 1, true>(m, nullptr);
  }
};

template <int bits, int bytes>
static void columns_of_bytes(const Product& p, int64_t first, int64_t last) {
  for (int64_t n = first; n < last; n += W) {
    if ((n - first) % BLOCK == 0) touch_ahead(p, first, last, n);
    ByteBlock<bits, bytes>(p, n, last - n < W ? last - n : W, p.scratch).all_rows();
  }
}

template <int bytes>
static void product_of_bytes(const Product& p, int64_t first, int64_t last) {
  p.w.bits == 4 ? columns_of_bytes<4, bytes>(p, first, last) : columns_of_bytes<8, bytes>(p, first, last);
}

static int64_t byte_floats(const Product& p) {
  const int64_t groups = p.K / p.w.group, units = p.rows <= BYTE_ROWS ? 0 : (p.w.row_bytes + UNIT_BYTES - 1) / UNIT_BYTES;
  const int64_t widened = p.w.scale_type == Type::f32 || p.w.scale_type == Type::bf16 ? 0 : groups * W, turned = units * UNIT_WORDS * W;
  return 2 * groups * W + (widened > turned ? widened : turned);
}

template <int bytes>
static bool prepare_bytes(const Weights& w, const void* x, Type type, int64_t stride, int64_t K, float* out) {
  return w.bits == 4 ? round_row<4, bytes>(x, type, stride, K, w.group, out) : round_row<8, bytes>(x, type, stride, K, w.group, out);
}
