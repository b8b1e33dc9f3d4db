// Rows of bfloat16 by packed codes or by bfloat16, two products an instruction (AVX-512 BF16 and VBMI). Included by
// linear.inl.
//
// Codes less a centre are exact in bfloat16, and so is every product; sums are floats. Row invariance: a chain per
// lane starts with (bias + scale * centre) * sum(x), sixteen groups at a time, and goes on unit after unit with
// scale * sum(x * (q - centre)). A lane takes codes of one group in a unit, so that lanes of several groups are scaled
// together. What is left of a row after its units may be half a unit, whose groups lie in the lanes twice. Rows that
// could overflow on that way, with infinities or NaN, are left to the products of single floats.

typedef __m512bh pair_vec;

constexpr int PAIRS = 2 * W;                  // elements of one vector
constexpr int UNIT = 128;                     // elements
constexpr int VECTORS = UNIT / PAIRS;         // of a unit
constexpr uint16_t LARGE = (127 + 112) << 7;  // 2 ^ 112 as bfloat16

static inline pair_vec as_pairs(__m512i v) { return reinterpret_cast<pair_vec>(v); }

static inline __m512i as_bfloat16(__m512 low, __m512 high) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)); }

static inline __m512i load_bytes(const uint8_t* p, int64_t bytes) {
  return _mm512_maskz_loadu_epi8(bytes < 64 ? (uint64_t(1) << bytes) - 1 : ~uint64_t(0), p);
}

// Four-bit codes: place l of vector t holds nibble t of 16-bit word l; in half a unit the words come twice, and places
// of the second half hold nibble t + 2. Only the low five bits of an index into 32 words count, and both halves of the
// table are alike.
struct Nibbles {
  typedef __m512i Codes;
  static constexpr int bits = 4, tables = 1;
  __m512i table;
  static int place(int t, int l) { return 4 * l + t; }
  static int half_place(int t, int l) { return 4 * (l % 16) + t + l / 16 * 2; }
  static inline Codes load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static inline Codes some(const uint8_t* p, int64_t bytes) { return load_bytes(p, bytes); }
  static inline Codes half(const uint8_t* p, int64_t bytes) {
    return _mm512_broadcast_i64x4(_mm512_castsi512_si256(load_bytes(p, bytes)));
  }
  inline pair_vec decode(Codes codes, int t) const {
    return as_pairs(_mm512_permutexvar_epi16(_mm512_srli_epi16(codes, unsigned(4 * t)), table));
  }
  inline pair_vec decode_half(Codes codes, int t) const {
    const __m512i shift = _mm512_inserti64x4(_mm512_set1_epi16(short(4 * t)), _mm256_set1_epi16(short(4 * t + 8)), 1);
    return as_pairs(_mm512_permutexvar_epi16(_mm512_srlv_epi16(codes, shift), table));
  }
};

struct PairAffine4 : Nibbles {
  static constexpr float centre = 8;
  PairAffine4() {
    __m512 values = _mm512_sub_ps(_mm512_cvtepi32_ps(lane_numbers()), _mm512_set1_ps(centre));
    table = as_bfloat16(values, values);
  }
};

struct PairFp4 : Nibbles {
  static constexpr float centre = 0;
  PairFp4() {
    __m512 values = _mm512_set_ps(-6, -4, -3, -2, -1.5f, -1, -0.5f, -0.0f, 6, 4, 3, 2, 1.5f, 1, 0.5f, 0);
    table = as_bfloat16(values, values);
  }
};

// Eight-bit codes: q - 127.5 is i + 0.5 or its negative, i from 0 to 127, looked up byte by byte. A unit's sixteens
// of codes are put in an order in which each fourth of a vector holds those of one 32.
struct PairAffine8 {
  struct Codes {
    __m512i first, second;
  };
  static constexpr int bits = 8, tables = 4;
  static constexpr float centre = 127.5f;
  __m512i low[2], high[2];

  PairAffine8() {
    for (int half = 0; half < 2; half++) {
      uint8_t bytes[2][64];
      for (int i = 0; i < 64; i++) {
        const uint32_t value = float_to_bits(float(64 * half + i) + 0.5f);
        bytes[0][i] = uint8_t(value >> 16), bytes[1][i] = uint8_t(value >> 24);
      }
      low[half] = _mm512_loadu_si512(bytes[0]), high[half] = _mm512_loadu_si512(bytes[1]);
    }
  }
  static int place(int t, int l) { return 32 * (l / 8) + 16 * (t / 2) + 8 * (t % 2) + l % 8; }
  static int half_place(int t, int l) { return 32 * (l / 8 % 2) + 16 * (l / 16) + 8 * t + l % 8; }
  static inline Codes ordered(__m512i a, __m512i b) {
    return {_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xdd)};
  }
  static inline Codes load(const uint8_t* p) { return ordered(_mm512_loadu_si512(p), _mm512_loadu_si512(p + 64)); }
  static inline Codes some(const uint8_t* p, int64_t bytes) {
    return ordered(load_bytes(p, bytes), bytes > 64 ? load_bytes(p + 64, bytes - 64) : _mm512_setzero_si512());
  }
  static inline Codes half(const uint8_t* p, int64_t bytes) {
    const __m512i a = load_bytes(p, bytes);
    return {_mm512_shuffle_i64x2(a, a, 0xd8), a};
  }
  inline pair_vec decode(const Codes& codes, int t) const { return decode_half(t / 2 ? Codes{codes.second, codes.second} : codes, t % 2); }
  inline pair_vec decode_half(const Codes& halves, int t) const {
    const __m512i sign = _mm512_set1_epi8(char(0x80)), codes = halves.first;
    const __mmask64 negative = _mm512_testn_epi8_mask(codes, sign);
    const __m512i i = _mm512_mask_sub_epi8(codes, negative, _mm512_set1_epi8(-1), codes);  // seven bits of it count
    const __m512i bottom = _mm512_permutex2var_epi8(low[0], i, low[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(high[0], i, high[1]);
    const __m512i top = _mm512_mask_add_epi8(magnitude, negative, magnitude, sign);
    return as_pairs(t ? _mm512_unpackhi_epi8(bottom, top) : _mm512_unpacklo_epi8(bottom, top));
  }
};

static int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Floats from the beginning of a row of pairs to the sums of its groups; both are in whole vectors.
static int64_t sums_of(int64_t K) { return rounded_up(K, UNIT) / 2; }

// Groups in a unit, at least one; scales of a column are stored in whole units.
template <int group>
constexpr int groups_of_unit = UNIT > group ? UNIT / group : 1;

// Affine scales and biases, read where they are stored: bfloat16.
template <int together>
struct StoredScales {
  const uint16_t *scales, *biases;  // (BLOCK, K / group)
  int64_t groups;

  // Scales of the groups of a unit in the lanes that read their codes.
  static inline vec lanes(const uint16_t* scale) {
    if constexpr (together == 1) {
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_set1_epi16(short(*scale)), 16));
    } else {
      uint64_t few = 0;
      memcpy(&few, scale, 2 * together);
      constexpr int log = together == 2 ? 3 : 2;  // of the lanes that share a scale
      const __m512i which = _mm512_slli_epi32(_mm512_srli_epi32(lane_numbers(), log), 16);
      return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, which, _mm512_set1_epi64((long long)few)));
    }
  }
  const uint16_t* at(int64_t column, int64_t group) const { return scales + column * groups + group; }

  // What the chains of NR columns begin with: (bias + scale * centre) * sum(x), lane l taking groups l, l + W, ...
  template <int MR, int NR>
  inline void start(vec (&now)[MR][NR], const float* const* sums, const int64_t (&column)[NR], float centre) const {
    for (int64_t g = 0; g < groups; g += W) {
      const __mmask16 some = groups - g < W ? __mmask16((1 << (groups - g)) - 1) : __mmask16(0xffff);
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++) {
        const int64_t first = column[c] * groups + g;
        const vec b = fma(widened(some, scales + first), ones(centre), widened(some, biases + first));
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) now[i][c] = fma(load(sums[i] + g), b, now[i][c]);
      }
    }
  }
  static inline vec widened(__mmask16 some, const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, p)), 16));
  }
};

// Scales alone, as floats: (BLOCK, K / group), a column in whole units.
template <int together>
struct FloatScales {
  const float* scales;
  int64_t stride;

  static inline vec lanes(const float* scale) {
    constexpr int log = together == 1 ? 4 : together == 2 ? 3 : together == 4 ? 2 : 1;
    const __m512i which = _mm512_srli_epi32(lane_numbers(), log);
    if constexpr (together == 1) return ones(*scale);
    if constexpr (together == 2) {
      return _mm512_permutexvar_ps(which, _mm512_castpd_ps(_mm512_castpd128_pd512(_mm_load_sd(reinterpret_cast<const double*>(scale)))));
    }
    if constexpr (together == 4) return _mm512_permutexvar_ps(which, _mm512_castps128_ps512(_mm_loadu_ps(scale)));
    return _mm512_permutexvar_ps(which, _mm512_castps256_ps512(_mm256_loadu_ps(scale)));
  }
  const float* at(int64_t column, int64_t group) const { return scales + column * stride + group; }
  template <int MR, int NR>
  inline void start(vec (&)[MR][NR], const float* const*, const int64_t (&)[NR], float) const {}
};

// `lanes` of S for the `count` groups at a row's end, repeated after `every` of them.
template <class S, int together, class Scale>
static inline vec tail_lanes(const Scale* scale, int64_t count, int every) {
  Scale few[together] = {};
  for (int g = 0; g < together; g++) {
    const int from = every > 0 ? g % every : 0;
    if (from < count) few[g] = scale[from];
  }
  return S::lanes(few);
}

template <class D, int group>
using ScalesOf = std::conditional_t<D::centre == 0, FloatScales<groups_of_unit<group>>, StoredScales<groups_of_unit<group>>>;

template <class D, int group>
struct PairBlock {
  static constexpr int64_t near = 2 * NEAR;
  static constexpr int rows = 8;  // at a time
  static constexpr int together = groups_of_unit<group>;
  using S = ScalesOf<D, group>;
  const Product& p;
  const D& code;
  const uint8_t* codes;  // of the first column
  S scales;
  const char *next_scales, *next_biases;  // as stored, of the block after this one

  template <int MR>
  static constexpr int columns_of_tile = MR <= 2 ? 4 : 2;

  template <int MR, int NR>
  inline void follow(vec (&acc)[MR][BLOCK], const float* const* x, int64_t j, int64_t columns, int64_t from, int64_t to) const {
    if (from == 0) {
      const int64_t bytes = BLOCK * (p.K / group) * size_of(p.w.scale_type);
      fetch(next_scales, bytes, j, NR);
      if (next_biases) fetch(next_biases, bytes, j, NR);
    }
    constexpr int64_t unit_bytes = UNIT * D::bits / 8;
    const int64_t whole = from + (to - from) / UNIT * UNIT;
    Chains<MR, NR> chains;
    chains.take(acc, j, from == 0);
    const uint8_t* at[NR];
    decltype(scales.at(0, 0)) scale[NR];
    int64_t column[NR];
#pragma GCC unroll 8
    for (int c = 0; c < NR; c++) {
      column[c] = j + c < columns ? j + c : columns - 1;
      at[c] = codes + column[c] * p.w.row_bytes + from * D::bits / 8;
      scale[c] = scales.at(column[c], from / group);
    }
    if (from == 0 && D::centre != 0) {
      const float* sums[MR];
      for (int i = 0; i < MR; i++) sums[i] = x[i] + sums_of(p.K);
      scales.start(chains.now, sums, column, D::centre);
    }
    const uint8_t* next = codes + ahead(p.w.row_bytes, j, from * D::bits / 8, to * D::bits / 8);
    // V vectors of x from element `first` on with those of the columns, scaled by s
    auto add = [&]<int V>(int64_t first, const pair_vec (&w)[NR][V], const vec (&s)[NR]) {
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) {
        vec sum[NR];
#pragma GCC unroll 8
        for (int c = 0; c < NR; c++) sum[c] = zero();
#pragma GCC unroll 8
        for (int t = 0; t < V; t++) {
          const pair_vec v = reinterpret_cast<pair_vec>(NR > 1 ? held(load(x[i] + first / 2 + t * W)) : load(x[i] + first / 2 + t * W));
#pragma GCC unroll 8
          for (int c = 0; c < NR; c++) sum[c] = _mm512_dpbf16_ps(sum[c], v, w[c][t]);
        }
#pragma GCC unroll 8
        for (int c = 0; c < NR; c++) chains.now[i][c] = fma(sum[c], s[c], chains.now[i][c]);
      }
    };
    auto unit = [&](int64_t first, const typename D::Codes (&stored)[NR], const vec (&s)[NR]) {
      pair_vec w[NR][VECTORS];
      const D& now = D::tables > 1 ? *held(&code) : code;  // many tables stay in memory: chains need the registers
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++)
#pragma GCC unroll 8
        for (int t = 0; t < VECTORS; t++) w[c][t] = now.decode(stored[c], t);
      add(first, w, s);
    };
    int64_t first = from;
    for (; first < whole; first += UNIT, next += NR * unit_bytes) {
      typename D::Codes stored[NR];
      vec s[NR];
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++) {
#pragma GCC unroll 8
        for (int64_t byte = 0; byte < unit_bytes; byte += 64) __builtin_prefetch(next + c * unit_bytes + byte, 0, 2);
        stored[c] = D::load(at[c]);
        s[c] = S::lanes(scale[c]);
      }
      unit(first, stored, s);
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++) {
        at[c] = held(at[c] + unit_bytes);
        scale[c] = held(scale[c] + together);
      }
    }
    if (first < to) {  // x is zero behind the row's end
      const int64_t bytes = (to - first) * D::bits / 8, groups = (to - first) / group;
      vec s[NR];
      for (int64_t byte = 0; byte < NR * bytes; byte += 64) __builtin_prefetch(next + byte, 0, 2);
      if (to - first <= UNIT / 2) {
        const D& now = D::tables > 1 ? *held(&code) : code;
        pair_vec w[NR][VECTORS / 2];
#pragma GCC unroll 8
        for (int c = 0; c < NR; c++) {
          const typename D::Codes stored = D::half(at[c], bytes);
#pragma GCC unroll 8
          for (int t = 0; t < VECTORS / 2; t++) w[c][t] = now.decode_half(stored, t);
          s[c] = tail_lanes<S, together>(scale[c], groups, together / 2);
        }
        add(first, w, s);
      } else {
        typename D::Codes stored[NR];
        for (int c = 0; c < NR; c++) stored[c] = D::some(at[c], bytes), s[c] = tail_lanes<S, together>(scale[c], groups, together);
        unit(first, stored, s);
      }
    }
    chains.put_back(acc, j, to == p.K);
  }
};

// A block of columns of bfloat16. A lane's chain takes two elements of every vector.
struct PairPlainBlock {
  static constexpr int64_t near = 2 * NEAR;
  static constexpr int rows = 4;  // at a time
  const Product& p;
  const uint8_t* data;  // of the first column

  template <int MR>
  static constexpr int columns_of_tile = 4;

  template <int MR, int NR>
  inline void follow(vec (&acc)[MR][BLOCK], const float* const* x, int64_t j, int64_t columns, int64_t from, int64_t to) const {
    Chains<MR, NR> chains;
    chains.take(acc, j, from == 0);
    const uint8_t* at[NR];
#pragma GCC unroll 8
    for (int c = 0; c < NR; c++) at[c] = data + (j + c < columns ? j + c : columns - 1) * p.w.row_bytes;
    const uint8_t* next = data + ahead(p.w.row_bytes, j, from * 2, to * 2);
    auto add = [&](int64_t k, const __m512i (&w)[NR]) {
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) {
        const pair_vec v = reinterpret_cast<pair_vec>(held(load(x[i] + k / 2)));
#pragma GCC unroll 8
        for (int c = 0; c < NR; c++) chains.now[i][c] = _mm512_dpbf16_ps(chains.now[i][c], v, as_pairs(w[c]));
      }
    };
    int64_t k = from;
    for (; k + PAIRS <= to; k += PAIRS, next += NR * 64) {
      __m512i w[NR];
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++) {
        __builtin_prefetch(next + 64 * c, 0, 2);
        w[c] = _mm512_loadu_si512(at[c] + 2 * k);
      }
      add(k, w);
    }
    if (k < to) {  // x is zero behind the row's end
      __m512i w[NR];
#pragma GCC unroll 8
      for (int c = 0; c < NR; c++) w[c] = load_bytes(at[c] + 2 * k, 2 * (to - k));
      add(k, w);
    }
    chains.put_back(acc, j, to == p.K);
  }
};

template <int MR, class Block>
static void pair_rows(const Product& p, const Block& block, int64_t m, int64_t n, int64_t columns) {
  follow_block<MR, Block::template columns_of_tile<MR>>(p, block, p.K, m, n, columns);
}

// The rows from m on, at most MR.
template <int MR, class Block>
static void last_pair_rows(const Product& p, const Block& block, int64_t m, int64_t n, int64_t columns) {
  if constexpr (MR > 0) {
    if (p.rows - m == MR) return pair_rows<MR>(p, block, m, n, columns);
    last_pair_rows<MR - 1>(p, block, m, n, columns);
  }
}

// Every row, some at a time.
template <class Block>
static void all_pair_rows(const Product& p, const Block& block, int64_t n, int64_t columns) {
  int64_t m = 0;
  for (; m + Block::rows <= p.rows; m += Block::rows) pair_rows<Block::rows>(p, block, m, n, columns);
  last_pair_rows<Block::rows - 1>(p, block, m, n, columns);
}

// Floats of a thread for the scales of a block.
template <class D, int group>
static int64_t scale_floats(const Product& p) {
  return D::centre == 0 ? BLOCK * rounded_up(p.K / group, groups_of_unit<group>) + W : 0;
}

template <class D, int group>
static ScalesOf<D, group> scales_of(const Product& p, int64_t n, int64_t count) {
  const int64_t groups = p.K / group;
  if constexpr (D::centre != 0) {
    return {static_cast<const uint16_t*>(p.w.scales) + n * groups, static_cast<const uint16_t*>(p.w.biases) + n * groups, groups};
  } else {
    const int64_t stride = rounded_up(groups, groups_of_unit<group>);
    for (int64_t j = 0; j < count; j++) {
      widen(p.w.scales, p.w.scale_type, (n + j) * groups, groups, p.scratch + j * stride);
      for (int64_t g = groups; g < stride; g++) p.scratch[j * stride + g] = 0;
    }
    return {p.scratch, stride};
  }
}

template <class D, int group>
static void pair_product(const Product& p, int64_t first, int64_t last) {
  const D code;
  for (int64_t n = first; n < last; n += BLOCK) {
    const int64_t count = last - n < BLOCK ? last - n : BLOCK;
    const uint8_t* codes = static_cast<const uint8_t*>(p.w.data) + n * p.w.row_bytes;
    const int64_t after = (n + BLOCK) * (p.K / group) * size_of(p.w.scale_type);
    const PairBlock<D, group> block{p, code, codes, scales_of<D, group>(p, n, count), static_cast<const char*>(p.w.scales) + after,
                                    p.w.biases ? static_cast<const char*>(p.w.biases) + after : nullptr};
    all_pair_rows(p, block, n, count);
  }
}

#include "columns.inl"

static void plain_pair_product(const Product& p, int64_t first, int64_t last) {
  if (columns_in_lanes(p.w, p.K)) return lane_product(p, first, last);
  for (int64_t n = first; n < last; n += BLOCK) {
    all_pair_rows(p, PairPlainBlock{p, static_cast<const uint8_t*>(p.w.data) + n * p.w.row_bytes}, n, last - n < BLOCK ? last - n : BLOCK);
  }
}

// f.template operator()<D, group>() for the codes of w.
template <class F>
static auto with_pairs(const Weights& w, F&& f) {
  if (w.format == Format::fp4) return w.group == 16 ? f.template operator()<PairFp4, 16>() : f.template operator()<PairFp4, 32>();
  if (w.bits == 4) {
    if (w.group == 32) return f.template operator()<PairAffine4, 32>();
    return w.group == 64 ? f.template operator()<PairAffine4, 64>() : f.template operator()<PairAffine4, 128>();
  }
  if (w.group == 32) return f.template operator()<PairAffine8, 32>();
  return w.group == 64 ? f.template operator()<PairAffine8, 64>() : f.template operator()<PairAffine8, 128>();
}

static bool pairs(const Weights& w, Type type) {
  if (type != Type::bf16) return false;
  if (w.format == Format::dense) return w.type == Type::bf16;
  return w.format == Format::fp4 || (w.format == Format::affine && w.scale_type == Type::bf16 && (w.bits == 4 || w.bits == 8));
}

// V vectors of elements in the order their codes are decoded in.
template <int V>
static inline void order_unit(const __m512i* order, const uint16_t* from, __m512i (&out)[V]) {
  __m512i in[V];
  for (int t = 0; t < V; t++) in[t] = _mm512_loadu_si512(from + t * PAIRS);
  for (int t = 0; t < V; t++) {
    out[t] = _mm512_permutex2var_epi16(in[0], order[t], in[1]);
    if constexpr (V == 4) {
      const __mmask32 second = _mm512_test_epi16_mask(order[t], _mm512_set1_epi16(2 * PAIRS));
      out[t] = _mm512_mask_mov_epi16(out[t], second, _mm512_permutex2var_epi16(in[2], order[t], in[3]));
    }
  }
}

// Sums of the groups of ordered vectors, one after the other: of what the lanes of a group add up, the tree.
template <int together, int V>
static inline void sum_groups(const __m512i (&x)[V], float* sums) {
  const pair_vec one = as_pairs(_mm512_set1_epi16(0x3f80));
  vec total = zero();
  for (int t = 0; t < V; t++) total = _mm512_dpbf16_ps(total, as_pairs(x[t]), one);
  if (V < VECTORS) total = plus(total, _mm512_shuffle_f32x4(total, total, 0x4e));  // every group is there twice
  if (together < 2 && V == VECTORS) total = plus(total, _mm512_shuffle_f32x4(total, total, 0x4e));
  if (together < 4) total = plus(total, _mm512_shuffle_f32x4(total, total, 0xb1));
  total = plus(total, _mm512_permute_ps(total, 0x4e));
  total = plus(total, _mm512_permute_ps(total, 0xb1));
  const __m512i first = _mm512_slli_epi32(lane_numbers(), together == 4 ? 2 : together == 2 ? 3 : 4);
  _mm_storeu_ps(sums, _mm512_castps512_ps128(_mm512_permutexvar_ps(first, total)));
}

template <class D>
struct Order {
  __m512i unit[VECTORS], half[VECTORS / 2];
  Order() {
    uint16_t places[PAIRS];
    for (int t = 0; t < VECTORS; t++) {
      for (int l = 0; l < PAIRS; l++) places[l] = uint16_t(D::place(t, l));
      unit[t] = _mm512_loadu_si512(places);
    }
    for (int t = 0; t < VECTORS / 2; t++) {
      for (int l = 0; l < PAIRS; l++) places[l] = uint16_t(D::half_place(t, l));
      half[t] = _mm512_loadu_si512(places);
    }
  }
};

template <class D, int group>
static bool order_row(const uint16_t* x, int64_t stride, int64_t K, float* out) {
  static const Order<D> order;
  constexpr int together = groups_of_unit<group>;
  __m512i largest = _mm512_setzero_si512();
  uint16_t* to = reinterpret_cast<uint16_t*>(out);
  float* sums = out + sums_of(K);
  auto put = [&](const auto& vectors) {
    for (const __m512i& v : vectors) {
      _mm512_storeu_si512(to, v);
      to += PAIRS;
      largest = _mm512_max_epu16(largest, _mm512_and_si512(v, _mm512_set1_epi16(0x7fff)));
    }
    if constexpr (D::centre != 0) sum_groups<together>(vectors, sums);
  };
  for (int64_t k = 0; k < K; k += UNIT, sums += together) {
    const int64_t count = K - k < UNIT ? K - k : UNIT;
    uint16_t room[UNIT];
    const uint16_t* from = x + k * stride;
    if (stride != 1 || count < UNIT) {
      for (int64_t i = 0; i < count; i++) room[i] = from[i * stride];
      memset(room + count, 0, size_t(2 * (UNIT - count)));
      from = room;
    }
    if (count <= UNIT / 2) {
      __m512i half[VECTORS / 2];
      order_unit(order.half, from, half);
      put(half);
    } else {
      __m512i unit[VECTORS];
      order_unit(order.unit, from, unit);
      put(unit);
    }
  }
  for (int64_t g = K / group; g < rounded_up(K / group, W); g++) out[sums_of(K) + g] = 0;
  return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(short(LARGE))) == 0;
}

static bool prepare_pairs(const Weights& w, const void* x, int64_t stride, int64_t K, float* out) {
  const uint16_t* from = static_cast<const uint16_t*>(x);
  if (w.format == Format::dense) {
    uint16_t* to = reinterpret_cast<uint16_t*>(out);
    if (stride == 1) memcpy(to, from, size_t(2 * K));
    for (int64_t k = 0; stride != 1 && k < K; k++) to[k] = from[k * stride];
    for (int64_t k = K; k < rounded_up(K, PAIRS); k++) to[k] = 0;
    return true;
  }
  return with_pairs(w, [&]<class D, int group>() { return order_row<D, group>(from, stride, K, out); });
}

static void product_of_pairs(const Product& p, int64_t first, int64_t last) {
  if (p.w.format == Format::dense) return plain_pair_product(p, first, last);
  with_pairs(p.w, [&]<class D, int group>() { pair_product<D, group>(p, first, last); });
}

static int64_t pair_scratch(const Product& p) {
  if (p.w.format == Format::dense) return columns_in_lanes(p.w, p.K) && !p.w.lanes ? LANE_COLUMNS * pairs_of(p.K) : 0;
  return with_pairs(p.w, [&]<class D, int group>() { return scale_floats<D, group>(p); });
}
